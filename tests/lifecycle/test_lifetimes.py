"""Nothing here keeps a pipeline, an encoder or a worker alive."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_modules
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

import omni_tensor_key
from omni_tensor_key import plugin
from omni_tensor_key.watch import Watch
from omni_tensor_key.weights import WeightDoors

from .support import IDS, MASK, Adapter, Encoder, LoadingEncoder, installed, new_weights
from .workers import on_a_cpu, wrapped

pytestmark = pytest.mark.usefixtures("active")

CALL = (torch.tensor([IDS]), torch.tensor([MASK]))


@pytest.fixture(autouse=True)
def _collected_by_hand() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def used(pipeline: Any, cache: Any) -> None:
    pipeline.encode_prompt(*CALL)
    pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))
    pipeline.load_weights(iter(new_weights(pipeline.transformer, "transformer.")))
    pipeline.text_encoder.load_state_dict(pipeline.text_encoder.state_dict())
    pipeline.encode_prompt(*CALL)
    pipeline.encode_prompt([IDS], [MASK])


@pytest.mark.parametrize("encoder", [Encoder, LoadingEncoder])
def test_a_pipeline_goes_as_soon_as_it_would_with_upstream_alone(encoder: Any) -> None:
    """Upstream's wrapper and its pipeline refer to each other; without that nothing waits for a collection."""
    pipeline, cache = installed(Adapter(encoder))
    used(pipeline, cache)
    found = [weakref.ref(part) for part in (pipeline, pipeline.text_encoder, pipeline.transformer, pipeline.tokenizer)]
    upstream.uninstall_prompt_embed_cache(pipeline)
    del pipeline.encode_prompt  # the original, bound to the pipeline
    del pipeline
    assert [reference() for reference in found] == [None] * 4
    assert cache.stats()["size"] == 2  # the cache is still there, and knows nothing


def test_a_pipeline_with_its_cache_goes_with_one_collection() -> None:
    pipeline, cache = installed(Adapter(LoadingEncoder))
    used(pipeline, cache)
    found = [weakref.ref(part) for part in (pipeline, pipeline.text_encoder)]
    del pipeline
    gc.collect()
    assert [reference() for reference in found] == [None, None]


def encode(prompt_ids: Any, attention_mask: Any = None, *, pipeline: Any) -> Any:
    return Adapter.encode_prompt(pipeline, prompt_ids, attention_mask)


def encode_any(prompt_ids: Any, *more: Any, pipeline: Any) -> Any:
    return Adapter.encode_prompt(pipeline, prompt_ids, *more)


@pytest.mark.parametrize("function", [encode, encode_any])
@pytest.mark.parametrize("wrap", [lambda pipeline: pipeline, lambda pipeline: [pipeline]])
def test_a_pipeline_that_is_a_default_of_its_signature_goes(function: Any, wrap: Any) -> None:
    """inspect.signature() makes a default of an argument that functools.partial() binds by name."""
    pipeline = Adapter()
    pipeline.encode_prompt = functools.partial(function, pipeline=wrap(pipeline))
    cache = installed(pipeline)[1]
    for options in ({}, {"pipeline": pipeline}):
        with contextlib.suppress(AttributeError):  # a list encodes nothing
            pipeline.encode_prompt(*CALL, **options)
    assert cache.stats()["bypassed"] == 2
    reference = weakref.ref(pipeline)
    del pipeline, options
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("encoder", [Encoder, LoadingEncoder])
def test_a_replaced_encoder_goes_at_once(encoder: Any) -> None:
    """It may be most of a device's memory."""
    pipeline, cache = installed(Adapter(encoder))
    used(pipeline, cache)
    found = [weakref.ref(pipeline.text_encoder), weakref.ref(pipeline.text_encoder.embed.weight)]
    pipeline.text_encoder = encoder()
    assert [reference() for reference in found] == [None, None]
    pipeline.encode_prompt(*CALL)
    reference = weakref.ref(pipeline.text_encoder)
    pipeline.text_encoder = None
    assert reference() is None


def test_a_replaced_part_of_an_encoder_goes_at_once() -> None:
    pipeline, cache = installed(Adapter(LoadingEncoder))
    used(pipeline, cache)
    for part in ("embed", "layers"):
        reference = weakref.ref(getattr(pipeline.text_encoder, part))
        setattr(pipeline.text_encoder, part, getattr(Encoder(), part))
        assert reference() is None
        pipeline.encode_prompt(*CALL)


def test_weights_and_outputs_go_at_once() -> None:
    pipeline, _cache = installed()
    weights = new_weights(pipeline.text_encoder, "text_encoder.")
    found = [weakref.ref(weight) for _, weight in weights]
    pipeline.load_weights(iter(weights))
    ids = torch.tensor([IDS])
    output = pipeline.encode_prompt(ids)[0]
    found += [weakref.ref(ids), weakref.ref(output)]
    del weights, ids, output
    assert [reference() for reference in found] == [None] * len(found)


def test_a_hundred_pipelines_leave_nothing_behind() -> None:
    used(*installed())  # the hooks that are for all pipelines are there
    hooks = [hooks for name, hooks in vars(torch_modules).items() if name.startswith("_global_") and hooks]

    def left() -> list[int]:
        gc.collect()
        omni_tensor_key.stats()  # drops what belongs to pipelines that are gone
        gc.collect()
        kinds = (Watch, WeightDoors, Adapter, Encoder, upstream.PromptEmbedCache, torch.Tensor)
        objects = gc.get_objects()
        door: Any = plugin._state.doors[plugin.modules.CACHE]
        return [*(sum(type(item) is kind for item in objects) for kind in kinds), len(door._watches), *map(len, hooks)]

    used(*installed())
    before = left()
    for _ in range(100):
        used(*installed(Adapter(LoadingEncoder)))
        used(*installed())
    assert left() == before


def test_watches_of_pipelines_that_are_gone_are_dropped_at_the_next_installation() -> None:
    door: Any = plugin._state.doors[plugin.modules.CACHE]
    for _ in range(5):
        pipeline, _ = installed()
        del pipeline
        gc.collect()
        kept, _ = installed()
        assert [watch.pipeline for watch in door._watches].count(None) == 0
    del kept


def test_a_worker_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu(monkeypatch)
    wrapper = wrapped()
    wrapper.sleep(1)
    wrapper.wake_up(["weights"])
    reference = weakref.ref(wrapper.worker)
    del wrapper
    assert reference() is None
