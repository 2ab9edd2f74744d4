"""The engine with spawned workers, in which the extension comes on by itself, and the demo that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from .conftest import EXAMPLE, OFF, ON, PROMPTS, ROLLOUT, SAMPLES, Drive, pair, run_script, scenario

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("variables", "code"), [({}, 0), ({"VLLM_PLUGINS": "omni_cpu"}, 1)], ids=["on", "not named"])
def test_the_demo_fails_where_the_extension_is_not_loaded(tmp_path: Path, variables: dict[str, str], code: int) -> None:
    """VLLM_PLUGINS without the package's name is one way in which that happens."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    picture = tmp_path / "sheet.png"
    done = run_script(EXAMPLE / "rollout.py", "--n=2", f"--prompts={prompts}", f"--picture={picture}", **variables)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count("4 of 4") == 4, done.stdout  # bit-equal in every rollout
    assert ("expected (2, 2, 2, 0)" in done.stdout) == bool(code)
    with Image.open(picture) as sheet:
        assert sheet.width > sheet.height


def test_ranks_decide_alike(drive: Drive) -> None:
    """Two tensor-parallel ranks over gloo; every second hit runs the encoder again, in a collective."""
    events = ["rollout", *ROLLOUT[1:]], ["counts_of_ranks"]
    options = {
        "distributed_executor_backend": "mp",
        "worker_extension_cls": "ranks.RanksWorker",
        "num_gpus": 2,
        "tensor_parallel_size": 2,
        "env": {"OMNI_TENSOR_KEY_VERIFY": "0.5"},
    }
    runs = drive(pair("two ranks", *events, **options))
    (off, _), (on, (ranks,)) = runs["two ranks off"], runs["two ranks on"]
    assert off["counts"] == OFF
    assert on["samples"] == off["samples"]
    assert len(ranks) == 2
    assert len({rank["pid"] for rank in ranks}) == 2
    different = ("pid", "seconds")
    first, second = ({name: value for name, value in rank.items() if name not in different} for rank in ranks)
    assert first == second
    runs_of_encoder, hits, misses, bypassed = on["counts"]
    assert [hits, misses, bypassed] == ON[1:]
    assert runs_of_encoder == misses + hits // 2


def test_verification_finds_a_weight_written_behind_the_packages_back(drive: Drive) -> None:
    """In-process, with every hit verified; the write goes through `.data`, which nothing can see."""
    events = ROLLOUT, ROLLOUT, ["write_weight"], ROLLOUT, ["counts_of_ranks"]
    run = scenario(True, *events, env={"OMNI_TENSOR_KEY_VERIFY": "1"}, worker_extension_cls="ranks.RanksWorker")
    first, second, _, third, ((counts,),) = drive({"on": run}, OMNI_TENSOR_KEY_VERIFY="1")["on"]
    assert second["samples"] == first["samples"] != third["samples"]
    assert second["counts"][0] == SAMPLES
    assert counts["stats"]["differed"]
