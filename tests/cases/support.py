"""A pipeline with the real prompt cache in front of its encode_prompt(), and what calls of it come to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

IDS = torch.tensor([[101, 7592, 2088, 102]])
MASK = torch.tensor([[1, 1, 1, 0]])


class Pipeline:
    """Every run of its encoder gives another value, so one out of the cache shows."""

    def __init__(self) -> None:
        self.runs = 0

    def encode_prompt(
        self,
        prompt_ids: Any,
        attention_mask: Any = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: Any = None,
        prompt_embeds_mask: Any = None,
        max_sequence_length: int = 1024,
    ) -> torch.Tensor:
        self.runs += 1
        return torch.full((1, 4, 8), float(self.runs))


class Outcome(NamedTuple):
    hits: int
    misses: int
    bypassed: int


def installed(pipeline: Any = None, **options: Any) -> tuple[Any, Any]:
    """A pipeline whose encode_prompt() is cached, and the cache."""
    pipeline = pipeline or Pipeline()
    cache = upstream.install_prompt_embed_cache(pipeline, **options)
    assert cache is not None
    return pipeline, cache


def outcome(cache: Any) -> Outcome:
    """What the cache has counted."""
    counts = cache.stats()
    return Outcome(counts["hits"], counts["misses"], counts["bypassed"])


def calls(*arguments: Any) -> Outcome:
    """What a new cache makes of these calls, in order. An argument list is a tuple, a dict or the token IDs alone."""
    pipeline, cache = installed(max_size=10_000)
    for given in arguments:
        if isinstance(given, dict):
            pipeline.encode_prompt(**given)
        elif isinstance(given, tuple):
            pipeline.encode_prompt(*given)
        else:
            pipeline.encode_prompt(given)
    return outcome(cache)


def all_differ(*arguments: Any) -> bool:
    """Whether each of the calls has a key of its own, and finds its entry again."""
    count = len(arguments)
    return calls(*arguments, *arguments) == (count, count, 0)


def all_agree(*arguments: Any) -> bool:
    """Whether the calls have one key."""
    return calls(*arguments) == (len(arguments) - 1, 1, 0)


def all_bypass(*arguments: Any) -> bool:
    """Whether none of the calls is cached."""
    return calls(*arguments, *arguments) == (0, 0, 2 * len(arguments))
