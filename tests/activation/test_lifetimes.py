"""What a guard is attached to: nothing is kept alive by it, and what cannot be guarded is cached as by upstream."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from freshness.workers import diffusion_model_runner
from support import CALLS, Adapter, Encoder, LoadingEncoder, installed, is_hit, load_into, new_weights, upstream

from omni_tensor_key import plugin

pytestmark = pytest.mark.usefixtures("active")
TENSORS, LISTS = CALLS["tensors"], CALLS["lists"]


def test_a_name_that_was_imported_earlier_leads_here() -> None:
    pipeline = Adapter()
    cache = diffusion_model_runner.install_prompt_embed_cache(pipeline)
    pipeline.encode_prompt(*TENSORS)
    assert is_hit(pipeline, cache, *TENSORS)
    assert diffusion_model_runner.install_prompt_embed_cache is upstream.install_prompt_embed_cache


@pytest.mark.parametrize("room", [(), ("__dict__",)], ids=["slots", "no weak references"])
def test_what_cannot_be_guarded_is_cached_as_by_upstream(log: Any, room: tuple[str, ...]) -> None:
    class Slots:
        __slots__ = ("_prompt_embed_cache", "_prompt_embed_cache_original_fn", "encode_prompt", *room)

        def __init__(self) -> None:
            self.encode_prompt = lambda prompt: torch.as_tensor(prompt) * 2

    pipeline = Slots()
    cache = upstream.install_prompt_embed_cache(pipeline)
    for _ in range(3):
        assert pipeline.encode_prompt(torch.ones(2, dtype=torch.int64)).tolist() == [2, 2]
        assert pipeline.encode_prompt([1]).tolist() == [2]
    assert (cache.hits, cache.stats()["size"]) == (2, 1)
    assert log.having("WARNING", "Slots has no guard")


def test_no_encode_prompt_is_upstreams_case() -> None:
    assert upstream.install_prompt_embed_cache(object()) is None

    class Odd:
        encode_prompt = dict  # has no signature

    odd = Odd()
    assert upstream.install_prompt_embed_cache(odd) is None
    assert odd.encode_prompt(a=1) == {"a": 1}


def used(pipeline: Any, cache: Any) -> None:
    for call in (TENSORS, LISTS):
        pipeline.encode_prompt(*call)
    pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))
    load_into(pipeline.text_encoder)
    for call in (TENSORS, LISTS):
        pipeline.encode_prompt(*call)


@pytest.mark.parametrize("encoder", [Encoder, LoadingEncoder])
def test_nothing_keeps_a_pipeline_or_its_parts_alive(encoder: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        pipeline, cache = installed(Adapter(encoder))
        used(pipeline, cache)
        replaced = [weakref.ref(pipeline.text_encoder), weakref.ref(pipeline.text_encoder.embed.weight)]
        pipeline.text_encoder = encoder()
        assert [reference() for reference in replaced] == [None, None]  # at once: it may be most of a device's memory
        used(pipeline, cache)
        parts = (pipeline, pipeline.text_encoder, pipeline.transformer, pipeline.tokenizer)
        found = [weakref.ref(part) for part in parts]
        del parts, pipeline
        gc.collect()
        assert [reference() for reference in found] == [None] * 4
        assert cache.stats()["size"] == 2  # the cache is still there, and knows nothing
    finally:
        gc.enable()


def test_a_cache_goes_before_its_pipeline() -> None:
    pipeline, cache = installed()
    used(pipeline, cache)
    found = weakref.ref(cache)
    upstream.uninstall_prompt_embed_cache(pipeline)
    del cache
    gc.collect()
    assert found() is None
    load_into(pipeline.text_encoder)
    pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))


def test_the_arguments_of_a_call_are_not_kept() -> None:
    pipeline, cache = installed()
    ids = torch.tensor([[1, 2]])
    outputs = [pipeline.encode_prompt(ids)[0] for _ in range(2)]
    found = weakref.ref(ids), weakref.ref(outputs[0])
    del ids, outputs
    assert [reference() for reference in found] == [None, None]
    assert cache.stats()["size"] == 1


def test_nothing_escapes_the_entry_point(monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    monkeypatch.setattr(plugin, "activate", fail)
    plugin.register()
    assert log.having("ERROR", "could not be activated")
