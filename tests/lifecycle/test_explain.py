"""Why a call was not cached, in counters, one log line and `explain()`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import omni_tensor_key

from .conftest import Log
from .support import IDS, MASK, installed, new_weights


@pytest.fixture(autouse=True)
def _active_from_zero() -> Iterator[None]:
    """The counters belong to an activation."""
    omni_tensor_key.activate()
    yield
    omni_tensor_key.deactivate()


class Free:
    """Takes what it is given."""

    def encode_prompt(
        self,
        prompt_ids: Any = None,
        attention_mask: Any = None,
        prompt_embeds: Any = None,
        condition_images: Any = None,
        extra_tokens: Any = None,
    ) -> Any:
        return None


def bypassed() -> Any:
    return omni_tensor_key.stats().get("bypassed")


FLOAT, LARGE = torch.ones(3), torch.zeros((1 << 20) + 1, dtype=torch.uint8)
CALLS: dict[str, tuple[dict[str, Any], str, str]] = {
    "floating-point": ({"prompt_ids": FLOAT}, "prompt_ids", "dtype"),
    "in a list": ({"prompt_ids": [IDS, [FLOAT]]}, "prompt_ids", "dtype"),
    "in a dict": ({"condition_images": {"a": (FLOAT,)}}, "condition_images", "dtype"),
    "too large": ({"attention_mask": LARGE}, "attention_mask", "size"),
    "meta": ({"attention_mask": torch.ones(3, dtype=torch.int64, device="meta")}, "attention_mask", "unexportable"),
    "sparse": ({"prompt_ids": torch.tensor([[1]]).to_sparse()}, "prompt_ids", "unexportable"),
    "object": ({"condition_images": object()}, "condition_images", "type"),
    "precomputed": ({"prompt_ids": IDS, "prompt_embeds": FLOAT}, "prompt_embeds", "precomputed"),
    "unknown argument": ({"unknown": 1}, "", "binding"),
}


@pytest.mark.parametrize(("arguments", "argument", "reason"), CALLS.values(), ids=CALLS)
def test_a_bypassed_call_is_counted(arguments: dict[str, Any], argument: str, reason: str) -> None:
    pipeline, cache = installed(Free(), model_tag="Tag")
    for number in range(1, 4):
        try:
            pipeline.encode_prompt(**arguments)
        except TypeError:
            assert reason == "binding"
        assert bypassed() == {"Tag": {argument: {reason: number}}}
    assert cache.stats()["bypassed"] == 3


def test_what_is_not_counted_is_absent() -> None:
    assert omni_tensor_key.stats() == {}
    pipeline, _ = installed(Free())
    for _ in range(2):
        pipeline.encode_prompt(torch.tensor(IDS), MASK)
    assert omni_tensor_key.stats() == {}


def test_several_pipelines_arguments_and_reasons() -> None:
    first, _ = installed(Free(), model_tag="First")
    second, _ = installed(Free())
    first.encode_prompt(FLOAT)
    first.encode_prompt(LARGE)
    first.encode_prompt(attention_mask=FLOAT)
    second.encode_prompt(FLOAT)
    second.encode_prompt(FLOAT)
    assert bypassed() == {
        "First": {"prompt_ids": {"dtype": 1, "size": 1}, "attention_mask": {"dtype": 1}},
        "Free": {"prompt_ids": {"dtype": 2}},
    }


def test_what_cleared_a_cache_is_counted() -> None:
    pipeline, _ = installed()
    pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))
    assert "cleared" not in omni_tensor_key.stats()  # there was nothing in it
    for seed in (1, 2):
        pipeline.encode_prompt([IDS])
        pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder.", seed))
    pipeline.encode_prompt([IDS])
    pipeline.load_weights(new_weights(pipeline.transformer, "transformer."))
    assert omni_tensor_key.stats()["cleared"] == {"Adapter": {"load_weights": 2}}
    pipeline.tokenizer = None
    assert omni_tensor_key.stats()["cleared"] == {"Adapter": {"load_weights": 2}}  # nobody has asked since
    with contextlib.suppress(AttributeError):
        pipeline.encode_prompt([IDS])
    counted = omni_tensor_key.stats()["cleared"]["Adapter"]
    assert counted == {"load_weights": 2, "a part of the pipeline was replaced": 1}


@pytest.mark.parametrize("argument", ["prompt_ids", "attention_mask", "extra_tokens"])
def test_one_line_at_the_16th_and_the_256th_call(log: Log, argument: str) -> None:
    pipeline, _ = installed(Free(), model_tag="Tag")
    lines = []
    for number in range(1, 1001):
        before = len(log)
        pipeline.encode_prompt(**{argument: FLOAT})
        lines += [(number, line) for line in log[before:]]
    assert [number for number, _ in lines] == [16, 256]
    for number, line in lines:
        assert line.startswith(f"INFO: omni_tensor_key: {number} calls of Tag.encode_prompt()")
        assert argument in line
        assert "dtype" in line


@pytest.mark.parametrize(
    "arguments", [{"condition_images": FLOAT}, {"prompt_ids": IDS, "prompt_embeds": FLOAT}, {"unknown": 1}]
)
def test_no_line_where_a_bypass_is_as_it_should_be(log: Log, arguments: dict[str, Any]) -> None:
    pipeline, _ = installed(Free())
    log.clear()
    for _ in range(300):
        try:
            pipeline.encode_prompt(**arguments)
        except TypeError:
            assert "unknown" in arguments
    assert log == []


def test_explain_of_one_value() -> None:
    for value in (torch.tensor(IDS), torch.tensor([True]), torch.empty(0), torch.nn.Parameter(FLOAT[:0])):
        assert omni_tensor_key.explain(value) is None
    for value, words in {
        FLOAT: "float32",
        LARGE: "OMNI_TENSOR_KEY_MAX_BYTES",
        torch.ones(2, dtype=torch.int64, device="meta"): "meta",
    }.items():
        sentence = omni_tensor_key.explain(value)
        assert sentence is not None
        assert words in sentence
        assert "\n" not in sentence
