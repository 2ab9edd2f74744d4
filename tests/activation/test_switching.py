"""Activation and deactivation in a process that has upstream's cache already."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import upstream

import omni_tensor_key
from omni_tensor_key import activate, deactivate, is_active

from .fresh_process import FreshProcesses

IDS = torch.arange(3)


class Pipeline:
    def __init__(self) -> None:
        self.runs = 0

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        self.runs += 1
        return torch.as_tensor(prompt_ids) * 2


def installed(**options: Any) -> tuple[Any, Any]:
    pipeline = Pipeline()
    return pipeline, upstream.install_prompt_embed_cache(pipeline, **options)


def counts(cache: Any) -> tuple[int, ...]:
    found = cache.stats()
    return found["hits"], found["misses"], found["bypassed"]


def attributes() -> list[Any]:
    """All that could be replaced in upstream's modules."""
    import vllm_omni.diffusion.cache as package

    base = upstream.PromptEmbedCache
    return [dict(vars(owner)) for owner in (upstream, base, package)]


@pytest.fixture(autouse=True)
def _inactive() -> Iterator[None]:
    """Before and after, and nothing of upstream's is another."""
    assert not is_active()
    before = attributes()
    yield
    deactivate()
    assert attributes() == before


def test_activate_and_deactivate_and_both_again() -> None:
    for _ in range(3):
        activate()
        first = attributes()
        activate()
        assert is_active()
        assert attributes() == first
        deactivate()
        deactivate()
        assert not is_active()


def test_what_else_the_module_has_stays() -> None:
    before = attributes()[0]
    activate()
    now = attributes()[0]
    replaced = {name for name in now if now[name] is not before[name]}
    assert replaced == {"_hashable", "_build_key", "install_prompt_embed_cache", "PromptEmbedCache"}
    assert list(now) == list(before)
    assert issubclass(upstream.PromptEmbedCache, before["PromptEmbedCache"])


def test_a_cache_of_before_never_stores_tensors() -> None:
    """Nobody tells it of changed weights."""
    pipeline, cache = installed()
    activate()
    for _ in range(3):
        pipeline.encode_prompt(IDS)
        pipeline.encode_prompt([1])
    assert counts(cache) == (2, 4, 0)
    assert cache.stats()["size"] == 1
    assert pipeline.runs == 4


def test_a_cache_of_now_keeps_its_guard_after_deactivation() -> None:
    activate()
    pipeline, cache = installed()
    for argument in (IDS, [1]):
        pipeline.encode_prompt(argument)
        pipeline.encode_prompt(argument)
    deactivate()
    assert cache.stats()["size"] == 0
    for argument in (IDS, [1], [1]):
        pipeline.encode_prompt(argument)
    assert counts(cache) == (3, 3, 1)
    activate()
    pipeline.encode_prompt(IDS)
    pipeline.encode_prompt(IDS)
    assert counts(cache) == (4, 4, 1)


def test_a_cache_without_a_pipeline_is_upstreams() -> None:
    activate()
    cache = upstream.PromptEmbedCache(max_size=2)
    key = upstream._build_key(__import__("inspect").signature(Pipeline().encode_prompt), "tag", (IDS,), {})
    for number in (1, 2, 3):
        cache.put(number, number)
        cache.put(key, number)
    assert [cache.get(number) for number in (2, 3)] == [2, 3]
    assert cache.get(1) is upstream._CACHE_MISS
    assert cache.get(key) is upstream._CACHE_MISS
    assert set(cache.stats()) == {"size", "max_size", "hits", "misses", "bypassed"}


def test_installing_twice_uninstalling_and_without_encode_prompt() -> None:
    activate()
    pipeline, cache = installed(max_size=3)
    assert upstream.install_prompt_embed_cache(pipeline, max_size=5) is cache
    for attempt in range(3):
        upstream.uninstall_prompt_embed_cache(pipeline)
        pipeline.encode_prompt(IDS)
        again = upstream.install_prompt_embed_cache(pipeline)
        assert again is not cache
        before = pipeline.runs
        for _ in range(2):
            pipeline.encode_prompt(IDS)
        assert (counts(again), pipeline.runs) == ((1, 1, 0), before + 1), attempt
    for nothing in (object(), type("Uncallable", (), {"encode_prompt": 3})()):
        assert upstream.install_prompt_embed_cache(nothing) is None
    broken = Pipeline()
    with pytest.raises(ValueError, match="max_size"):
        upstream.install_prompt_embed_cache(broken, max_size=0)
    assert broken.encode_prompt(IDS) is not None
    off, cache = installed(enabled=False)
    assert [off.encode_prompt(IDS).tolist() for _ in range(2)] == [[0, 2, 4]] * 2
    assert counts(cache) == (0, 0, 0)


@pytest.mark.parametrize("name", ["_hashable", "_build_key", "install_prompt_embed_cache"])
def test_deactivate_refuses_to_undo_somebody_elses_change(name: str) -> None:
    activate()
    ours = vars(upstream)[name]
    setattr(upstream, name, lambda *args, **kwargs: ours(*args, **kwargs))
    before = attributes()
    assert not is_active()
    with pytest.raises(RuntimeError, match=name):
        deactivate()
    assert attributes() == before
    pipeline, cache = installed()  # the chain works
    pipeline.encode_prompt(IDS)
    pipeline.encode_prompt(IDS)
    assert counts(cache) == (1, 1, 0)
    setattr(upstream, name, ours)
    assert is_active()


def test_a_module_that_is_reloaded_or_imported_anew(fresh: FreshProcesses) -> None:
    fresh.check(
        """
import importlib, sys, torch
import omni_tensor_key
name = "vllm_omni.diffusion.cache.prompt_embed_cache"
omni_tensor_key.activate()
first = importlib.import_module(name)
class Pipeline:
    def encode_prompt(self, prompt_ids):
        return prompt_ids * 2
def hits(module):
    pipeline = Pipeline()
    cache = module.install_prompt_embed_cache(pipeline)
    for _ in range(3):
        pipeline.encode_prompt(torch.tensor([1]))
    return cache.stats()["hits"]
assert omni_tensor_key.is_active() and hits(first) == 2
importlib.reload(first)
assert not omni_tensor_key.is_active() and hits(first) == 0
omni_tensor_key.activate()
assert omni_tensor_key.is_active() and hits(first) == 2
del sys.modules[name]
second = importlib.import_module(name)
assert second is not first and not omni_tensor_key.is_active() and hits(second) == 0
omni_tensor_key.activate()
assert omni_tensor_key.is_active() and hits(second) == 2
omni_tensor_key.deactivate()
assert not omni_tensor_key.is_active() and hits(second) == 0
"""
    )


def test_what_was_imported_by_name_meanwhile_is_put_back(fresh: FreshProcesses) -> None:
    fresh.check(
        """
import omni_tensor_key
omni_tensor_key.activate()
import vllm_omni.diffusion.cache as package
from vllm_omni.diffusion.cache import prompt_embed_cache as module
assert package.install_prompt_embed_cache is module.install_prompt_embed_cache
assert module.install_prompt_embed_cache.__wrapped__.__module__ == module.__name__
omni_tensor_key.deactivate()
assert package.install_prompt_embed_cache is module.install_prompt_embed_cache
assert not hasattr(module.install_prompt_embed_cache, "__wrapped__")
"""
    )


DEGRADED = {
    "vllm_omni.diffusion.lora.manager": "class DiffusionLoRAManager:\n def use_lora(self): ...\n def other(self): ...",
    "vllm_omni.diffusion.worker.diffusion_worker": "class OtherWorker: ...",
}


def test_an_unknown_lora_manager_and_worker_degrade(fresh: FreshProcesses) -> None:
    result = fresh.check(
        f"""
import sys, torch
for name in {list(DEGRADED)!r}:
    sys.modules.pop(name, None)
for name, source in {DEGRADED!r}.items():
    class Finder:
        @staticmethod
        def find_spec(wanted, path=None, target=None, name=name, source=source):
            import importlib.machinery
            if wanted != name:
                return None
            class Loader:
                def create_module(self, spec): return None
                def exec_module(self, module): exec(source, vars(module))
            return importlib.machinery.ModuleSpec(name, Loader())
    sys.meta_path.insert(0, Finder)
import omni_tensor_key
omni_tensor_key.activate()  # puts the finder that calls its hooks first
for name in {list(DEGRADED)!r}:
    __import__(name)
from vllm_omni.diffusion.cache import prompt_embed_cache as module
assert omni_tensor_key.is_active()
class Pipeline:
    def encode_prompt(self, prompt_ids):
        return prompt_ids * 2
pipeline = Pipeline()
cache = module.install_prompt_embed_cache(pipeline)
manager = sys.modules["vllm_omni.diffusion.lora.manager"].DiffusionLoRAManager()
for call, expected in ((manager.other, 1), (manager.use_lora, 0)):
    pipeline.encode_prompt(torch.tensor([1]))
    call()
    assert cache.stats()["size"] == expected
"""
    )
    assert len(result.lines_with("no DiffusionWorker with sleep() and wake_up()")) == 1
    assert len(result.lines_with("WARNING")) == 1


def test_activation_by_many_threads() -> None:
    barrier = threading.Barrier(8)

    def switch() -> None:
        barrier.wait()
        activate()

    threads = [threading.Thread(target=switch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert is_active()


def test_the_public_names() -> None:
    assert len(omni_tensor_key.__all__) == 10
    for name in omni_tensor_key.__all__:
        assert getattr(importlib.import_module("omni_tensor_key"), name) is not None
        assert name in dir(sys.modules["omni_tensor_key"])
    with pytest.raises(AttributeError, match="nothing"):
        omni_tensor_key.nothing  # noqa: B018
