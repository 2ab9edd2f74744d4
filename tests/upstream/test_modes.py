"""Order of eviction, autograd's modes and compiled callers: what upstream's cache does is what it did."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from .support import SEED, Pipeline, counts, identical, installed, pristine

pytestmark = pytest.mark.usefixtures("active")


def contents(cache: Any) -> list[int]:
    """Which prompts are stored, from the least to the most recently used; the first ID names the prompt."""
    return [int(embeds[1].sum()) for embeds in cache._store.values()]


class Named(Pipeline):
    """Stores the prompt's name where `contents` finds it."""

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        self.runs += 1
        return self.table[torch.as_tensor(prompt_ids)], torch.as_tensor(prompt_ids)[:1].clone()


@pytest.mark.parametrize("max_size", [1, 2, 3, 8])
def test_entries_are_evicted_in_the_same_order_as_with_lists(max_size: int) -> None:
    rng = random.Random(SEED + max_size)
    with_tensors, tensors = installed(Named(), max_size=max_size)
    with_lists = Named()
    lists = pristine().install_prompt_embed_cache(with_lists, max_size=max_size)
    for _ in range(500):
        prompt = [rng.randrange(12), 5, 6]
        if rng.random() < 0.01:
            tensors.clear()
            lists.clear()
        with_tensors.encode_prompt(torch.tensor(prompt), torch.ones(3).bool())
        with_lists.encode_prompt(prompt, [True] * 3)
        assert tensors.stats() == lists.stats()
        assert contents(tensors) == contents(lists)
    assert counts(tensors).hits > 0


MODES: dict[str, Any] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize(("fill", "hit"), list(itertools.product(MODES, MODES)))
def test_filled_in_one_mode_and_hit_in_another(fill: str, hit: str) -> None:
    pipeline, cache = installed()
    with MODES[fill]():
        miss = pipeline.encode_prompt(torch.arange(5), torch.ones(5).bool())
    with MODES[hit]():
        found = pipeline.encode_prompt(torch.arange(5), torch.ones(5).bool())
        with MODES[fill]():
            uncached = Pipeline().encode_prompt(torch.arange(5), torch.ones(5).bool())
        assert identical(tuple(t.detach() for t in found), tuple(t.detach() for t in uncached))
    assert identical(tuple(t.detach() for t in miss), tuple(t.detach() for t in found))
    assert counts(cache) == (1, 1, 0)
    assert found[0].is_inference() == (fill == "inference_mode")
    assert not found[0].requires_grad


def test_inference_tensors_and_others_meet() -> None:
    pipeline, cache = installed()
    with torch.inference_mode():
        made_there = torch.arange(5)
    pipeline.encode_prompt(made_there)
    pipeline.encode_prompt(torch.arange(5))
    with torch.inference_mode():
        pipeline.encode_prompt(made_there)
        made_there[1] = 9
        pipeline.encode_prompt(made_there)
    assert counts(cache) == (2, 2, 0)


@pytest.mark.parametrize("computed", [False, True], ids=["IDs passed through", "IDs computed"])
def test_a_compiled_caller_gets_right_results(computed: bool) -> None:
    torch._dynamo.reset()
    pipeline, cache = installed()

    def caller(ids: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        embeds, returned = pipeline.encode_prompt(ids + 1 if computed else ids, mask)
        return (embeds * scale).sum(-1) + returned

    compiled = torch.compile(caller, backend="eager")
    rng = random.Random(SEED)
    for _ in range(12):
        ids = torch.tensor([[rng.randrange(3), 7, 8, 9]])
        mask = torch.tensor([[1, 1, 1, rng.randrange(2)]])
        embeds, returned = Pipeline().encode_prompt(ids + 1 if computed else ids, mask)
        expected = (embeds * 2.0).sum(-1) + returned
        assert torch.equal(compiled(ids, mask, 2.0), expected)
        assert torch.equal(caller(ids.clone(), mask.clone(), 2.0), expected)
    assert sum(counts(cache)) >= 12
    torch._dynamo.reset()


def test_a_call_while_fake_tensors_are_traced_bypasses() -> None:
    pipeline, cache = installed()
    with FakeTensorMode(allow_non_fake_inputs=True):
        embeds, _ = pipeline.encode_prompt(torch.arange(5))
        assert embeds.shape == (5, 8)
    assert counts(cache) == (0, 0, 1)
    embeds, _ = pipeline.encode_prompt(torch.arange(5))
    assert type(embeds) is torch.Tensor
    assert torch.equal(embeds, Pipeline().encode_prompt(torch.arange(5))[0])
