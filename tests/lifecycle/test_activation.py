"""Switching the extension on and off around pipelines that live on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

import omni_tensor_key

from .conftest import Log
from .lora import DiffusionLoRAManager
from .support import IDS, MASK, Adapter, Encoder, LoadingEncoder, installed, is_hit, kept, new_weights, recomputed
from .workers import DiffusionModelRunner, DiffusionWorker, diffusion_model_runner

CALL = (torch.tensor([IDS]), torch.tensor([MASK]))


@pytest.fixture(autouse=True)
def _inactive_afterwards() -> Iterator[None]:
    yield
    if omni_tensor_key.is_active():
        omni_tensor_key.deactivate()


def traces(*pipelines: Any) -> list[Any]:
    """Everything that the extension could leave something on."""
    owners: list[Any] = [upstream.PromptEmbedCache, DiffusionWorker, DiffusionLoRAManager, DiffusionModelRunner]
    found = [dict(vars(owner)) for owner in owners]
    modules = ("vllm_omni.diffusion.cache", upstream.__name__, diffusion_model_runner.__name__)
    found += [dict(vars(sys.modules[name])) for name in modules]
    found += [dict(hooks or {}) for name, hooks in vars(torch_modules).items() if name.startswith("_global_")]
    for pipeline in pipelines:
        for module in pipeline.modules():
            attributes = {
                name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()
            }
            found.append((module, attributes))
        if (cache := vars(pipeline).get("_prompt_embed_cache")) is not None:
            found.append({name: value for name, value in vars(cache).items() if name != "_store"})
    return found


def text(pipeline: Any) -> Any:
    return new_weights(pipeline.text_encoder, "text_encoder.")


def test_deactivation_leaves_no_trace() -> None:
    pipelines = [installed(Adapter(encoder))[0] for encoder in (Encoder, LoadingEncoder)]
    pipelines[1].text_encoder.inner = pipelines[0].text_encoder  # two watches on one module
    before = traces(*pipelines)
    for _ in range(2):
        omni_tensor_key.activate()
        assert traces(*pipelines) != before
        for pipeline in pipelines:
            pipeline.encode_prompt(*CALL)
            pipeline.load_weights(text(pipeline))
            pipeline.encode_prompt(*CALL)
        omni_tensor_key.deactivate()
        for pipeline in pipelines:
            vars(pipeline._prompt_embed_cache).update(hits=0, misses=0)
            pipeline.runs = 0
        assert traces(*pipelines) == before


def test_a_module_that_two_pipelines_share_is_freed_from_both_in_any_order() -> None:
    first, second = Adapter(LoadingEncoder), Adapter()
    second.text_encoder = first.text_encoder
    before = traces(first, second)
    omni_tensor_key.activate()
    for order in ((first, second), (second, first)):
        for pipeline in order:
            installed(pipeline)
        for pipeline in (first, second):
            upstream.uninstall_prompt_embed_cache(pipeline)
            installed(pipeline)  # takes the old watch off
        omni_tensor_key.deactivate()
        for pipeline in (first, second):
            upstream.uninstall_prompt_embed_cache(pipeline)
            del pipeline.encode_prompt  # uninstalling leaves the original here
        assert traces(first, second) == before
        omni_tensor_key.activate()


def test_the_pipelines_own_load_weights_comes_back() -> None:
    pipeline = Adapter()
    mine = pipeline.load_weights = lambda weights: "mine"
    omni_tensor_key.activate()
    installed(pipeline)
    assert pipeline.load_weights([]) == "mine"
    omni_tensor_key.deactivate()
    assert pipeline.load_weights is mine


def test_what_others_replaced_meanwhile_stays() -> None:
    omni_tensor_key.activate()
    pipeline, _ = installed(Adapter(LoadingEncoder))
    theirs = pipeline.load_weights = pipeline.text_encoder.load_weights = lambda weights: "theirs"
    omni_tensor_key.deactivate()
    assert pipeline.load_weights is theirs
    assert pipeline.text_encoder.load_weights is theirs


def test_deactivation_drops_the_entries() -> None:
    """Nobody would notice changed weights from then on."""
    omni_tensor_key.activate()
    pipeline, cache = installed()
    for call in (CALL, ([IDS], [MASK])):
        pipeline.encode_prompt(*call)
    assert cache.stats()["size"] == 2
    omni_tensor_key.deactivate()
    assert cache.stats()["size"] == 0
    pipeline.encode_prompt(*CALL)
    assert cache.stats()["size"] == 0


def test_pipelines_that_exist_already_are_watched(call: Any) -> None:
    pipeline, cache = installed(Adapter(LoadingEncoder))
    omni_tensor_key.activate()
    for change in (
        lambda: pipeline.load_weights(text(pipeline)),
        lambda: pipeline.text_encoder.load_weights(new_weights(pipeline.text_encoder, seed=2)),
        lambda: pipeline.text_encoder.load_state_dict(dict(new_weights(pipeline.text_encoder, seed=3))),
        lambda: setattr(pipeline, "text_encoder", LoadingEncoder()),
        lambda: setattr(pipeline.text_encoder, "embed", nn.Embedding(16, 4)),
    ):
        with recomputed(pipeline, cache, *call):
            change()
    with kept(pipeline, cache, *call):
        pipeline.load_weights(new_weights(pipeline.transformer, "transformer."))


def test_all_of_several_existing_pipelines_are_watched() -> None:
    found = [installed() for _ in range(3)]
    omni_tensor_key.activate()
    for pipeline, cache in found:
        with recomputed(pipeline, cache, *CALL):
            pipeline.load_weights(text(pipeline))


def test_the_entries_of_before_are_dropped() -> None:
    """Nobody has watched what they were made with."""
    pipeline, cache = installed()
    pipeline.encode_prompt([IDS], [MASK])
    omni_tensor_key.activate()
    assert not is_hit(pipeline, cache, [IDS], [MASK])
    assert is_hit(pipeline, cache, [IDS], [MASK])


@pytest.mark.parametrize("by_name", [upstream, sys.modules["vllm_omni.diffusion.cache"], diffusion_model_runner])
def test_every_place_from_which_upstream_installs(by_name: Any) -> None:
    omni_tensor_key.activate()
    pipeline = Adapter()
    cache = by_name.install_prompt_embed_cache(pipeline, max_size=4, enabled=True, model_tag="tag")
    with recomputed(pipeline, cache, *CALL):
        pipeline.load_weights(text(pipeline))


def test_uninstall_and_reinstall() -> None:
    omni_tensor_key.activate()
    pipeline, first = installed()
    pipeline.encode_prompt(*CALL)
    upstream.uninstall_prompt_embed_cache(pipeline)
    runs = pipeline.runs
    pipeline.encode_prompt(*CALL)
    assert pipeline.runs == runs + 1
    pipeline.load_weights(text(pipeline))  # without a cache
    _, second = installed(pipeline)
    assert second is not first
    assert not is_hit(pipeline, second, *CALL)
    with recomputed(pipeline, second, *CALL):
        pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder.", seed=2))
    omni_tensor_key.deactivate()
    assert "load_weights" not in vars(pipeline)


def test_installing_twice_is_one_watch() -> None:
    omni_tensor_key.activate()
    pipeline, cache = installed()
    load = pipeline.load_weights
    assert installed(pipeline)[1] is cache
    assert pipeline.load_weights is load


class Slotted:
    """Cannot be referred to weakly, and its cache not be watched."""

    __slots__ = ("__dict__",)

    def encode_prompt(self, prompt_ids: Any) -> torch.Tensor:
        return torch.as_tensor(prompt_ids) * 2


def test_a_pipeline_that_cannot_be_watched_is_not_cached_with_tensors(log: Log) -> None:
    omni_tensor_key.activate()
    pipeline, cache = installed(Slotted())
    for _ in range(3):
        assert torch.equal(pipeline.encode_prompt(CALL[0]), CALL[0] * 2)
    assert cache.stats()["size"] == 0
    assert not is_hit(pipeline, cache, IDS)
    assert is_hit(pipeline, cache, IDS)
    (line,) = log.having("WARNING")
    assert "Slotted cannot be watched for changed weights" in line


def test_a_model_that_is_loaded_while_active_and_used_after(call: Any) -> None:
    """Calls that began before a deactivation end after it."""

    class Switching(Adapter):
        switch: Any = None

        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            output = Adapter.encode_prompt(self, prompt_ids, attention_mask)
            if self.switch is not None:
                self.switch()
            return output

    omni_tensor_key.activate()
    pipeline, cache = installed(Switching())
    for switch in (omni_tensor_key.deactivate, omni_tensor_key.activate, omni_tensor_key.deactivate):
        pipeline.switch = switch
        pipeline.encode_prompt(*call)
        pipeline.switch = None
    omni_tensor_key.activate()
    cache.clear()
    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(text(pipeline))


def test_a_call_that_asks_the_cache_after_the_extension_has_gone(call: Any) -> None:
    pipeline, cache = installed()
    before = traces(pipeline)
    omni_tensor_key.activate()
    key = upstream._build_key(upstream.inspect.signature(pipeline.encode_prompt), "Adapter", call, {})
    get, put = upstream.PromptEmbedCache.get, upstream.PromptEmbedCache.put
    omni_tensor_key.deactivate()
    assert get(cache, key) is upstream._CACHE_MISS
    put(cache, key, "value")
    cache.clear()
    cache.misses = 0
    assert traces(pipeline) == before
