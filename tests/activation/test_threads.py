"""Many threads on one pipeline, a long run, compiled callers: every call gets its own answer, and memory stays flat."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Adapter, Encoder, installed

pytestmark = pytest.mark.usefixtures("active")

THREADS, CALLS, PROMPTS = 16, 1000, 24


class Echo:
    """Returns its own mask, which the callers write to as soon as they have the answer."""

    def __init__(self) -> None:
        self.runs = 0
        self.lock = threading.Lock()

    def encode_prompt(self, prompt_ids: torch.Tensor, attention_mask: torch.Tensor, n: int = 1) -> Any:
        with self.lock:
            self.runs += 1
        return prompt_ids * 3 + n, attention_mask


@pytest.fixture
def _switch_often() -> Iterator[None]:
    """Threads switch often, and a deadlock ends the process and says where."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    sys.setswitchinterval(interval)


def run_all(actions: list[Callable[[], None]], meanwhile: Callable[[], None]) -> list[BaseException]:
    """Run the actions on threads of their own, and `meanwhile` over and over; return what they raised."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def guarded(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            failures.append(error)

    def repeat() -> None:
        while not stop.wait(0.01):
            meanwhile()

    other = threading.Thread(target=guarded, args=(repeat,))
    threads = [threading.Thread(target=guarded, args=(action,)) for action in actions]
    for thread in (other, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    other.join()
    return failures


@pytest.mark.usefixtures("_switch_often")
def test_every_call_gets_its_own_answer_and_is_counted(rng: random.Random) -> None:
    pipeline, cache = installed(Echo(), max_size=8)

    def caller(seed: float) -> Callable[[], None]:
        own = random.Random(seed)

        def run() -> None:
            ids, mask = torch.empty(16, dtype=torch.int64), torch.empty(16, dtype=torch.int64)
            for _ in range(CALLS):
                prompt, n = own.randrange(PROMPTS), own.choice([1, 1, 1, 2])
                ids.fill_(prompt)
                mask.fill_(prompt)
                embeds, returned = pipeline.encode_prompt(ids, mask, n)
                assert embeds.eq(prompt * 3 + n).all()
                assert returned.eq(prompt).all()
                mask.fill_(-1)

        return run

    assert run_all([caller(rng.random()) for _ in range(THREADS)], cache.clear) == []
    counts = cache.stats()
    assert counts["hits"] + counts["misses"] == THREADS * CALLS
    assert (counts["bypassed"], counts["misses"]) == (0, pipeline.runs)
    assert counts["hits"] > 0
    assert counts["size"] <= 8


@pytest.mark.usefixtures("_switch_often")
def test_no_call_that_begins_after_a_load_gets_what_was_before_it() -> None:
    """Between two loads, a call returns what the encoder encodes then."""
    pipeline, cache = installed(Adapter(Encoder))
    loaded, lock = [0.0], threading.Lock()

    def load() -> None:
        with lock:  # as RPCs to a worker: one load at a time
            number = loaded[0] + 1.0
            weights = {
                name: torch.full_like(value, number) for name, value in pipeline.text_encoder.state_dict().items()
            }
            pipeline.text_encoder.load_state_dict(weights)
            loaded[0] = number

    load()

    def call() -> None:
        ids, embed = torch.tensor([[1, 2]]), pipeline.text_encoder.embed.weight
        for _ in range(300):
            before = loaded[0]
            assert pipeline.encode_prompt(ids)[0].shape == (1, 2, embed.shape[1])
            with lock:
                expected = Adapter.encode_prompt(pipeline, ids)[0]
                assert torch.equal(pipeline.encode_prompt(ids)[0], expected), before

    assert run_all([call] * 8, load) == []
    assert cache.stats()["hits"] > 0
    assert loaded[0] > 2


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_100_000_distinct_calls_leave_memory_flat() -> None:
    pipeline, cache = installed(Echo(), max_size=4)
    ids, mask = torch.zeros(1, 1024, dtype=torch.int64), torch.ones(1, 1024, dtype=torch.bool)

    def call(count: int) -> None:
        for i in range(count):
            ids[0, i % 1024] += 1
            pipeline.encode_prompt(ids, mask)

    call(10_000)
    before = resident_bytes()
    call(100_000)
    # What an allocator may hold back; keys that stayed would be 900 MB.
    assert resident_bytes() - before < 16 << 20
    assert cache.stats()["size"] == 4
    assert pipeline.runs == 110_000


@pytest.mark.parametrize("computed", [False, True], ids=["IDs passed through", "IDs computed"])
def test_a_compiled_caller_gets_right_results(computed: bool) -> None:
    torch._dynamo.reset()
    pipeline, cache = installed()

    def caller(ids: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        embeds, returned = pipeline.encode_prompt(ids + 1 if computed else ids, mask)
        return (embeds * scale).sum(-1) + returned

    compiled = torch.compile(caller, backend="eager")
    with torch.no_grad():
        for step in range(8):
            ids, mask = torch.arange(5)[None] % (step % 3 + 2), torch.ones(1, 5, dtype=torch.int64)
            own = Adapter.encode_prompt(pipeline, ids + 1 if computed else ids, mask)
            assert torch.equal(compiled(ids, mask, 2.0), (own[0] * 2.0).sum(-1) + own[1])
    counts = cache.stats()
    assert counts["hits"] + counts["misses"] + counts["bypassed"] == 8
    assert counts["hits"] == 5
    torch._dynamo.reset()
