"""Pipelines of the adapters' classes, with everything that stands before and in prompt encoding and nothing behind it.

The classes' own constructors load gigabytes of weights, so an instance is made without them and gets the attributes
that the way to the end of prompt encoding reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm_omni.diffusion.distributed import parallel_state

from .parts import TextEncoder, processor, tokenizer

CPU = torch.device("cpu")


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
    if isinstance(pipeline, torch.nn.Module):
        torch.nn.Module.__init__(pipeline)
    pipeline.device = CPU
    return pipeline


def _qwen_image(cls: type) -> Any:
    pipeline = _bare(cls)
    pipeline.text_encoder = TextEncoder()
    pipeline.tokenizer = tokenizer()
    pipeline.tokenizer_max_length = 1024
    pipeline.prompt_template_encode = "describe the image in detail. " * 8 + "{}"
    pipeline.prompt_template_encode_start_idx = 34
    pipeline.default_sample_size = 128
    pipeline.vae_scale_factor = 8
    pipeline.transformer = SimpleNamespace(in_channels=64, guidance_embeds=False)
    pipeline.prepare_latents = _stop
    return pipeline


def _qwen_image_edit(cls: type) -> Any:
    pipeline = _qwen_image(cls)
    pipeline.processor = processor()
    return pipeline


def _wan(cls: type) -> Any:
    pipeline = _bare(cls)
    pipeline.text_encoder = TextEncoder()
    pipeline.transformer = SimpleNamespace(dtype=torch.bfloat16)
    pipeline.transformer_2 = None
    pipeline.transformer_config = SimpleNamespace(patch_size=(1, 2, 2), in_channels=16, out_channels=16)
    pipeline.vae_scale_factor_spatial = 8
    pipeline.vae_scale_factor_temporal = 4
    pipeline.boundary_ratio = None
    pipeline.expand_timesteps = False
    pipeline.scheduler = SimpleNamespace(set_timesteps=_stop)
    return pipeline


def _sd3(cls: type) -> Any:
    pipeline = _bare(cls)
    pipeline.od_config = SimpleNamespace(dtype=torch.bfloat16)
    pipeline.text_encoder, pipeline.text_encoder_2 = TextEncoder(16, clip=True), TextEncoder(16, clip=True)
    pipeline.text_encoder_3 = TextEncoder(32)
    pipeline.tokenizer = pipeline.tokenizer_2 = pipeline.tokenizer_3 = tokenizer()
    pipeline.tokenizer_max_length = 77
    pipeline.default_sample_size = 128
    pipeline.vae_scale_factor = 8
    pipeline.output_type = "pil"
    pipeline.transformer = SimpleNamespace(in_channels=16, joint_attention_dim=32)
    pipeline.prepare_latents = _stop
    return pipeline


def _ltx2(cls: type) -> Any:
    pipeline = _bare(cls)
    pipeline.text_encoder = TextEncoder()
    pipeline.tokenizer = tokenizer()
    pipeline.tokenizer_max_length = 1024
    pipeline.vae_spatial_compression_ratio = 32
    pipeline.vae_temporal_compression_ratio = 8
    pipeline.connectors = _stop
    return pipeline


def _minimax_h3(cls: type) -> Any:
    pipeline = _bare(cls)
    pipeline.text_encoder = TextEncoder()
    pipeline.text_encoder_tp_size = 1
    pipeline.text_encoder_group = SimpleNamespace(world_size=1)
    pipeline.load_text_encoder = pipeline.load_vae_encoder = True
    pipeline.partition = "t2va"
    pipeline.supported_tasks = ("t2va",)
    pipeline._fasth3 = None
    return pipeline


# By architecture, so that a new algorithm for a known model is covered as soon as it appears.
BUILDERS: dict[str, Callable[[type], Any]] = {
    "QwenImagePipeline": _qwen_image,
    "QwenImageEditPlusPipeline": _qwen_image_edit,
    "WanPipeline": _wan,
    "StableDiffusion3Pipeline": _sd3,
    "LTX2Pipeline": _ltx2,
    "MiniMaxH3Pipeline": _minimax_h3,
}
