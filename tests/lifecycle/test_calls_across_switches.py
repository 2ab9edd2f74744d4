"""Calls that are under way while the extension comes or goes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

import omni_tensor_key
from omni_tensor_key.watch import Watch
from omni_tensor_key.weights import WeightDoors

from .support import CALLS, Adapter, identical, installed, is_hit, new_weights, recomputed, without_cache

OTHER = {"tensors": (torch.tensor([[7, 7]]), torch.tensor([[1, 1]])), "lists": ([[7, 7]], [[1, 1]])}


@pytest.fixture(autouse=True)
def _inactive_afterwards() -> Iterator[None]:
    yield
    if omni_tensor_key.is_active():
        omni_tensor_key.deactivate()


class LateList(list[Any]):
    """Does something once, when upstream copies it to store it: with put() looked up, and not called yet."""

    do: Callable[[], object] | None = None

    def __iter__(self) -> Iterator[Any]:
        do, self.do = self.do, None
        if do is not None:
            do()
        return super().__iter__()


class Interrupted(Adapter):
    """Encodes, and then something happens before the output is stored: at once, or when put() is already chosen."""

    late = False
    do: Callable[[], object] | None = None

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        output = list(Adapter.encode_prompt(self, prompt_ids, attention_mask))
        do, self.do = self.do, None
        if do is not None and self.late:
            output = LateList(output)
            output.do = do
        elif do is not None:
            do()
        return output


def on_another_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("begins", ["on", "off"])
@pytest.mark.parametrize("run", [on_another_thread, lambda function: function()])
def test_weights_that_change_during_a_call_that_the_switch_overtook(
    call: Any, late: bool, begins: str, run: Any
) -> None:
    kind = "tensors" if isinstance(call[0], torch.Tensor) else "lists"
    if (kind, begins, late) == ("tensors", "off", True):
        pytest.skip("upstream alone stores nothing of a call with tensors")
    pipeline, cache = installed(Interrupted())
    pipeline.late = late
    other = OTHER[kind]
    if begins == "on":
        omni_tensor_key.activate()

    def switch() -> None:
        if begins == "on":
            omni_tensor_key.deactivate()
        omni_tensor_key.activate()
        with recomputed(pipeline, cache, *other):
            pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))

    pipeline.do = lambda: run(switch)
    before = pipeline.encode_prompt(*call)
    expected = without_cache(pipeline, *call)
    assert not identical(list(before), list(expected))
    assert identical(list(pipeline.encode_prompt(*call)), list(expected))
    assert is_hit(pipeline, cache, *call)
    assert is_hit(pipeline, cache, *other)


@pytest.mark.parametrize("begins", ["on", "off"])
def test_weights_that_change_during_a_call_that_began_while_an_earlier_one_was_running(call: Any, begins: str) -> None:
    pipeline, _ = installed(Interrupted())
    if begins == "on":
        omni_tensor_key.activate()
    second_is_encoding, first_is_over = threading.Event(), threading.Event()

    def change() -> None:
        second_is_encoding.set()
        first_is_over.wait()
        pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))

    def encode_second() -> None:
        pipeline.do = change
        pipeline.encode_prompt(*call)

    second = threading.Thread(target=encode_second)

    def switch() -> None:
        if begins == "on":
            omni_tensor_key.deactivate()
        omni_tensor_key.activate()
        second.start()
        second_is_encoding.wait()

    pipeline.do = switch
    pipeline.encode_prompt(*OTHER["lists"])
    first_is_over.set()
    second.join()
    assert identical(list(pipeline.encode_prompt(*call)), list(without_cache(pipeline, *call)))


def test_a_key_that_is_looked_up_after_the_extension_has_gone() -> None:
    """Between upstream's two steps, the key and the lookup, another call has stored what its caller may edit."""
    omni_tensor_key.activate()
    _, cache = installed()
    signature = upstream.inspect.signature(Adapter.encode_prompt)
    stored, sought = (upstream._build_key(signature, "tag", (None, *CALLS["tensors"]), {}) for _ in range(2))
    assert stored == sought
    omni_tensor_key.deactivate()
    cache.put(stored, CALLS["tensors"])
    assert cache.get(sought) is upstream._CACHE_MISS
    assert cache.get(stored) is CALLS["tensors"]
    omni_tensor_key.activate()
    assert upstream._build_key(signature, "tag", (None, *CALLS["tensors"]), {}) not in (stored, sought)


def test_the_extension_goes_in_the_middle_of_a_lookup() -> None:
    """Keys that cease to be equal there would make upstream's get() raise KeyError."""

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            if not going:
                going.append(threading.Thread(target=omni_tensor_key.deactivate))
                going[0].start()
                going[0].join(0.5)  # as far as it can get: the lookup has upstream's lock
            return str.__eq__(self, other)

    class Named(Adapter):
        def encode_prompt(self, prompt_ids: Any, name: str = "", a_mask: Any = None) -> Any:
            return Adapter.encode_prompt(self, prompt_ids, a_mask)

    going: list[threading.Thread] = []
    omni_tensor_key.activate()
    pipeline, cache = installed(Named())
    ids, mask = CALLS["tensors"]
    first = pipeline.encode_prompt(ids, Name("a"), mask)
    assert identical(pipeline.encode_prompt(ids, Name("a"), mask), first)
    going[0].join()
    assert not omni_tensor_key.is_active()
    assert cache.stats() == {"size": 0, "max_size": 32, "hits": 1, "misses": 1, "bypassed": 0}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("step", ["WeightDoors.remove", "Watch.close"])
def test_a_deactivation_that_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], step: str
) -> None:
    """It ends all the same, and the next activation begins anew."""
    pipelines = [installed() for _ in range(3)]
    before = dict(vars(upstream)), dict(vars(upstream.PromptEmbedCache))
    omni_tensor_key.activate()
    for pipeline, _ in pipelines:
        pipeline.encode_prompt(*CALLS["tensors"])
    owner = {"WeightDoors": WeightDoors, "Watch": Watch}[step.split(".")[0]]
    original, calls = vars(owner)[step.split(".")[1]], 0

    def interrupted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step.split(".")[1], interrupted)
        with pytest.raises(error):
            omni_tensor_key.deactivate()
    assert calls == 3
    assert not omni_tensor_key.is_active()
    assert (dict(vars(upstream)), dict(vars(upstream.PromptEmbedCache))) == before
    omni_tensor_key.activate()
    for pipeline, cache in pipelines:
        assert not is_hit(pipeline, cache, *CALLS["tensors"])
        assert is_hit(pipeline, cache, *CALLS["tensors"])


def test_a_late_activation_beside_threads_that_never_rest() -> None:
    """Some call is always running."""
    pipeline, cache = installed()
    stop = threading.Event()
    wrong: list[BaseException] = []

    def call() -> None:
        try:
            for _ in range(20_000):
                if stop.is_set():
                    return
                pipeline.encode_prompt(*CALLS["tensors"])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        omni_tensor_key.activate()
        while cache.stats()["hits"] < 100 and any(thread.is_alive() for thread in threads):
            stop.wait(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not wrong
    assert cache.stats()["hits"] >= 100
