"""Processes, threads, modes and devices: cases 24 to 32."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from upstream.fresh_process import FreshProcesses

from omni_tensor_key import tensor_key

from .support import IDS, MASK, Pipeline, all_agree, installed, outcome

pytestmark = pytest.mark.usefixtures("active")
TESTS = Path(__file__).resolve().parents[1]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

RANK = """
import gc, random, sys, time
import torch
import omni_tensor_key
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream
omni_tensor_key.activate()
assert omni_tensor_key.is_active()

class Pipeline:
    def encode_prompt(self, ids, mask=None, prompt_embeds=None):
        return torch.ones(1)

pipeline, rng, rank = Pipeline(), random.Random(0), int(sys.argv[1])
cache = upstream.install_prompt_embed_cache(pipeline, max_size=8)
ballast = []
for call in range(500):
    ids = torch.tensor([rng.randrange(16)])
    mask = rng.choice([None, "text", [1], torch.ones(2, dtype=torch.bool), torch.ones(2), object, {"a": ids}])
    before = cache.stats()
    pipeline.encode_prompt(ids, mask, prompt_embeds=rng.choice([None, None, None, ids]))
    if rank:  # another rank has another heap, other temporaries and another pace
        ballast.append([bytes(rank * call), object()])
        call % 50 or (gc.collect(), time.sleep(0.001))
    print("".join(name[0] for name in ("hits", "misses", "bypassed") if cache.stats()[name] > before[name]), end="")
print()
print(repr(omni_tensor_key.tensor_key(torch.arange(5))), hash(omni_tensor_key.tensor_key(torch.arange(5))))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What two processes with other hash seeds print for the same calls."""
    folder = tmp_path_factory.mktemp("ranks")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank)],
            cwd=folder,
            env=os.environ | {"PYTHONHASHSEED": str(seed), "VLLM_LOGGING_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, seed in enumerate((1, 20))
    ]
    printed = []
    for process in running:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        printed.append(output.splitlines()[-2:])
    return printed


def test_case_24_digests_and_hashes_do_not_depend_on_the_process(ranks: list[list[str]]) -> None:
    assert ranks[0][1] == ranks[1][1]
    assert ranks[0][1] == f"{tensor_key(torch.arange(5))!r} {hash(tensor_key(torch.arange(5)))}"


def test_case_25_ranks_that_see_the_same_calls_decide_the_same(ranks: list[list[str]]) -> None:
    decisions = ranks[0][0]
    assert len(decisions) == 500
    assert set(decisions) == set("hmb")
    assert decisions == ranks[1][0]


ON_A_DEVICE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
import device_backend
device = device_backend.load()
from omni_tensor_key import UncacheableTensorError, tensor_key, tensor_keys
cpu = torch.arange(6).reshape(2, 3)
"""


def test_case_26_the_tensors_own_device_is_read_and_the_current_one_stays(run_python: RunPython) -> None:
    code = """
first, second = cpu.to("otkdev:0"), (cpu + 1).to("otkdev:1")
for current in (0, 1):
    device.set_device(current)
    keys = tensor_keys([first, second, first.T])
    assert device.current_device() == current
    assert [key.digest for key in keys] == [tensor_key(t).digest for t in (cpu, cpu + 1, cpu.T)]
    print([key.device for key in keys])
"""
    result = run_python(ON_A_DEVICE + code)
    assert result.stdout.splitlines() == ["['privateuseone:0', 'privateuseone:1', 'privateuseone:0']"] * 2, (
        result.stderr
    )


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
def test_case_26_on_two_gpus() -> None:
    tensor = IDS.to("cuda:1")
    with torch.cuda.device(0):
        assert tensor_key(tensor).digest == tensor_key(IDS).digest
        assert torch.cuda.current_device() == 0


@pytest.mark.cuda
def test_case_27_queued_work_is_waited_for() -> None:
    ids = torch.zeros(1 << 17, dtype=torch.int64, device="cuda")
    expected = tensor_key(torch.arange(1 << 17)).digest
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            ids.zero_()
            torch.cuda._sleep(10_000_000)
            ids.copy_(torch.arange(1 << 17, device="cuda"))
            assert tensor_key(ids).digest == expected


def test_case_28_a_capture_bypasses_before_anything_is_read(run_python: RunPython) -> None:
    code = """
ids = cpu.to("otkdev:0")
device.is_current_stream_capturing = lambda: True
device.reset_counters()
try:
    tensor_keys([cpu, ids])
except UncacheableTensorError as error:
    print(error.reason, device.copies_to_host())
device.is_current_stream_capturing = lambda: False
print(tensor_key(ids).digest == tensor_key(cpu).digest)
"""
    result = run_python(ON_A_DEVICE + code)
    assert result.stdout.splitlines() == ["graph_capture 0", "True"], result.stderr


@pytest.mark.cuda
def test_case_28_during_a_real_capture() -> None:
    pipeline, cache = installed()
    ids = IDS.cuda()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pipeline.encode_prompt(ids)
    assert outcome(cache) == (0, 0, 1)


NO_CUDA = """
import torch
def never(*args):
    raise AssertionError("CUDA was initialized")
torch.cuda._lazy_init = torch._C._cuda_init = never
import omni_tensor_key
from omni_tensor_key import plugin
plugin.register()
from vllm_omni.diffusion.cache import prompt_embed_cache
assert omni_tensor_key.is_active()
assert omni_tensor_key.tensor_key(torch.arange(3)).device == "cpu"
assert not torch.cuda.is_initialized()
assert "libcuda.so" not in open("/proc/self/maps").read()
print("untouched")
"""


def test_case_29_cuda_is_not_touched_at_import_or_activation(fresh: FreshProcesses) -> None:
    assert "untouched" in fresh.check(NO_CUDA).output


def test_case_30_threads_at_capacity() -> None:
    class Echo(Pipeline):
        def encode_prompt(self, prompt_ids: Any) -> Any:
            return prompt_ids * 2

    pipeline, cache = installed(Echo(), max_size=2)
    failures: list[object] = []

    def work(seed: int) -> None:
        try:
            for step in range(500):
                value = (step * 7 + seed) % 5
                found = pipeline.encode_prompt(torch.full((64,), value))
                if not torch.equal(found, torch.full((64,), 2 * value)):
                    failures.append(value)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(outcome(cache)) == 8 * 500
    assert cache.stats()["size"] <= 2


@pytest.mark.filterwarnings("ignore")  # torch.compile has its own to say of what it cannot trace
def test_case_31_a_compiled_caller_gets_the_right_results() -> None:
    pipeline, cache = installed()

    def caller(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return pipeline.encode_prompt(ids * 1, mask) + 1

    compiled = torch.compile(caller, backend="eager")
    for _ in range(3):
        assert compiled(IDS, MASK)[0, 0, 0] == 2  # the first run of the encoder, plus 1
        assert compiled(IDS + 1, MASK)[0, 0, 0] == 3
    assert outcome(cache) == (4, 2, 0)
    torch._dynamo.reset()


def test_case_32_a_value_made_in_one_mode_is_served_in_another_as_upstream_serves_it() -> None:
    assert all_agree(IDS, (IDS.tolist(),)) is False  # two keys: a tensor's and a list's
    for given in (IDS, IDS.tolist()):
        pipeline, cache = installed()
        with torch.inference_mode():
            made = pipeline.encode_prompt(given)
        served = pipeline.encode_prompt(given)
        assert outcome(cache) == (1, 1, 0)
        assert torch.equal(made, served)
        assert served.is_inference()  # upstream stores what the encoder returned
    with torch.inference_mode():
        inside = IDS.clone()
    assert inside.is_inference()
    assert all_agree(inside, IDS)
