"""activate() and deactivate(): what they replace and put back, in whichever module is imported."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import vllm_omni.diffusion.cache
from fresh_process import FreshProcesses
from freshness.workers import diffusion_model_runner, diffusion_worker, lora_manager
from support import CALLS, Adapter, Encoder, LoadingEncoder, installed, is_hit, load_into, new_weights, upstream
from vllm_omni.diffusion.cache.prompt_embed_cache import _hashable, install_prompt_embed_cache

import omni_tensor_key
from omni_tensor_key import plugin

TENSORS, LISTS = CALLS["tensors"], CALLS["lists"]


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    omni_tensor_key.deactivate()


def replaced_names() -> dict[tuple[str, str], int]:
    """The attributes of upstream's modules and classes, by identity."""
    owners: list[Any] = [upstream, vllm_omni.diffusion.cache, diffusion_model_runner]
    owners += [upstream.PromptEmbedCache, lora_manager.DiffusionLoRAManager, diffusion_worker.DiffusionWorker]
    owners += diffusion_worker.DiffusionWorker.__subclasses__()
    return {(owner.__name__, name): id(value) for owner in owners for name, value in vars(owner).items()}


def test_deactivate_puts_everything_back_and_bypasses_again() -> None:
    before = replaced_names()
    for _ in range(2):
        for _ in range(3):
            omni_tensor_key.activate()
        assert omni_tensor_key.is_active()
        assert replaced_names() != before
        pipeline, cache = installed()
        pipeline.encode_prompt(*TENSORS)
        assert is_hit(pipeline, cache, *TENSORS)
        omni_tensor_key.deactivate()
        assert not omni_tensor_key.is_active()
        assert omni_tensor_key.stats() == {}
        assert replaced_names() == before
        assert cache.stats()["size"] == 0
        assert not is_hit(pipeline, cache, *TENSORS)
        assert cache.stats()["bypassed"] == 1
        omni_tensor_key.deactivate()
        assert not is_hit(pipeline, cache, *LISTS)
        assert is_hit(pipeline, cache, *LISTS)


def test_a_guarded_cache_stays_guarded_for_life() -> None:
    """Whether or not the package's functions are in place; its tensors hit again when they are back."""
    omni_tensor_key.activate()
    pipeline, cache = installed()
    omni_tensor_key.deactivate()
    pipeline.encode_prompt(*LISTS)
    load_into(pipeline.text_encoder)
    assert not is_hit(pipeline, cache, *LISTS)
    omni_tensor_key.activate()
    pipeline.encode_prompt(*TENSORS)
    assert is_hit(pipeline, cache, *TENSORS)


def test_names_that_were_imported_earlier_lead_here() -> None:
    omni_tensor_key.activate()
    modules = (vllm_omni.diffusion.cache, diffusion_model_runner, sys.modules[__name__])
    assert {module.install_prompt_embed_cache for module in modules} == {upstream.install_prompt_embed_cache}
    for install in (install_prompt_embed_cache, diffusion_model_runner.install_prompt_embed_cache):
        pipeline = Adapter()
        cache = install(pipeline)
        assert cache is install(pipeline)  # as upstream's
        pipeline.encode_prompt(*TENSORS)
        assert is_hit(pipeline, cache, *TENSORS)
    assert _hashable([1]) == ("__seq__", (1,))  # a name that is not looked up at the call
    assert _hashable(torch.arange(3)) is upstream._NOT_HASHABLE


def test_a_cache_from_before_activation_never_stores_tensors() -> None:
    """Nobody would tell it of changed weights."""
    pipeline, cache = installed()
    pipeline.encode_prompt(*LISTS)
    omni_tensor_key.activate()
    assert is_hit(pipeline, cache, *LISTS)
    for _ in range(3):
        assert not is_hit(pipeline, cache, *TENSORS)
        assert cache.stats()["size"] == 1


def test_a_cache_without_a_pipeline_is_upstreams_and_stores_no_tensors() -> None:
    omni_tensor_key.activate()
    cache = upstream.PromptEmbedCache(max_size=2)
    cache.put("key", 3)
    assert cache.get("key") == 3
    signature = inspect.signature(Adapter().encode_prompt)
    key = upstream._build_key(signature, "tag", TENSORS, {})
    cache.put(key, torch.ones(1))
    assert cache.get(key) is upstream._CACHE_MISS
    assert cache.stats()["size"] == 1


def test_deactivate_does_not_undo_what_others_have_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    omni_tensor_key.activate()
    before = replaced_names()
    mine = upstream._build_key
    with monkeypatch.context() as patch:
        patch.setattr(upstream, "_build_key", lambda *call: mine(*call))
        assert not omni_tensor_key.is_active()
        with pytest.raises(RuntimeError, match="_build_key was replaced by other code"):
            omni_tensor_key.deactivate()
    assert replaced_names() == before
    assert omni_tensor_key.is_active()


def test_upstreams_uninstall_takes_the_guard_away() -> None:
    omni_tensor_key.activate()
    pipeline, _ = installed()
    upstream.uninstall_prompt_embed_cache(pipeline)
    runs = pipeline.runs
    for _ in range(3):
        pipeline.encode_prompt(*TENSORS)
    assert pipeline.runs == runs + 3
    pipeline, cache = installed(pipeline)
    pipeline.encode_prompt(*TENSORS)
    assert is_hit(pipeline, cache, *TENSORS)


@pytest.mark.parametrize("room", [(), ("__dict__",)], ids=["slots", "no weak references"])
def test_what_cannot_be_guarded_is_cached_as_by_upstream(log: Any, room: tuple[str, ...]) -> None:
    class Slots:
        __slots__ = ("_prompt_embed_cache", "_prompt_embed_cache_original_fn", "encode_prompt", *room)

        def __init__(self) -> None:
            self.encode_prompt = lambda prompt: torch.as_tensor(prompt) * 2

    pipeline = Slots()
    omni_tensor_key.activate()
    cache = upstream.install_prompt_embed_cache(pipeline)
    for _ in range(3):
        assert pipeline.encode_prompt(torch.ones(2, dtype=torch.int64)).tolist() == [2, 2]
        assert pipeline.encode_prompt([1]).tolist() == [2]
    assert (cache.hits, cache.stats()["size"]) == (2, 1)
    assert log.having("WARNING", "Slots has no guard")


def test_no_encode_prompt_is_upstreams_case() -> None:
    omni_tensor_key.activate()
    assert upstream.install_prompt_embed_cache(object()) is None

    class Odd:
        encode_prompt = dict  # has no signature

    odd = Odd()
    assert upstream.install_prompt_embed_cache(odd) is None
    assert odd.encode_prompt(a=1) == {"a": 1}
    assert vars(odd) == {}


RELOAD = """
import importlib, sys, torch
import omni_tensor_key as otk
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

class Pipeline:
    def encode_prompt(self, prompt_ids):
        return prompt_ids * 2

def hits():
    pipeline = Pipeline()
    cache = sys.modules[upstream.__name__].install_prompt_embed_cache(pipeline)
    for _ in range(3):
        pipeline.encode_prompt(torch.arange(3))
    return cache.stats()["hits"]

otk.activate()
assert (otk.is_active(), hits()) == (True, 2)
RENEW
assert otk.is_active() == (hits() == 2)
for _ in range(2):
    otk.activate()
    assert (otk.is_active(), hits()) == (True, 2)
otk.deactivate()
assert (otk.is_active(), hits()) == (False, 0)
otk.activate()
assert (otk.is_active(), hits()) == (True, 2)
"""


@pytest.mark.parametrize(
    "renew", ["importlib.reload(upstream)", "del sys.modules[upstream.__name__]; importlib.import_module(upstream.__name__)"]
)
def test_a_reloaded_or_new_cache_module(fresh: FreshProcesses, renew: str) -> None:
    fresh.check(RELOAD.replace("RENEW", renew))


def renewed(monkeypatch: pytest.MonkeyPatch, module: ModuleType, change: Callable[[Any], None]) -> Any:
    """An instance of this module of its own, changed."""
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None
    assert spec.loader is not None
    other: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    change(other)
    monkeypatch.setitem(sys.modules, module.__name__, other)
    return other


def test_another_lora_manager_empties_the_cache_at_each_call(monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    class DiffusionLoRAManager:
        def __init__(self, pipeline: Any) -> None:
            self.pipeline = pipeline

        def swap_adapter(self) -> int:
            return 3

        def unload_lora(self) -> None:
            raise OSError("mine")

        def describe(self) -> None: ...

    def change(module: Any) -> None:
        module.DiffusionLoRAManager = DiffusionLoRAManager

    renewed(monkeypatch, lora_manager, change)
    omni_tensor_key.activate()
    assert omni_tensor_key.is_active()
    assert log.having("WARNING", "another LoRA manager")
    pipeline, cache = installed()
    lora = DiffusionLoRAManager(pipeline)
    for call in (TENSORS, LISTS):
        pipeline.encode_prompt(*call)
        lora.describe()
        assert is_hit(pipeline, cache, *call)
        assert lora.swap_adapter() == 3
        assert not is_hit(pipeline, cache, *call)
        with pytest.raises(OSError, match="mine"):
            lora.unload_lora()
        assert not is_hit(pipeline, cache, *call)


@pytest.mark.parametrize("missing", ["sleep", "wake_up", "DiffusionWorker"])
def test_another_worker_keeps_the_rest(monkeypatch: pytest.MonkeyPatch, log: Any, missing: str) -> None:
    def change(module: Any) -> None:
        delattr(module if missing == "DiffusionWorker" else module.DiffusionWorker, missing)

    renewed(monkeypatch, diffusion_worker, change)
    omni_tensor_key.activate()
    assert omni_tensor_key.is_active()
    assert len(log.having("WARNING", "DiffusionWorker")) == 1
    pipeline, cache = installed()
    pipeline.encode_prompt(*TENSORS)
    assert is_hit(pipeline, cache, *TENSORS)
    omni_tensor_key.deactivate()


def used(pipeline: Any, cache: Any) -> None:
    for call in (TENSORS, LISTS):
        pipeline.encode_prompt(*call)
    pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))
    load_into(pipeline.text_encoder)
    for call in (TENSORS, LISTS):
        pipeline.encode_prompt(*call)


@pytest.mark.parametrize("encoder", [Encoder, LoadingEncoder])
def test_nothing_keeps_a_pipeline_or_its_parts_alive(encoder: Any) -> None:
    omni_tensor_key.activate()
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
    omni_tensor_key.activate()
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
    omni_tensor_key.activate()
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
