"""Every adapter of Qwen-Image and Wan, every entry point, every kind of request, with the extension on and off."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.cache import prompt_embed_cache

from .calls import Prompt, Recorder, Request, send
from .checkout import Adapter, Checkout, own_entry_points, takes_batches
from .conftest import ABSENT, adapters_of, checkout_of
from .pipelines import BUILDERS, VOCABULARY

LENGTH = 60  # longer than the template that Qwen-Image's encoders cut off
Sent = Iterator[tuple[Request, str]]  # a request, and what its calls of encode_prompt() must be with the extension on


def _ids(rng: random.Random, length: int = LENGTH) -> list[int]:
    return [rng.randrange(1000, VOCABULARY) for _ in range(length)]


def _changed(ids: list[int]) -> list[int]:
    """The same IDs but for one, near the end, where no template hides it."""
    return [*ids[:-4], ids[-4] % 1000 + 1, *ids[-3:]]


def _lists(rng: random.Random) -> Sent:
    ids = _ids(rng)
    others = [(ids, "hit"), (_changed(ids), "miss"), (ids[::-1], "miss"), (ids[:-1], "miss"), ([*ids, 0], "miss")]
    for each, outcome in [(ids, "miss"), *others, (ids, "hit")]:
        yield Request([Prompt(list(each))]), outcome


def _tensors(rows: bool) -> Callable[[random.Random], Sent]:
    def case(rng: random.Random) -> Sent:
        ids = _ids(rng)
        for each, outcome in [(ids, "miss"), (_changed(ids), "miss"), (ids, "hit")]:
            yield Request([Prompt(torch.tensor([each] if rows else each))]), outcome

    return case


def _edited_tensor(rng: random.Random) -> Sent:
    ids = torch.tensor([_ids(rng)])
    for change, outcome in [(0, "miss"), (1, "miss"), (-1, "hit")]:
        ids[0, -1] += change
        yield Request([Prompt(ids)]), outcome


def _masks(rng: random.Random) -> Sent:
    ids, full = _ids(rng), torch.ones(1, LENGTH, dtype=torch.bool)
    short = full.clone()
    short[:, -1] = False
    columns = torch.stack([full[0], short[0]], dim=-1)[None, :, 1]  # `short` again, with gaps between its elements
    for mask, outcome in [(full, "miss"), (short, "miss"), (full, "hit"), (columns, "hit")]:
        yield Request([Prompt(torch.tensor([ids]), mask)]), outcome


def _mask_lists(rng: random.Random) -> Sent:
    ids = _ids(rng)
    for outcome in ("miss", "hit"):
        yield Request([Prompt(list(ids), [1] * LENGTH)]), outcome


def _options(rng: random.Random) -> Sent:
    ids = _ids(rng)
    for outputs, length, outcome in [(1, 512, "miss"), (2, 512, "miss"), (1, 8, "miss"), (1, 512, "hit")]:
        yield Request([Prompt(list(ids))], outputs=outputs, max_length=length), outcome


def _negative(rng: random.Random) -> Sent:
    first, second, negative = _ids(rng), _ids(rng), _ids(rng)
    sent = [(first, negative, "miss miss"), (second, negative, "miss hit"), (first, _changed(negative), "hit miss")]
    for ids, no, outcomes in [*sent, (second, negative, "hit hit"), (negative, negative, "hit hit")]:
        yield Request([Prompt(list(ids), negative=list(no))]), outcomes


def _empty_negative(rng: random.Random) -> Sent:
    ids = _ids(rng)
    for outcomes in ("miss miss", "hit hit"):
        yield Request([Prompt(list(ids), negative=[])]), outcomes


def _text(rng: random.Random) -> Sent:
    for text, outcome in [("a red fox in the snow", "miss"), ("a red fox", "miss"), ("a red fox in the snow", "hit")]:
        yield Request([Prompt(text=text)]), outcome


def _batches(rng: random.Random) -> Sent:
    first, second, shorter = _ids(rng), _ids(rng), _ids(rng, LENGTH - 5)
    sent = [([first, second], "miss"), ([first, second], "hit"), ([second, first], "miss"), ([first], "miss")]
    sent += [([first, shorter], "miss"), ([first, shorter], "hit"), ([first, first], "miss")]
    for batch, outcome in sent:
        yield Request([Prompt(list(ids)) for ids in batch]), outcome


CASES: dict[str, Callable[[random.Random], Sent]] = {
    "lists of IDs": _lists,
    "1-D tensors": _tensors(rows=False),
    "2-D tensors": _tensors(rows=True),
    "a tensor that is edited": _edited_tensor,
    "mask tensors": _masks,
    "mask lists": _mask_lists,
    "options": _options,
    "negative prompts": _negative,
    "empty negative prompts": _empty_negative,
    "text": _text,
    "batches": _batches,
}
MAY_FAIL = ("mask lists", "empty negative prompts", "text")  # some adapters refuse them, with and without a cache


def _entries(config: pytest.Config, checkout: Checkout) -> list[tuple[Adapter, str, str]]:
    found = []
    for adapter in adapters_of(config):
        if adapter.architecture in BUILDERS:
            cls = checkout.load(adapter)
            for entry in own_entry_points(cls):
                batches = entry == "forward" and takes_batches(cls)
                found += [(adapter, entry, case) for case in CASES if case != "batches" or batches]
    assert {adapter.architecture for adapter, _, _ in found} == set(BUILDERS)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    checkout = checkout_of(metafunc.config)
    if checkout is None:
        values: list[Any] = [pytest.param(None, "", "", marks=pytest.mark.skip(ABSENT))]
        names = ["no checkout"]
    else:
        values = _entries(metafunc.config, checkout)
        names = [f"{adapter.name}-{entry}-{case}" for adapter, entry, case in values]
    metafunc.parametrize(("adapter", "entry", "case"), values, ids=names)


def _identical(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(_identical, a, b))
    return bool(a == b)


def test_case(checkout: Checkout, adapter: Adapter, entry: str, case: str, extension: str, rng: random.Random) -> None:
    build, cls = BUILDERS[adapter.architecture], checkout.load(adapter)
    plain_pipeline, pipeline = build(cls), build(cls)
    plain = Recorder(plain_pipeline, None)
    cached = Recorder(pipeline, prompt_embed_cache.install_prompt_embed_cache(pipeline))
    for request, outcomes in CASES[case](rng):
        plain.calls.clear()
        cached.calls.clear()
        end = send(plain_pipeline, entry, request)
        assert send(pipeline, entry, request) == end
        if end and case in MAY_FAIL:
            pytest.skip(f"without a cache, too, {entry}() {end}")
        assert end == ""
        wanted = outcomes.split() if extension == "on" else ["bypass"] * len(outcomes.split())
        assert [call.outcome for call in cached.calls] == wanted
        for call, reference in zip(cached.calls, plain.calls, strict=True):
            assert _identical(call.output, reference.output), "the outputs differ from those without a cache"
            assert reference.encoder_ran
            assert call.encoder_ran == (call.outcome != "hit")


def test_precomputed_embeddings_bypass(checkout: Checkout, pytestconfig: pytest.Config, extension: str) -> None:
    adapter = next(item for item in adapters_of(pytestconfig) if item.keys == ("QwenImagePipeline", "flow_grpo"))
    pipeline = BUILDERS[adapter.architecture](checkout.load(adapter))
    cached = Recorder(pipeline, prompt_embed_cache.install_prompt_embed_cache(pipeline))
    given = {"prompt_embeds": torch.ones(1, LENGTH, 16), "prompt_embeds_mask": torch.ones(1, LENGTH, dtype=torch.long)}
    for _ in range(2):
        assert send(pipeline, "forward", Request([Prompt([1] * LENGTH)], arguments=given)) == ""
    assert [call.outcome for call in cached.calls] == ["bypass", "bypass"]
