"""Pipelines that keep the prompt in an attribute, so that equal arguments stand for different prompts.

Their arguments carry no tensor. Upstream keys such a call itself, and wrongly; this package must not change what
happens, because its key is upstream's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.cache import prompt_embed_cache
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

import omni_tensor_key

from .calls import Prompt, Recorder, Request, identical, requests_for
from .checkout import Checkout
from .conftest import adapters_of
from .pipelines import BUILDERS


def _outcomes(pipeline: Any, encode: Callable[[Any, int], Any]) -> tuple[list[str], list[Any], list[Any]]:
    """Encode two prompts: what the cache did, its keys, and the outputs."""
    cache = prompt_embed_cache.install_prompt_embed_cache(pipeline)
    recorder = Recorder(pipeline, cache)
    for number in range(2):
        encode(pipeline, number)
    calls = recorder.calls
    return [call.outcome for call in calls], list(cache._store), [call.output for call in calls]


def _on_and_off(build: Callable[[], Any], encode: Callable[[Any, int], Any]) -> list[str]:
    """The outcomes, which must be the same with the extension and without, and so must keys and outputs."""
    was_active = omni_tensor_key.is_active()
    omni_tensor_key.deactivate()
    off = _outcomes(build(), encode)
    omni_tensor_key.activate()
    on = _outcomes(build(), encode)
    if not was_active:
        omni_tensor_key.deactivate()
    assert on[0] == off[0]
    assert on[1] == off[1]
    assert not any(isinstance(item, omni_tensor_key.TensorKey) for key in off[1] for _, item in key[1])
    assert identical(on[2], off[2])
    return off[0]


def _h3_prompts(rng: random.Random) -> list[Prompt]:
    return [Prompt([rng.randrange(1000, 20000) for _ in range(40)]) for _ in range(2)]


def test_minimax_h3(pytestconfig: pytest.Config, checkout: Checkout, rng: random.Random) -> None:
    """The adapter's own encode_prompt(), called with the keywords with which vLLM-Omni 0.26 to 0.28 call it."""
    adapters = [adapter for adapter in adapters_of(pytestconfig) if adapter.architecture == "MiniMaxH3Pipeline"]
    if not adapters:
        pytest.skip("the checkout has no MiniMax H3 adapter")
    cls = checkout.try_load(adapters[0])
    if isinstance(cls, str):
        pytest.skip(cls)
    if not hasattr(cls, "_ensure_prompt_text"):
        pytest.skip("the adapter does not hide its token IDs any more")
    prompts = _h3_prompts(rng)

    def encode(pipeline: Any, number: int) -> Any:
        request = DiffusionRequestBatch(requests_for("MiniMaxH3Pipeline", Request([prompts[number]])))
        pipeline._ensure_prompt_text(request)
        arguments: dict[str, Any] = {"images": [], "prepared_videos": None, "condition_labels": None}
        return pipeline.encode_prompt(task="t2va", prompt=request.prompts[0]["prompt"], **arguments)

    assert _on_and_off(lambda: BUILDERS["MiniMaxH3Pipeline"](cls), encode) == ["miss", "hit"]


def test_ming_image() -> None:
    """vLLM-Omni's own case."""
    ming = pytest.importorskip("vllm_omni.diffusion.models.ming_flash_omni.pipeline_ming_imagegen")

    def build() -> Any:
        pipeline = object.__new__(ming.MingImagePipeline)
        torch.nn.Module.__init__(pipeline)
        return pipeline

    def encode(pipeline: Any, number: int) -> Any:
        pipeline._pending_prompt_embeds = [torch.full((4, 8), float(number))]
        pipeline._pending_negative_prompt_embeds = None
        return pipeline.encode_prompt(prompt="")

    assert _on_and_off(build, encode) == ["miss", "hit"]
