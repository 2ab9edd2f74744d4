"""What several tests here use: upstream's own functions, exact comparison, and a pipeline to cache."""

from __future__ import annotations

import importlib.util
import os
import random
import types
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import hypothesis
import torch
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

from omni_tensor_key import TensorKey

# What upstream's module and class hold before anything is replaced.
ORIGINALS = dict(vars(upstream)), dict(vars(upstream.PromptEmbedCache))

SEED = int(os.environ.get("OMNI_TENSOR_KEY_TEST_SEED") or random.SystemRandom().randrange(1 << 32))


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Decorator: run a hypothesis test on this many examples, drawn from SEED."""
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,  # the machine may be busy
        database=None,  # the seed says it all
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda test: hypothesis.seed(SEED)(settings(test))


@cache
def pristine() -> types.ModuleType:
    """Upstream's module, loaded a second time under another name: nothing ever replaces its functions."""
    spec = importlib.util.spec_from_file_location("pristine_prompt_embed_cache", upstream.__file__)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replaced() -> list[str]:
    """The names that hold anything but upstream's own object in upstream's module and class.

    Names that are new are not looked at: torch.compile() leaves some behind in every module it has traced.
    """
    now = vars(upstream), vars(upstream.PromptEmbedCache)
    return [
        name
        for mine, theirs in zip(now, ORIGINALS, strict=True)
        for name in theirs
        if name not in mine or mine[name] is not theirs[name]
    ]


def same(a: Any, b: Any) -> bool:
    """Whether two keys are equal down to the exact type of every item, the sign of zero and NaN."""
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(same, a, b))
    if a is b:
        return True
    return repr(a) == repr(b) and (bool(a == b) or (a != a and b != b))


def outcome(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """What a call comes to: a value, a refusal or the type of an exception."""
    try:
        value = function(*args)
    except Exception as error:
        return "raises", type(error)
    refused = value is upstream._NOT_HASHABLE or value is pristine()._NOT_HASHABLE
    return ("refuses", None) if refused else ("returns", value)


def agree(active: Any, signature: Any, args: Any, kwargs: Any, tag: Any = "tag") -> None:
    expected = outcome(pristine()._build_key, signature, tag, args, kwargs)
    for _ in range(2):  # a signature's plan is made at its first call
        got = outcome(active._build_key, signature, tag, args, kwargs)
        assert same(got, expected), f"{signature} called with {args} {kwargs}: {got!r}, but upstream: {expected!r}"


def tensor_keys_in(key: Any) -> list[TensorKey]:
    """The tensor keys in a key, in order."""
    if type(key) is tuple:
        return [found for item in key for found in tensor_keys_in(item)]
    return [key] if type(key) is TensorKey else []


class Counts(NamedTuple):
    hits: int
    misses: int
    bypassed: int


def counts(cache: Any) -> Counts:
    stats = cache.stats()
    return Counts(stats["hits"], stats["misses"], stats["bypassed"])


class Pipeline:
    """The encode_prompt of a rollout adapter that is handed token IDs, over a small embedding.

    The embeddings depend on every argument, so an answer out of a wrong cache entry shows.
    """

    def __init__(self) -> None:
        self.runs = 0
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(4096, 8, generator=generator, requires_grad=True)

    def encode_prompt(
        self,
        prompt_ids: Any,
        attention_mask: Any = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: Any = None,
        prompt_embeds_mask: Any = None,
        max_sequence_length: int = 1024,
        condition_images: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.runs += 1
        ids = torch.atleast_1d(torch.as_tensor(prompt_ids, device="cpu")).long().remainder(4096)
        mask = torch.ones_like(ids) if attention_mask is None else torch.as_tensor(attention_mask, device="cpu").long()
        embeds = self.table[ids] * mask.unsqueeze(-1)
        embeds = embeds[..., :max_sequence_length, :]
        return embeds.repeat(num_images_per_prompt, *[1] * (embeds.dim() - 1)), mask.clone()


def installed(pipeline: Any = None, **options: Any) -> tuple[Any, Any]:
    """A pipeline with upstream's cache in front of it, and the cache."""
    pipeline = pipeline or Pipeline()
    cache = upstream.install_prompt_embed_cache(pipeline, **options)
    assert cache is not None
    return pipeline, cache


def identical(a: Any, b: Any) -> bool:
    """Whether two outputs agree in structure, dtype, device, shape and every bit."""
    if isinstance(a, torch.Tensor):
        if type(a) is not type(b) or (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
            return False
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        return True
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(identical, a, b))
    return type(a) is type(b) and a == b
