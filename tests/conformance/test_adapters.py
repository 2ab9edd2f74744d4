"""Every adapter, entry point and case, with the extension on and off."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm_omni.diffusion.cache import prompt_embed_cache

from .calls import Call, Recorder, identical, send
from .cases import ALWAYS, CASES, Entry, Maker, cases_for
from .checkout import Adapter, Checkout, own_entry_points, takes_batches
from .conftest import ABSENT, adapters_of, checkout_of
from .pipelines import BUILDERS

# Adapters that hand their token IDs to encode_prompt(): for these nothing but what a case says is accepted.
_BY_ARGUMENT = ("QwenImagePipeline", "WanPipeline")


def _entries(config: pytest.Config) -> list[tuple[Adapter, str, str]]:
    checkout, found = checkout_of(config), []
    assert checkout is not None
    for adapter in adapters_of(config):
        cls = checkout.try_load(adapter)
        if isinstance(cls, str) or adapter.architecture not in BUILDERS or not hasattr(cls, "encode_prompt"):
            continue  # test_inventory accounts for them
        for name in own_entry_points(cls):
            entry = Entry(adapter.architecture, name, takes_batches(cls))
            found += [(adapter, name, case) for case in cases_for(entry)]
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    if checkout_of(metafunc.config) is None:
        values: list[Any] = [pytest.param(None, "", "", marks=pytest.mark.skip(ABSENT))]
        names = ["no checkout"]
    else:
        values = _entries(metafunc.config)
        names = [f"{adapter.name}-{entry}-{case}" for adapter, entry, case in values]
    metafunc.parametrize(("adapter", "entry", "case"), values, ids=names)


def _check(call: Call, plain: Call, seen: set[Any], extension: str) -> None:
    """One call of encode_prompt() against the same call without a cache and what an independent key says."""
    assert call.key == plain.key, "the entry point itself behaved otherwise with a cache"
    expected = "bypass"
    if call.key is not None and (extension == "on" or not call.tensors):
        expected = "hit" if call.key in seen else "miss"
        seen.add(call.key)
    assert call.outcome == expected, f"{call.outcome} where {expected} is right: {call.before}"
    assert identical(call.output, plain.output), "the outputs differ from those without a cache"
    assert identical(call.before, call.after), "an argument was written to"
    if expected == "hit":
        assert not call.encoder_ran
    else:
        assert call.encoder_ran == plain.encoder_ran


def test_case(checkout: Checkout, adapter: Adapter, entry: str, case: str, extension: str, rng: random.Random) -> None:
    cls = checkout.try_load(adapter)
    assert not isinstance(cls, str)
    make = Maker(rng, Entry(adapter.architecture, entry, takes_batches(cls)))
    build = BUILDERS[adapter.architecture]
    plain_pipeline, pipeline = build(cls), build(cls)
    plain = Recorder(plain_pipeline, None)
    cached = Recorder(pipeline, prompt_embed_cache.install_prompt_embed_cache(pipeline))
    seen: set[Any] = set()
    outcomes, wanted = [], []
    for request, expected in CASES[case](make):
        plain.calls.clear()
        cached.calls.clear()
        end = send(plain_pipeline, adapter.architecture, entry, request)
        assert send(pipeline, adapter.architecture, entry, request) == end
        if end:
            assert adapter.architecture not in _BY_ARGUMENT or case not in ALWAYS, end
            pytest.skip(f"without a cache, too, {entry}() {end}")
        for call, reference in zip(cached.calls, plain.calls, strict=True):
            _check(call, reference, seen, extension)
        outcomes.append([call.outcome for call in cached.calls])
        wanted.append(expected if extension == "on" else ["bypass" if call.tensors else "" for call in cached.calls])
    if not any(outcomes):
        pytest.skip(f"{entry}() encodes these prompts without encode_prompt(), so there is nothing to cache")
    if adapter.architecture in _BY_ARGUMENT:
        assert outcomes == wanted
