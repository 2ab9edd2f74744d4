"""Switching the extension on and off while other threads are at work."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

import omni_tensor_key
from omni_tensor_key import plugin

from .support import CALLS, Adapter, installed
from .workers import DiffusionWorker


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    omni_tensor_key.deactivate()


def test_threads_that_find_the_same_cache_watch_it_once() -> None:
    """It was installed by a function that somebody had imported before the extension was active."""
    by_name = upstream.install_prompt_embed_cache
    omni_tensor_key.activate()
    door: Any = plugin._state.doors[plugin.modules.CACHE]
    pipelines = [Adapter() for _ in range(10)]
    for count, pipeline in enumerate(pipelines, len(door._watches) + 1):
        by_name(pipeline)
        threads = [threading.Thread(target=pipeline.encode_prompt, args=CALLS["lists"]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(door._watches) == count


@pytest.mark.parametrize("ask", [omni_tensor_key.is_active, omni_tensor_key.stats], ids=["is_active", "stats"])
def test_a_finalizer_that_asks_while_another_thread_deactivates(ask: Any) -> None:
    """It runs where an entry is dropped, under locks that the other thread waits for."""

    class Output:
        def __del__(self) -> None:
            dropped.set()
            deactivating.join(0.2)  # it waits for the end of this
            ask()

    class Returning(Adapter):
        def encode_prompt(self, prompt: str) -> Any:
            return Output()

    omni_tensor_key.activate()
    pipeline, _ = installed(Returning())
    dropped = threading.Event()

    def deactivate() -> None:
        dropped.wait()
        omni_tensor_key.deactivate()

    deactivating = threading.Thread(target=deactivate, daemon=True)
    pipeline.encode_prompt("a")
    deactivating.start()
    encoder = pipeline.text_encoder
    loading = threading.Thread(target=encoder.load_state_dict, args=[encoder.state_dict()], daemon=True)
    loading.start()
    for thread in (loading, deactivating):
        thread.join(30)
        assert not thread.is_alive()
    assert not omni_tensor_key.is_active()


def test_a_log_handler_that_waits_for_another_thread() -> None:
    """It may wait for one that installs a cache, so whoever logs must not hold what that waits for."""
    waiting: list[str] = []
    logger = logging.getLogger("vllm_omni.omni_tensor_key")

    class Waiting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=installed, daemon=True)
                other.start()
                other.join(30)
                assert not other.is_alive(), record.getMessage()
                waiting.append(record.getMessage())

    handler, before = Waiting(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        omni_tensor_key.activate()
        pipeline, earlier = installed()
        pipeline.encode_prompt(*CALLS["lists"])
        upstream.uninstall_prompt_embed_cache(pipeline)
        installed(pipeline)
        assert earlier.stats()["size"] == 0  # emptied when the second one came
        pipeline.encode_prompt(*CALLS["lists"])
        pipeline.text_encoder.load_state_dict(pipeline.text_encoder.state_dict())
        omni_tensor_key.deactivate()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert any("load_state_dict" in text for text in waiting)


def test_other_threads_do_not_notice_the_switch() -> None:
    """Whoever refers to a tuple that another thread is filling makes it raise SystemError there."""
    wrong: list[BaseException] = []
    stop = threading.Event()

    def fill() -> None:
        try:
            while not stop.is_set():
                tuple(part for part in (upstream.PromptEmbedCache, DiffusionWorker) * 50)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=fill) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        omni_tensor_key.activate()
        omni_tensor_key.deactivate()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
