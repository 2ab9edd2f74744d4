"""Keys of CUDA tensors on a real GPU: `pytest -m cuda`."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from vectors import make

from omni_tensor_key import UncacheableTensorError, _core, tensor_key, tensor_keys
from omni_tensor_key.keys.host_copy import to_host

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("gpu")]

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 64 << 20
KEYED = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip
LONG = 200_000_000  # cycles: a tenth of a second

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def by_unit(tensors: list[torch.Tensor]) -> list[Any]:
    keys = _core.tensor_keys(tensors, to_host, LIMIT, True)
    assert isinstance(keys, list)
    return keys


def check(tensors: list[torch.Tensor]) -> None:
    """dtype, shape, device and every byte are those of torch's copies, and the digests those of the xxhash package."""
    keys = by_unit(tensors)
    by_host_copy = _core.tensor_keys(tensors, to_host, LIMIT, False)
    assert keys == by_host_copy
    assert list(map(hash, keys)) == list(map(hash, by_host_copy))
    contents = [tensor.cpu().contiguous().numpy().tobytes() for tensor in tensors]
    assert [key.digest for key in keys] == list(map(xxhash.xxh3_128_digest, contents))


def test_vectors() -> None:
    digests = make.load()
    whole = torch.frombuffer(bytearray(make.content(max(digests))), dtype=torch.uint8).cuda()
    keys = by_unit([whole[:length] for length in digests])
    assert [key.hexdigest for key in keys] == list(digests.values())


def test_layouts() -> None:
    ids = torch.arange(4096, device="cuda").reshape(64, 64)
    check(
        [
            ids, ids.T, ids[:, 1:9], ids[::2, ::3], ids[:1].expand(9, 64), ids[2, 3], ids.flip(0), ids.flip(0)[:, ::5],
            ids.as_strided((3, 4), (2, 1), 5), ids.as_strided((1, 3, 1), (999, 2, 777), 1),
            ids.view(4, 4, 4, 4, 4, 4)[:, 1:, ::2, :3, 1:3, ::3].permute(5, 3, 1, 0, 2, 4),
        ]
    )  # fmt: skip


def test_every_alignment() -> None:
    content = torch.randint(0, 256, (70_000,), dtype=torch.uint8, device="cuda")
    for length in (1, 15, 16, 239, 240, 241, 1024, 8191, 32_768 + 63, 66_000):
        check([content[offset : offset + length] for offset in range(17)])


def test_random_layouts(rng: random.Random) -> None:
    for _ in range(40):
        tensors = []
        for _ in range(rng.randrange(1, 34)):
            dtype = rng.choice(KEYED)
            shape = [rng.randrange(1, 12) for _ in range(rng.randrange(6))]
            strides = [rng.randrange(0, 40) for _ in shape]
            offset = rng.randrange(20)
            reach = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            content = torch.randint(0, 2, (reach * dtype.itemsize,), dtype=torch.uint8, device="cuda")
            tensor = content.view(dtype).as_strided(shape, strides, offset)
            tensors.append(tensor.permute(rng.sample(range(tensor.ndim), tensor.ndim)))
        check(tensors)


@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) + 8, 8 << 20])
def test_large_tensors(nbytes: int) -> None:
    ids = torch.randint(-(1 << 62), 1 << 62, (nbytes // 8,), device="cuda")
    check([ids, ids[: ids.numel() // 64 * 64].reshape(-1, 64).T])


@pytest.mark.parametrize("where", ["default stream", "side stream"])
def test_what_is_queued_before_is_read(where: str) -> None:
    stream = torch.cuda.current_stream() if where == "default stream" else torch.cuda.Stream()
    for value in range(1, 6):
        ids = torch.zeros(1024, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            ids.fill_(value)
            key = tensor_key(ids)
        assert key.digest == tensor_key(torch.full((1024,), value)).digest


def test_only_the_current_stream_is_waited_for() -> None:
    ids = torch.arange(1024, device="cuda")
    busy, side = torch.cuda.Stream(), torch.cuda.Stream()
    tensor_key(ids)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(20 * LONG)
    with torch.cuda.stream(side):
        tensor_key(ids)
    assert not busy.query()
    busy.synchronize()


def test_graph_capture() -> None:
    ids = torch.arange(1024, device="cuda")
    out = torch.zeros_like(ids)
    tensor_key(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(UncacheableTensorError) as caught:
            tensor_key(ids)
        out.copy_(ids + 1)
    assert caught.value.reason == "graph_capture"
    graph.replay()
    assert torch.equal(out, ids + 1)


@pytest.mark.parametrize("warm", [True, False])
def test_a_capture_on_another_thread_goes_on(warm: bool) -> None:
    ids = torch.arange(1024, device="cuda")
    # Not warm: staging memory must be allocated during the capture.
    tensors = [ids] if warm else [torch.arange(1 << 19, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    keys: list[Any] = []
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros_like(ids)
    side = torch.cuda.Stream()

    def work() -> None:
        with torch.cuda.stream(side):
            keys.extend(by_unit(tensors))

    with torch.cuda.graph(graph):  # in the mode that forbids unsafe calls on all threads
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        out.copy_(ids + 1)
    graph.replay()
    assert torch.equal(out, ids + 1)
    assert [key.digest for key in keys] == [tensor_key(tensor.cpu()).digest for tensor in tensors]


def test_threads_with_streams_of_their_own() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(100):
                    tensors = [torch.full((500 + i,), seed * 1000 + i + j, device="cuda") for j in range(1 + i % 5)]
                    found = [key.digest for key in tensor_keys(tensors)]
                    wanted = [tensor_key(torch.full((500 + i,), seed * 1000 + i + j)).digest for j in range(1 + i % 5)]
                    assert found == wanted
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_gil_is_free_during_the_wait() -> None:
    ids = torch.arange(100, device="cuda")
    tensor_key(ids)
    torch.cuda._sleep(10 * LONG)
    turns = 0
    done = threading.Event()

    def work() -> None:
        tensor_key(ids)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.01):
        turns += 1
    thread.join()
    assert turns > 10


def test_devices(two_gpus: None) -> None:
    ids = torch.arange(1024)
    on = [ids.to(f"cuda:{i}") for i in (1, 0, 1)]
    keys = [by_unit([tensor])[0] for tensor in on]
    assert keys == tensor_keys(on)  # several devices in one call: copied by torch
    assert [key.device for key in keys] == ["cuda:1", "cuda:0", "cuda:1"]
    assert keys[0] == keys[2] != keys[1]
    with torch.cuda.stream(torch.cuda.Stream(1)), torch.cuda.device(0):
        check(on[:1])
