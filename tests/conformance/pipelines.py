"""Pipelines of the adapters' classes, with everything that stands before and in prompt encoding and nothing behind it.

The classes' own constructors load gigabytes of weights, so an instance is made without them and gets the attributes
that the way to the end of prompt encoding reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import Qwen2Tokenizer
from transformers.modeling_outputs import BaseModelOutput
from vllm_omni.diffusion.distributed import parallel_state

VOCABULARY = 20000


@cache
def tokenizer() -> Any:
    """A byte-level tokenizer: one token for each byte."""
    from tokenizers import pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[])


class TextEncoder(torch.nn.Module):  # type: ignore[misc]
    """A sum over the tokens up to each one: its output depends on IDs, order and mask, as an encoder's does.

    Two instances compute the same.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        table = torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(width))
        self.table = torch.nn.Parameter(table.to(torch.bfloat16))
        self.runs = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> BaseModelOutput:
        self.runs += 1
        state = torch.nn.functional.embedding(input_ids, self.table)
        if attention_mask is not None:
            state = state * attention_mask.to(state.dtype).unsqueeze(-1)
        state = state.cumsum(1)
        return BaseModelOutput(last_hidden_state=state, hidden_states=(state / 2, state))


class EndOfEncoding(Exception):
    """An entry point has begun with what comes after prompt encoding."""


def _stop(*args: Any, **kwargs: Any) -> None:
    raise EndOfEncoding


@contextmanager
def one_process() -> Iterator[None]:
    """Answer for the process groups that a worker has, and a test has not: one rank, no guidance in parallel."""
    with patch.object(parallel_state, "_CFG", SimpleNamespace(world_size=1, rank_in_group=0)):
        yield


def _bare(cls: type) -> Any:
    pipeline: Any = object.__new__(cls)
    torch.nn.Module.__init__(pipeline)
    pipeline.device = torch.device("cpu")
    pipeline.text_encoder = TextEncoder()
    return pipeline


def _qwen_image(cls: type) -> Any:
    pipeline = _bare(cls)
    pipeline.tokenizer = tokenizer()
    pipeline.tokenizer_max_length = 1024
    pipeline.prompt_template_encode = "describe the image in detail. " * 8 + "{}"
    pipeline.prompt_template_encode_start_idx = 34
    pipeline.default_sample_size = 128
    pipeline.vae_scale_factor = 8
    pipeline.transformer = SimpleNamespace(in_channels=64, guidance_embeds=False)
    pipeline.prepare_latents = _stop
    return pipeline


def _wan(cls: type) -> Any:
    pipeline = _bare(cls)
    pipeline.transformer = SimpleNamespace(dtype=torch.bfloat16)
    pipeline.transformer_2 = None
    pipeline.transformer_config = SimpleNamespace(patch_size=(1, 2, 2), in_channels=16, out_channels=16)
    pipeline.vae_scale_factor_spatial = 8
    pipeline.vae_scale_factor_temporal = 4
    pipeline.boundary_ratio = None
    pipeline.expand_timesteps = False
    pipeline.scheduler = SimpleNamespace(set_timesteps=_stop)
    return pipeline


# By architecture, so that a new algorithm for a known model is covered as soon as it appears.
BUILDERS: dict[str, Callable[[type], Any]] = {"QwenImagePipeline": _qwen_image, "WanPipeline": _wan}
