"""verl-omni's own adapters in the engine: images, latents and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import OFF, ON, ROLLOUT, Drive, pair

pytestmark = pytest.mark.slow
ADAPTERS = ["QwenImagePipelineWithLogProb", "QwenImageDiffusionNFTPipeline", "QwenImageMixGRPOPipelineWithLogProb"]


@pytest.fixture(scope="module")
def runs(drive: Drive, verl_omni: str) -> dict[str, list[Any]]:
    scenarios = {}
    for adapter in ADAPTERS:
        scenarios |= pair(
            adapter, ROLLOUT, ["sync_weights", "text_encoder", 1.25], ROLLOUT, adapter=f"verl_adapter.{adapter}"
        )
    return drive(scenarios, VERL_OMNI=verl_omni)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_samples_are_those_without_the_extension(runs: dict[str, list[Any]], adapter: str) -> None:
    off, on = (runs[f"{adapter} {state}"] for state in ("off", "on"))
    for rollout in (0, 2):
        assert on[rollout]["samples"] == off[rollout]["samples"]
        assert (off[rollout]["counts"], on[rollout]["counts"]) == (OFF, ON)
    assert on[0]["samples"] != on[2]["samples"]
