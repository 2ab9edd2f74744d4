"""Many threads on one pipeline, at capacity, while the cache is cleared and the extension switched."""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from omni_tensor_key import activate, deactivate, is_active

from .support import SEED, counts, installed, upstream

THREADS = 16
CALLS = 1300  # of each thread
PROMPTS = 24


class Encoder:
    """Returns its own mask, which the callers write to as soon as they have the answer."""

    def __init__(self) -> None:
        self.runs = 0
        self.lock = threading.Lock()

    def encode_prompt(self, prompt_ids: torch.Tensor, attention_mask: torch.Tensor, n: int = 1) -> Any:
        with self.lock:
            self.runs += 1
        return prompt_ids * 3 + n, attention_mask


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    """A deadlock ends the process and says where; threads switch often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    sys.setswitchinterval(interval)


def caller(pipeline: Any, seed: int, calls: int, wrong: list[Any]) -> Callable[[], None]:
    rng = random.Random(seed)

    def run() -> None:
        length = 16
        ids, mask = torch.empty(length, dtype=torch.int64), torch.empty(length, dtype=torch.int64)
        try:
            for _ in range(calls):
                prompt, n = rng.randrange(PROMPTS), rng.choice([1, 1, 1, 2])
                ids.fill_(prompt)
                mask.fill_(prompt)
                embeds, returned = pipeline.encode_prompt(ids, mask, n)
                if not (embeds.eq(prompt * 3 + n).all() and returned.eq(prompt).all()):
                    wrong.append((prompt, n, embeds, returned))
                mask.fill_(-1)
        except BaseException as error:
            wrong.append(error)
            raise

    return run


def run_all(actions: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("active")
def test_every_call_gets_its_own_answer_and_is_counted() -> None:
    pipeline, cache = installed(Encoder(), max_size=8)
    wrong: list[Any] = []
    stop = threading.Event()

    def clear() -> None:
        while not stop.wait(0.01):
            cache.clear()

    clearing = threading.Thread(target=clear)
    clearing.start()
    run_all([caller(pipeline, SEED + i, CALLS, wrong) for i in range(THREADS)])
    stop.set()
    clearing.join()
    assert not wrong
    hits, misses, bypassed = counts(cache)
    assert hits + misses == THREADS * CALLS
    assert bypassed == 0
    assert misses == pipeline.runs
    assert hits > 0
    assert cache.stats()["size"] <= 8


def test_the_extension_is_switched_all_the_time() -> None:
    """A call that is under way when the extension goes, or comes, is answered rightly too."""
    pipeline, cache = installed(Encoder(), max_size=8)
    wrong: list[Any] = []
    stop = threading.Event()
    switched = 0

    def switch() -> None:
        nonlocal switched
        while not stop.wait(0.002):
            activate()
            deactivate()
            switched += 1

    switching = threading.Thread(target=switch)
    switching.start()
    run_all([caller(pipeline, SEED - i, CALLS // 2, wrong) for i in range(THREADS)])
    stop.set()
    switching.join()
    assert switched > 0
    assert not is_active()
    assert not wrong
    assert sum(counts(cache)) == THREADS * (CALLS // 2)
    assert counts(cache).bypassed + counts(cache).misses == pipeline.runs
    activate()
    run_all([caller(pipeline, SEED, 100, wrong)])
    deactivate()
    assert not wrong


def test_a_call_in_which_the_extension_goes_and_comes() -> None:
    class Switches(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            activate()
            pipeline.encode_prompt(torch.tensor([9]), torch.tensor([9]))  # from here on the cache is watched again
            return super().__iter__()

    class Leaving(Encoder):
        def encode_prompt(self, prompt_ids: torch.Tensor, attention_mask: torch.Tensor, n: int = 1) -> Any:
            if prompt_ids[0] == 9:
                return prompt_ids * 3, None
            deactivate()
            return Switches([prompt_ids * 3, attention_mask])

    pipeline, _ = installed(Leaving())
    activate()
    try:
        ids, mask = torch.tensor([1]), torch.tensor([1])
        pipeline.encode_prompt(ids, mask)
        mask.fill_(-1)
        assert pipeline.encode_prompt(ids, torch.tensor([1]))[1].eq(1).all()
    finally:
        deactivate()


@pytest.mark.usefixtures("active")
def test_keys_of_large_tensors_that_are_hashed_without_the_gil() -> None:
    """Two threads hash at once while each other's arguments are edited: no key mixes two calls."""
    tensors = [torch.full((100_000,), value) for value in range(4)]
    expected = [upstream._hashable(tensor.clone()) for tensor in tensors]
    wrong: list[Any] = []

    def make(index: int) -> None:
        for _ in range(60):
            own = tensors[index].clone()
            if upstream._hashable(own) != expected[index]:
                wrong.append(index)
            own.zero_()

    run_all([lambda index=index: make(index) for index in range(4)])
    assert not wrong
