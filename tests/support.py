"""What the tests share: small pipelines whose text encoder can change, and what must hold before and after it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

try:
    from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline
except Exception:  # without a GPU, the pipelines of 0.22 cannot be imported; there tests/freshness is left out

    class QwenImagePipeline(nn.Module):  # type: ignore[no-redef]
        def load_weights(self, weights: Any) -> None:
            for name, weight in weights:
                self.get_parameter(name).data.copy_(weight)


IDS, MASK = [5, 3, 9, 2], [1, 1, 1, 0]
CALLS = {
    "tensors": (torch.tensor([IDS]), torch.tensor([MASK])),
    "lists": ([IDS], [MASK]),
    "list and tensor": ([IDS], torch.tensor([MASK])),
}
VOCABULARY, WIDTH = 16, 4


class Encoder(nn.Module):
    """Small, and every parameter counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class LoadingEncoder(Encoder):
    """Loads itself, as vLLM-Omni's own encoders do; those from transformers have no such method."""

    def load_weights(self, weights: Any) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            parameters[name].data.copy_(weight)
            loaded.add(name)
        return loaded


class PlainEncoder:
    """No module, as a session of an inference engine is."""

    def __init__(self, seed: int = 0) -> None:
        self.table = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(seed))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


class Tokenizer:
    """Its answer depends on the object, so a replaced one shows."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift


class Adapter(QwenImagePipeline):
    """Like the rollout adapters: encode_prompt() is its own, load_weights() is vLLM-Omni's with the real loader.

    Without the checkpoint that the base class's constructor reads.
    """

    def __init__(self, encoder: type[Any] = Encoder) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.text_encoder = encoder()
        self.transformer = nn.Linear(WIDTH, WIDTH)
        self.vae = nn.Linear(WIDTH, WIDTH)
        self.tokenizer = Tokenizer()
        self.runs = 0

    def encode_prompt(
        self,
        prompt_ids: Any,
        attention_mask: Any = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: Any = None,
        prompt_embeds_mask: Any = None,
        max_sequence_length: int = 1024,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.runs += 1
        ids = (torch.as_tensor(prompt_ids) + self.tokenizer.shift) % VOCABULARY
        mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask)
        with torch.no_grad():
            embeds = self.text_encoder(ids) * mask.unsqueeze(-1)
        return embeds[:, :max_sequence_length].repeat(num_images_per_prompt, 1, 1), mask.clone()


def installed(pipeline: Any = None, **options: Any) -> tuple[Any, Any]:
    """A pipeline with upstream's cache in front of it, and the cache."""
    pipeline = pipeline or Adapter()
    cache = upstream.install_prompt_embed_cache(pipeline, **options)
    assert cache is not None
    return pipeline, cache


def without_cache(pipeline: Any, *call: Any) -> Any:
    """What the pipeline encodes a call to now."""
    return type(pipeline).encode_prompt(pipeline, *call)


def identical(a: Any, b: Any) -> bool:
    """Whether two outputs agree in structure, dtype, device, shape and value."""
    if isinstance(a, torch.Tensor):
        if type(a) is not type(b) or (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
            return False
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(identical(a[name], b[name]) for name in a)
    return type(a) is type(b) and a == b


def is_hit(pipeline: Any, cache: Any, *call: Any) -> bool:
    """Make the call: did it come out of the cache?"""
    hits = cache.stats()["hits"]
    pipeline.encode_prompt(*call)
    return bool(cache.stats()["hits"] > hits)


@contextmanager
def recomputed(pipeline: Any, cache: Any, *call: Any) -> Iterator[None]:
    """What happens inside changes the call's value: the next call must return the new one, and it is cached again."""
    before = pipeline.encode_prompt(*call)
    assert is_hit(pipeline, cache, *call)
    yield
    expected = without_cache(pipeline, *call)
    assert not identical(before, expected), "nothing has changed, so this shows nothing"
    assert identical(pipeline.encode_prompt(*call), expected)
    assert is_hit(pipeline, cache, *call)
    assert identical(pipeline.encode_prompt(*call), expected)


@contextmanager
def kept(pipeline: Any, cache: Any, *call: Any) -> Iterator[None]:
    """What happens inside leaves the call's value alone: the next call is a hit."""
    pipeline.encode_prompt(*call)
    yield
    assert is_hit(pipeline, cache, *call)
    assert identical(pipeline.encode_prompt(*call), without_cache(pipeline, *call))


def new_weights(module: nn.Module, prefix: str = "", seed: int = 1) -> list[tuple[str, torch.Tensor]]:
    """Other values for all parameters of a module, by name."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (prefix + name, torch.randn(parameter.shape, generator=generator))
        for name, parameter in module.named_parameters()
    ]


def load_into(module: nn.Module, seed: int = 1) -> None:
    """Other weights by load_state_dict()."""
    module.load_state_dict(module.state_dict() | dict(new_weights(module, seed=seed)))
