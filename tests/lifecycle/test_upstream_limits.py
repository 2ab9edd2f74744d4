"""Pipelines for which vLLM-Omni's cache itself is wrong: the arguments of encode_prompt() do not say what is encoded.

With and without the extension. Where one of these tests fails, docs/lifecycle.md is to be corrected.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from vllm_omni.diffusion.models.ming_flash_omni.pipeline_ming_imagegen import MingImagePipeline

import omni_tensor_key

from .support import installed


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("cls", [MingImagePipeline])
def test_ming_hands_its_embeddings_over_in_an_attribute(cls: Any, active: bool) -> None:
    if active:
        omni_tensor_key.activate()
    try:
        pipeline = object.__new__(cls)
        nn.Module.__init__(pipeline)  # without the checkpoint that its constructor reads
        pipeline._pending_negative_prompt_embeds = None
        installed(pipeline)
        answers = []
        for pending in (["first"], ["second"]):
            pipeline._pending_prompt_embeds = pending
            answers.append(pipeline.encode_prompt(prompt=[""]))
        assert answers[0] == answers[1]  # wrong: the second request gets the first one's embeddings
    finally:
        if active:
            omni_tensor_key.deactivate()
