"""OMNI_TENSOR_KEY_VERIFY and OMNI_TENSOR_KEY_CACHE_BYTES."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_outputs as outputs
import torch
from support import CALLS, Adapter, installed, is_hit

import omni_tensor_key
from omni_tensor_key.settings import settings

pytestmark = pytest.mark.usefixtures("active")
IDS = torch.tensor([[3, 1, 2]])


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Set one of the package's variables for this test."""

    def set_variable(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        settings.cache_clear()

    yield set_variable
    monkeypatch.undo()
    settings.cache_clear()


def counted(pipeline: str, name: str) -> int:
    return int(omni_tensor_key.stats().get(name, {}).get(pipeline, 0))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("share", [0.01, 0.25, 0.3, 1.0])
def test_that_share_of_hits_runs_the_encoder_again(setting: Any, share: float, call: Any) -> None:
    setting("OMNI_TENSOR_KEY_VERIFY", str(share))
    pipelines = [installed() for _ in range(2)]  # as two ranks
    runs: list[list[bool]] = []
    for pipeline, cache in pipelines:
        pipeline.encode_prompt(*call)
        runs.append([])
        for _ in range(200):
            before = pipeline.runs
            assert is_hit(pipeline, cache, *call)  # in upstream's counters it stays one
            runs[-1].append(pipeline.runs > before)
        assert (cache.guard.counts["verified",], cache.guard.counts["differed",]) == (int(200 * share), 0)
        assert sum(runs[-1]) == int(200 * share)
    assert runs[0] == runs[1]


def test_no_variable_verifies_nothing() -> None:
    pipeline, cache = installed()
    for _ in range(100):
        pipeline.encode_prompt(IDS)
    assert (pipeline.runs, cache.guard.counts["verified",]) == (1, 0)


class Hidden(Adapter):
    """Its output depends on what no argument says."""

    shift = 0.0

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        embeds, mask = super().encode_prompt(prompt_ids, attention_mask)
        embeds[0, 0, 0] += self.shift
        return {"embeds": embeds, "mask": [mask]}


@pytest.mark.parametrize("ids", [IDS, IDS.tolist()], ids=["tensors", "lists"])
def test_a_hidden_input_is_found(setting: Any, log: Any, ids: Any) -> None:
    setting("OMNI_TENSOR_KEY_VERIFY", "1")
    pipeline, cache = installed(Hidden())
    pipeline.encode_prompt(ids)
    pipeline.encode_prompt(ids)
    pipeline.shift = 0.5
    fresh = pipeline.encode_prompt(ids)
    assert torch.equal(fresh["embeds"], pipeline.encode_prompt(ids)["embeds"])
    (line,) = log.having("ERROR", "Hidden", "output['embeds']: 1 of 12 elements differ, by at most 0.5")
    assert "The cache is emptied" in line
    assert (cache.guard.counts["verified",], cache.guard.counts["differed",]) == (2, 1)
    assert (counted("Hidden", "verified"), counted("Hidden", "differed")) >= (2, 1)
    assert omni_tensor_key.stats()["cleared"]["Hidden"]["verify"] >= 1
    assert is_hit(pipeline, cache, ids)


def _edit(value: Any) -> None:
    value["embeds"][0, 1, 1] = torch.nan


CAUSES: dict[str, Callable[[Any, Any], Any]] = {
    "weights written behind torch's back": lambda p, hit: p.text_encoder.embed.weight.data.mul_(2),
    "parameter put into the dictionary": lambda p, hit: p.text_encoder.embed._parameters.update(
        weight=torch.nn.Parameter(torch.ones(16, 4))
    ),
    "tokenizer edited in place": lambda p, hit: setattr(p.tokenizer, "shift", 3),
    "hit edited by its consumer": lambda p, hit: _edit(hit),
}


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_what_no_guard_can_see_is_found(setting: Any, log: Any, cause: Callable[[Any, Any], Any]) -> None:
    setting("OMNI_TENSOR_KEY_VERIFY", "1")
    pipeline, cache = installed(Hidden())
    pipeline.encode_prompt(IDS)
    cause(pipeline, cache._store[next(iter(cache._store))])
    got = pipeline.encode_prompt(IDS)
    assert torch.equal(got["embeds"], Hidden.encode_prompt(pipeline, IDS)["embeds"])
    assert cache.guard.counts["differed",] == 1
    assert len(log.having("ERROR", "differs from what the encoder returns now")) == 1


class Changing:
    """Returns one of two outputs."""

    def __init__(self, outputs: Any) -> None:
        self.outputs = iter(outputs)

    def encode_prompt(self, prompt_ids: Any) -> Any:
        return next(self.outputs)


ONES = torch.ones(2, 3)
DIFFERENCES: dict[str, tuple[Any, Any, str | None]] = {
    "none": ((ONES, None, 3), (ONES.clone(), None, 3), None),
    "NaN in the same places": (ONES * torch.nan, ONES * torch.nan, None),
    "sign of zero": (torch.zeros(2), -torch.zeros(2), "output: 2 of 2 elements differ, by at most 0"),
    "one of two": ((ONES, ONES), (ONES, ONES + 2), "output[1]: 6 of 6 elements differ, by at most 2"),
    "bool": (ONES.bool(), ~ONES.bool(), "output: 6 of 6 elements differ, by at most 1"),
    "bfloat16": (ONES.bfloat16(), ONES.bfloat16() * 3, "output: 6 of 6 elements differ, by at most 2"),
    "complex": (ONES + 0j, ONES + 2j, "output: 6 of 6 elements differ, by at most 2"),
    "not contiguous": (ONES.t(), ONES.t() + 1, "output: 6 of 6 elements differ, by at most 1"),
    "dtype": (ONES, ONES.double(), "output: dtype torch.float32 was stored, torch.float64 is encoded"),
    "shape": (ONES, ONES[:1], "output: shape torch.Size([2, 3]) was stored, torch.Size([1, 3]) is encoded"),
    "no elements": (ONES[:0], ONES[:0], None),
    "structure": ((ONES,), [ONES], "output: its structure is another"),
    "length": ((ONES,), (ONES, ONES), "output: its structure is another"),
    "number": ((ONES, 3), (ONES, 4), "output[1]: 3 was stored, 4 is encoded"),
    "tensor for none": ((ONES, None), (ONES, ONES), "output"),
}


@pytest.mark.parametrize(("stored", "fresh", "expected"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_differences_are_named(setting: Any, log: Any, stored: Any, fresh: Any, expected: str | None) -> None:
    setting("OMNI_TENSOR_KEY_VERIFY", "1")
    pipeline, cache = installed(Changing([stored, fresh]))
    pipeline.encode_prompt(IDS)
    pipeline.encode_prompt(IDS)
    assert (cache.guard.counts["verified",], cache.guard.counts["differed",]) == (1, int(expected is not None))
    assert bool(log.having("ERROR", expected or "differs")) == (expected is not None)


@pytest.mark.parametrize("as_lists", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize("name", [*outputs.STORED, *outputs.NOT_STORED])
def test_any_output_that_stays_the_same_is_found_equal(setting: Any, log: Any, name: str, as_lists: bool) -> None:
    setting("OMNI_TENSOR_KEY_VERIFY", "1")
    pipeline, cache = installed(outputs.Made((outputs.STORED | outputs.NOT_STORED)[name]))
    for _ in range(3):
        pipeline.encode_prompt(IDS.tolist() if as_lists else IDS)
    is_stored = as_lists or name in outputs.STORED
    assert (cache.guard.counts["verified",], cache.guard.counts["differed",], log.having("ERROR")) == (
        2 * is_stored,
        0,
        [],
    )


class Sized:
    """As many bytes as the prompt has IDs."""

    def encode_prompt(self, prompt_ids: Any) -> Any:
        return torch.ones(torch.as_tensor(prompt_ids).numel(), dtype=torch.uint8), "text"


def prompt(size: int, kind: type) -> Any:
    return torch.zeros(size, dtype=torch.int64) if kind is torch.Tensor else [0] * size


@pytest.mark.parametrize("kind", [torch.Tensor, list])
def test_the_oldest_entries_go_beyond_the_limit(setting: Any, kind: type) -> None:
    setting("OMNI_TENSOR_KEY_CACHE_BYTES", "100")
    pipeline, cache = installed(Sized())
    for size in (30, 40, 20):
        pipeline.encode_prompt(prompt(size, kind))
    assert (cache.nbytes(), cache.stats()["size"]) == (90, 3)
    assert is_hit(pipeline, cache, prompt(30, kind))  # now the youngest
    pipeline.encode_prompt(prompt(25, kind))  # 115 bytes: the one of 40 goes
    assert (cache.nbytes(), cache.stats()["size"]) == (75, 3)
    assert all(is_hit(pipeline, cache, prompt(size, kind)) for size in (20, 25, 30))
    pipeline.encode_prompt(prompt(101, kind))  # larger than all
    assert (cache.nbytes(), cache.stats()["size"]) == (75, 3)
    assert omni_tensor_key.stats()["not_stored"]["Sized"]["cache_bytes"] >= 1
    assert omni_tensor_key.stats()["bytes"]["Sized"] >= 75


def test_no_limit_is_upstreams_count_of_entries() -> None:
    pipeline, cache = installed(Sized(), max_size=2)
    for size in (1000, 2000, 3000):
        pipeline.encode_prompt(prompt(size, torch.Tensor))
    assert (cache.nbytes(), cache.stats()["size"]) == (5000, 2)
