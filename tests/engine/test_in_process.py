"""The engine with its worker in the same process: every way in which the runner calls a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import OFF, ON, PROMPTS, ROLLOUT, SAMPLES, Drive, N, pair

SYNCED = [["sync_weights", part, 1.25] for part in ("transformer", "text_encoder")]


@pytest.fixture(scope="module")
def runs(drive: Drive) -> dict[str, list[Any]]:
    return drive(
        pair("synced", ROLLOUT, SYNCED[0], ROLLOUT, SYNCED[1], ROLLOUT)
        | pair("slept", ROLLOUT, ["sleep"], ["counts"], ROLLOUT, enable_sleep_mode=True)
        | pair("steps", ROLLOUT, ROLLOUT, step_execution=True)
        # The requests of a batch are those that come within the wait, so that off and on have the same batches.
        | pair("batches", ROLLOUT, ROLLOUT, max_num_seqs=N // 2, request_batch_max_wait_ms=500)
    )


def _rollouts(results: list[Any]) -> list[dict[str, Any]]:
    return [result for result in results if isinstance(result, dict)]


@pytest.mark.parametrize("name", ["synced", "slept", "steps", "batches"])
def test_samples_are_those_without_the_extension(runs: dict[str, list[Any]], name: str) -> None:
    off, on = (_rollouts(runs[f"{name} {state}"]) for state in ("off", "on"))
    assert [rollout["samples"] for rollout in on] == [rollout["samples"] for rollout in off]
    assert len(set(on[0]["samples"])) == SAMPLES, "samples that are all the same would prove nothing"


def test_every_prompt_is_encoded_once_per_set_of_weights(runs: dict[str, list[Any]]) -> None:
    off, on = (_rollouts(runs[f"synced {state}"]) for state in ("off", "on"))
    assert [rollout["counts"] for rollout in off] == [OFF] * 3
    assert [rollout["counts"] for rollout in on] == [ON] * 3
    samples = [tuple(rollout["samples"]) for rollout in on]
    assert len(set(samples)) == 3, "the syncs changed nothing"


def test_sleep_empties_the_cache(runs: dict[str, list[Any]]) -> None:
    before, _, (counts,), after = runs["slept on"]
    assert counts["size"] == 0
    assert before["counts"] == after["counts"] == ON
    assert before["samples"] == after["samples"]


def test_step_execution_hits(runs: dict[str, list[Any]]) -> None:
    assert [rollout["counts"] for rollout in _rollouts(runs["steps on"])] == [ON, [0, SAMPLES, 0, 0]]


def test_equal_batches_hit(runs: dict[str, list[Any]]) -> None:
    batches = SAMPLES // (N // 2)
    first, second = _rollouts(runs["batches on"])
    assert first["counts"] == [len(PROMPTS), batches - len(PROMPTS), len(PROMPTS), 0]
    assert second["counts"] == [0, batches, 0, 0]
    assert _rollouts(runs["batches off"])[0]["counts"] == [batches, 0, 0, batches]
