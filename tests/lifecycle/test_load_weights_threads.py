"""Encoding while another thread loads weights: nothing that was computed with the old or half-written ones stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from .support import Adapter, identical, installed, is_hit, new_weights, without_cache

pytestmark = pytest.mark.usefixtures("active")

TIMEOUT_S = 60


class Paused(Adapter):
    """Stops after the weights have been read, before the result is returned, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.pause = False
        self.computed, self.go_on = threading.Event(), threading.Event()

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        output = Adapter.encode_prompt(self, prompt_ids, attention_mask)
        if self.pause:
            self.computed.set()
            assert self.go_on.wait(TIMEOUT_S)
        return output


def text(pipeline: Any) -> list[tuple[str, torch.Tensor]]:
    return new_weights(pipeline.text_encoder, "text_encoder.")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_a_load_during_an_encode(call: Any, threads: ThreadPoolExecutor) -> None:
    pipeline, cache = installed(Paused())
    before = without_cache(pipeline, *call)
    pipeline.pause = True
    encoding = threads.submit(pipeline.encode_prompt, *call)
    assert pipeline.computed.wait(TIMEOUT_S)
    pipeline.load_weights(text(pipeline))
    pipeline.go_on.set()
    assert identical(encoding.result(TIMEOUT_S), before)  # it began before the load, and its caller gets what it made
    pipeline.pause = False
    assert cache.stats()["size"] == 0
    assert identical(pipeline.encode_prompt(*call), without_cache(pipeline, *call))
    assert is_hit(pipeline, cache, *call)


def test_a_load_of_the_transformer_during_an_encode(call: Any, threads: ThreadPoolExecutor) -> None:
    pipeline, cache = installed(Paused())
    pipeline.pause = True
    encoding = threads.submit(pipeline.encode_prompt, *call)
    assert pipeline.computed.wait(TIMEOUT_S)
    pipeline.load_weights(new_weights(pipeline.transformer, "transformer."))
    pipeline.go_on.set()
    encoding.result(TIMEOUT_S)
    assert is_hit(pipeline, cache, *call)


def test_an_encode_during_a_load(call: Any, threads: ThreadPoolExecutor) -> None:
    pipeline, cache = installed()
    half_written, go_on = threading.Event(), threading.Event()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        first, *others = text(pipeline)
        yield first
        half_written.set()
        assert go_on.wait(TIMEOUT_S)
        yield from others

    loading = threads.submit(pipeline.load_weights, weights())
    assert half_written.wait(TIMEOUT_S)
    for _ in range(2):
        assert not is_hit(pipeline, cache, *call)
    assert cache.stats()["size"] == 0
    go_on.set()
    loading.result(TIMEOUT_S)
    assert not is_hit(pipeline, cache, *call)
    assert is_hit(pipeline, cache, *call)
    assert identical(pipeline.encode_prompt(*call), without_cache(pipeline, *call))


def test_an_encode_that_began_in_a_load_and_ends_after_it(call: Any, threads: ThreadPoolExecutor) -> None:
    pipeline, cache = installed(Paused())
    half_written, go_on = threading.Event(), threading.Event()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        first, *others = text(pipeline)
        yield first
        half_written.set()
        assert go_on.wait(TIMEOUT_S)
        yield from others

    loading = threads.submit(pipeline.load_weights, weights())
    assert half_written.wait(TIMEOUT_S)
    pipeline.pause = True
    encoding = threads.submit(pipeline.encode_prompt, *call)
    assert pipeline.computed.wait(TIMEOUT_S)
    go_on.set()
    loading.result(TIMEOUT_S)
    pipeline.go_on.set()
    encoding.result(TIMEOUT_S)
    pipeline.pause = False
    assert cache.stats()["size"] == 0
    assert identical(pipeline.encode_prompt(*call), without_cache(pipeline, *call))


class Gate:
    """A lock that one thread is held up at, until another is done or, as it should be, waits for that one."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.held_up: int | None = None
        self.arrived, self.other_is_done = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        if threading.get_ident() == self.held_up:
            self.held_up = None
            self.arrived.set()
            self.other_is_done.wait(0.5)
        self.lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self.lock.release()


def test_a_load_between_the_decision_to_store_and_the_store(call: Any, threads: ThreadPoolExecutor) -> None:
    class AtTheGate(Adapter):
        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            output = Adapter.encode_prompt(self, prompt_ids, attention_mask)
            gate.held_up = threading.get_ident()  # the next to come is the cache's put()
            return output

    pipeline, cache = installed(AtTheGate())
    gate = cache._lock = Gate(cache._lock)
    encoding = threads.submit(pipeline.encode_prompt, *call)
    assert gate.arrived.wait(TIMEOUT_S)
    loading = threads.submit(pipeline.load_weights, text(pipeline))
    loading.add_done_callback(lambda _: gate.other_is_done.set())
    loading.result(TIMEOUT_S)
    encoding.result(TIMEOUT_S)
    expected = without_cache(pipeline, *call)
    gate.held_up = None
    assert identical(pipeline.encode_prompt(*call), expected)


def test_calls_that_raise_do_not_make_others_forget_when_they_began(call: Any, threads: ThreadPoolExecutor) -> None:
    """The moment at which a call began is noted for a bounded number of calls."""

    class Failing(Paused):
        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            if attention_mask == "fail":
                raise ValueError("mine")
            return super().encode_prompt(prompt_ids, attention_mask)

    pipeline, cache = installed(Failing())
    pipeline.pause = True
    encoding = threads.submit(pipeline.encode_prompt, *call)
    assert pipeline.computed.wait(TIMEOUT_S)
    pipeline.load_weights(text(pipeline))
    keys = []
    for number in range(5000):
        key = ("tag", (("number", number),))
        keys.append(key)  # no address is used twice
        cache.get(key)
    with pytest.raises(ValueError, match="mine"):
        pipeline.encode_prompt(*call[:1], "fail")
    pipeline.go_on.set()
    encoding.result(TIMEOUT_S)
    pipeline.pause = False
    assert identical(pipeline.encode_prompt(*call), without_cache(pipeline, *call))
