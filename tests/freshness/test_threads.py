"""Changes of a pipeline on one thread while calls run on others."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import CALLS, WIDTH, Adapter, Encoder, installed, is_hit, load_into, new_weights, without_cache
from torch import nn

pytestmark = pytest.mark.usefixtures("active")


class Paused(Adapter):
    """Stops before and after its encoder runs, once each."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses = [(threading.Event(), threading.Event()) for _ in range(2)]
        self.stops = True

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        pauses, self.stops = self.pauses if self.stops else [], False
        for reached, goes_on in pauses[:1]:
            reached.set()
            assert goes_on.wait(60)
        found = super().encode_prompt(prompt_ids, attention_mask)
        for reached, goes_on in pauses[1:]:
            reached.set()
            assert goes_on.wait(60)
        return found

    def go_on(self, pause: int) -> None:
        """Let it go on from this pause, when it has got there."""
        reached, goes_on = self.pauses[pause]
        assert reached.wait(60)
        goes_on.set()


def _encoder() -> Encoder:
    torch.manual_seed(5)
    return Encoder()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "load_weights": lambda p: p.load_weights(new_weights(p.text_encoder, "text_encoder.")),
    "load_state_dict": lambda p: load_into(p.text_encoder),
    "encoder replaced": lambda p: setattr(p, "text_encoder", _encoder()),
    "parameter assigned": lambda p: setattr(p.text_encoder.embed, "weight", nn.Parameter(torch.ones(16, WIDTH))),
    "module assigned": lambda p: p.text_encoder.layers.append(nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_on_another_thread_keeps_the_running_call_out(call: Any, change: Callable[[Any], Any]) -> None:
    pipeline, cache = installed(Paused())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(pipeline.encode_prompt, *call)
        pipeline.go_on(0)
        assert pipeline.pauses[1][0].wait(60)
        change(pipeline)
        pipeline.go_on(1)
        old = running.result(60)
    expected = without_cache(pipeline, *call)
    assert not torch.equal(old[0], expected[0])
    assert torch.equal(pipeline.encode_prompt(*call)[0], expected[0])
    assert is_hit(pipeline, cache, *call)


def test_a_load_that_goes_on_longer_than_a_call_keeps_it_out() -> None:
    pipeline, cache = installed()
    call, inside, goes_on = CALLS["tensors"], threading.Event(), threading.Event()

    def weights() -> Any:
        items = new_weights(pipeline.text_encoder, "text_encoder.")
        yield items[0]
        inside.set()
        assert goes_on.wait(60)
        yield from items[1:]

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(pipeline.load_weights, weights())
        assert inside.wait(60)
        for _ in range(2):
            pipeline.encode_prompt(*call)
        assert cache.stats()["size"] == 0
        goes_on.set()
        loading.result(60)
    assert torch.equal(pipeline.encode_prompt(*call)[0], without_cache(pipeline, *call)[0])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_begins_in_a_load_and_ends_after_it_is_kept_out(call: Any) -> None:
    pipeline, cache = installed(Paused())
    with ThreadPoolExecutor(1) as pool:

        def weights() -> Any:
            running.append(pool.submit(pipeline.encode_prompt, *call))
            pipeline.go_on(0)
            assert pipeline.pauses[1][0].wait(60)  # it has its output, of the weights of before
            yield from new_weights(pipeline.text_encoder, "text_encoder.")

        running: list[Any] = []
        pipeline.load_weights(weights())
        pipeline.go_on(1)
        running[0].result(60)
    assert cache.stats()["size"] == 0
    assert torch.equal(pipeline.encode_prompt(*call)[0], without_cache(pipeline, *call)[0])


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_parameter_that_is_another_only_while_a_call_runs(call: Any) -> None:
    pipeline, _ = installed(Paused())
    embed = pipeline.text_encoder.embed
    own = embed.weight
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(pipeline.encode_prompt, *call)
        assert pipeline.pauses[0][0].wait(60)
        embed.weight = nn.Parameter(torch.ones(16, WIDTH))
        pipeline.go_on(0)
        assert pipeline.pauses[1][0].wait(60)
        embed.weight = own
        pipeline.go_on(1)
        other = running.result(60)
    expected = without_cache(pipeline, *call)
    assert not torch.equal(other[0], expected[0])
    assert torch.equal(pipeline.encode_prompt(*call)[0], expected[0])


def test_sixteen_threads_get_what_the_weights_of_the_moment_encode(rng: random.Random) -> None:
    pipeline, cache = installed(max_size=8)
    prompts = [torch.tensor([[number, number // 3, 7]]) for number in range(16)]
    seeds, rounds, calls = [rng.randrange(1 << 30) for _ in range(16)], 6, 50
    expected: list[torch.Tensor] = []

    def change() -> None:
        """Between two rounds, as calls of a worker by name are."""
        load_into(pipeline.text_encoder, seed=rng.randrange(1 << 30))
        expected[:] = [without_cache(pipeline, ids)[0] for ids in prompts]

    barrier = threading.Barrier(16, change)

    def encode(seed: int) -> int:
        own, right = random.Random(seed), 0
        for _ in range(rounds):
            barrier.wait(60)
            for _ in range(calls):
                number = own.randrange(16)
                right += torch.equal(pipeline.encode_prompt(prompts[number].clone())[0], expected[number])
            barrier.wait(60)
        return right

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(encode, seeds)) == [rounds * calls] * 16
    counts = cache.stats()
    assert counts["hits"] + counts["misses"] == 16 * rounds * calls
    assert min(counts["hits"], counts["misses"]) > rounds
