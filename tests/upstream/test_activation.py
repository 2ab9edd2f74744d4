"""Switching the extension on and off in a process that has upstream's cache already."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omni_tensor_key import activate, deactivate, is_active

from .fresh_process import FreshProcesses
from .support import ORIGINALS, Pipeline, counts, installed, replaced, upstream


@pytest.fixture(autouse=True)
def _inactive() -> Iterator[None]:
    """Before and after."""
    assert not is_active()
    assert not replaced()
    yield
    deactivate()
    assert not replaced()


def test_activate_and_deactivate() -> None:
    for _ in range(3):
        activate()
        assert is_active()
        for name in ("_hashable", "_build_key"):
            assert getattr(upstream, name) is not ORIGINALS[0][name]
        assert upstream.PromptEmbedCache.put is not ORIGINALS[1]["put"]
        deactivate()
        assert not is_active()
        assert not replaced()


def test_both_are_idempotent() -> None:
    activate()
    first = dict(vars(upstream)), dict(vars(upstream.PromptEmbedCache))
    activate()
    assert (dict(vars(upstream)), dict(vars(upstream.PromptEmbedCache))) == first
    deactivate()
    assert not replaced()
    deactivate()
    assert not replaced()


def test_what_else_the_module_has_stays() -> None:
    """Less is replaced than there is, and nothing is added."""
    before = list(vars(upstream)), list(vars(upstream.PromptEmbedCache))
    activate()
    assert set(replaced()) <= {"_hashable", "_build_key", "install_prompt_embed_cache", "get", "put"}
    assert (list(vars(upstream)), list(vars(upstream.PromptEmbedCache))) == before


def test_a_cache_that_is_installed_already_starts_to_hit() -> None:
    pipeline, cache = installed()
    for _ in range(3):
        pipeline.encode_prompt(torch.arange(3))
    assert counts(cache) == (0, 0, 3)
    activate()
    for _ in range(3):
        pipeline.encode_prompt(torch.arange(3))
    assert counts(cache) == (2, 1, 3)
    deactivate()
    for _ in range(3):
        pipeline.encode_prompt(torch.arange(3))
    assert counts(cache) == (2, 1, 6)
    activate()
    pipeline.encode_prompt(torch.arange(3))
    pipeline.encode_prompt(torch.arange(3))
    assert counts(cache) == (3, 2, 6)


@pytest.mark.parametrize("before", [False, True], ids=["after activation", "before activation"])
def test_a_cache_on_a_pipeline_whose_encode_prompt_is_no_method(before: bool) -> None:
    """Where upstream's wrapper is all that is found, nobody can say what to watch, and nothing with tensors stays."""
    pipeline = Pipeline()
    method = pipeline.encode_prompt

    def encode_prompt(prompt_ids: Any, attention_mask: Any = None) -> Any:
        return method(prompt_ids, attention_mask)

    pipeline.encode_prompt = encode_prompt  # type: ignore[method-assign]
    if not before:
        activate()
    cache = upstream.install_prompt_embed_cache(pipeline)
    activate()
    for _ in range(3):
        pipeline.encode_prompt(torch.arange(3))
    assert counts(cache) == ((0, 3, 0) if before else (2, 1, 0))
    assert pipeline.runs == counts(cache).misses


def test_a_decorated_encode_prompt_is_found() -> None:
    pipeline = Pipeline()

    @functools.wraps(pipeline.encode_prompt)
    def encode_prompt(*args: Any) -> Any:
        return type(pipeline).encode_prompt(pipeline, *args)

    pipeline.encode_prompt = encode_prompt  # type: ignore[method-assign]
    cache = upstream.install_prompt_embed_cache(pipeline)
    activate()
    for _ in range(3):
        pipeline.encode_prompt(torch.arange(3))
    assert counts(cache) == (2, 1, 0)


def test_entries_of_before_are_dropped() -> None:
    """Nobody has watched what they were made with."""
    pipeline, cache = installed()
    pipeline.encode_prompt([1, 2, 3])
    activate()
    for _ in range(2):
        pipeline.encode_prompt([1, 2, 3])
    assert counts(cache) == (1, 2, 0)


def test_an_uninstalled_cache() -> None:
    activate()
    pipeline, cache = installed()
    pipeline.encode_prompt(torch.arange(3))
    upstream.uninstall_prompt_embed_cache(pipeline)
    pipeline.encode_prompt(torch.arange(3))
    assert (pipeline.runs, counts(cache)) == (2, (0, 1, 0))
    again = upstream.install_prompt_embed_cache(pipeline)
    assert again is not cache
    for _ in range(2):
        pipeline.encode_prompt(torch.arange(3))
    assert counts(again) == (1, 1, 0)


def test_installing_twice_and_without_encode_prompt() -> None:
    activate()
    pipeline, cache = installed(max_size=3)
    assert upstream.install_prompt_embed_cache(pipeline, max_size=5) is cache
    assert upstream.install_prompt_embed_cache(object()) is None
    with pytest.raises(ValueError, match="max_size"):
        upstream.install_prompt_embed_cache(Pipeline(), max_size=0)


@pytest.mark.parametrize("name", ["_hashable", "_build_key", "put"])
def test_deactivate_refuses_to_undo_somebody_elses_change(name: str) -> None:
    activate()
    owner: Any = upstream.PromptEmbedCache if name == "put" else upstream
    ours = vars(owner)[name]

    def on_top(*args: Any) -> Any:
        return ours(*args)

    setattr(owner, name, on_top)
    before = dict(vars(upstream)), dict(vars(upstream.PromptEmbedCache))
    assert not is_active()
    with pytest.raises(RuntimeError, match=name):
        deactivate()
    assert (dict(vars(upstream)), dict(vars(upstream.PromptEmbedCache))) == before
    pipeline, cache = installed()  # the chain works
    pipeline.encode_prompt(torch.arange(3))
    pipeline.encode_prompt(torch.arange(3))
    assert counts(cache) == (1, 1, 0)
    setattr(owner, name, ours)
    assert is_active()


def test_from_eight_threads_at_once() -> None:
    for _ in range(4):
        barrier = threading.Barrier(8)

        def switch(barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            activate()

        threads = [threading.Thread(target=switch) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert is_active()
        deactivate()
        assert not replaced()


def test_a_log_handler_may_ask_what_is_active() -> None:
    """In another thread, too: the lock is free while something is logged."""
    answers: list[bool] = []

    class Asks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            thread = threading.Thread(target=lambda: answers.append(is_active()), daemon=True)
            thread.start()
            thread.join(60)

    logger, handler = logging.getLogger("vllm_omni.omni_tensor_key"), Asks()
    logger.addHandler(handler)
    try:
        activate()
    finally:
        logger.removeHandler(handler)
    assert answers == [True]


def test_who_holds_our_functions_gets_upstreams_keys_after_deactivation() -> None:
    """Nobody clears the caches any more, or clones what aliases an input."""
    activate()
    hashable, build_key = upstream._hashable, upstream._build_key
    signature = inspect.signature(Pipeline().encode_prompt)
    assert build_key(signature, "tag", (torch.arange(3),), {}) is not None
    deactivate()
    assert hashable(torch.arange(3)) is upstream._NOT_HASHABLE
    assert hashable([1, "a"]) == upstream._hashable([1, "a"])
    assert build_key(signature, "tag", (torch.arange(3),), {}) is None
    assert build_key(signature, "tag", args=([1],), kwargs={}) == upstream._build_key(signature, "tag", ([1],), {})


def test_what_was_imported_by_name_is_upstreams_again_after_deactivation(fresh: FreshProcesses) -> None:
    fresh.check(
        f"""
import gc, sys
import omni_tensor_key
from omni_tensor_key import upstream as ours

omni_tensor_key.activate()
import {upstream.__name__} as module
import vllm_omni.diffusion.cache as package
assert package.install_prompt_embed_cache is module.install_prompt_embed_cache
assert package.install_prompt_embed_cache.__wrapped__.__module__ == module.__name__
omni_tensor_key.deactivate()
assert package.install_prompt_embed_cache is module.install_prompt_embed_cache
assert not hasattr(package.install_prompt_embed_cache, "__wrapped__")
gc.collect()
assert not [door for door in gc.get_objects() if isinstance(door, ours.CacheDoor)]
omni_tensor_key.activate()
assert package.install_prompt_embed_cache is module.install_prompt_embed_cache
assert omni_tensor_key.is_active()
"""
    )


def test_activated_while_another_thread_imports_the_module(fresh: FreshProcesses) -> None:
    fresh.check(
        f"""
import importlib, importlib.machinery, sys, threading
import omni_tensor_key

name, inside, go_on = {upstream.__name__!r}, threading.Event(), threading.Event()
class Slow(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(finder, wanted, path=None, target=None):
        spec = super().find_spec(wanted, path, target)
        if wanted == name:
            run = spec.loader.exec_module
            def exec_module(made):
                inside.set()
                assert go_on.wait(60)
                run(made)
            spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Slow)
importer = threading.Thread(target=importlib.import_module, args=(name,))
importer.start()
assert inside.wait(60)
activation = threading.Thread(target=omni_tensor_key.activate)
activation.start()
activation.join(0.5)
go_on.set()
importer.join(60), activation.join(60)
assert omni_tensor_key.is_active()
"""
    )


def test_one_line_says_what_is_active(log: list[Any]) -> None:
    activate()
    activate()
    (record,) = log
    assert record.levelname == "INFO"
    assert "is active" in record.getMessage()
    assert "vllm-omni 0." in record.getMessage()
