"""A `load_weights` that somebody gives a pipeline after its cache was installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import omni_tensor_key

from .support import CALLS, Adapter, doors_of, installed, loaded, new_weights, recomputed

pytestmark = pytest.mark.usefixtures("switched_on")

CALL = CALLS["tensors"]


class Quiet(Adapter):
    """Has no `load_weights` at all."""

    @property
    def load_weights(self) -> Any:
        raise AttributeError("load_weights")


def test_it_is_noticed_watched_and_left_behind() -> None:
    for mine in (None, lambda weights: "mine"):
        pipeline = Adapter()
        if mine is not None:
            pipeline.load_weights = mine
        _, cache = installed(pipeline)
        doors = doors_of(pipeline)
        assert doors.is_in_place()

        def theirs(weights: Any, encoder: Any = pipeline.text_encoder) -> str:
            with torch.no_grad():
                encoder.embed.weight.add_(1)
            return "theirs"

        pipeline.load_weights = theirs
        assert not doors.is_in_place()
        doors.hook_modules()
        assert doors.is_in_place()
        with recomputed(pipeline, cache, *CALL):
            assert pipeline.load_weights([]) == "theirs"
        omni_tensor_key.deactivate()
        assert pipeline.load_weights is theirs
        assert doors.is_in_place()  # nothing is expected any more
        doors.hook_modules()
        assert pipeline.load_weights is theirs
        omni_tensor_key.activate()


def test_around_the_one_that_was_there() -> None:
    pipeline, cache = installed()
    watched = pipeline.load_weights
    pipeline.load_weights = theirs = lambda weights: watched(weights)
    doors_of(pipeline).hook_modules()
    with recomputed(pipeline, cache, *CALL):
        pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))
    omni_tensor_key.deactivate()
    weights = new_weights(pipeline, seed=2)
    theirs(weights)
    assert loaded(pipeline, weights)


def test_on_the_class() -> None:
    class Heir(Adapter):
        pass

    def theirs(self: Any, weights: Any) -> None:
        self.text_encoder.embed.weight.data.add_(1)

    pipeline, cache = installed(Heir())
    Heir.load_weights = theirs  # type: ignore[method-assign]
    doors = doors_of(pipeline)
    assert not doors.is_in_place()
    doors.hook_modules()
    assert doors.is_in_place()
    with recomputed(pipeline, cache, *CALL):
        pipeline.load_weights([])
    omni_tensor_key.deactivate()
    assert vars(Heir)["load_weights"] is theirs


def test_where_there_was_none() -> None:
    pipeline, cache = installed(Quiet())
    doors = doors_of(pipeline)
    assert doors.is_in_place()
    Quiet.load_weights = lambda self, weights: self.text_encoder.embed.weight.data.add_(1)  # type: ignore
    assert not doors.is_in_place()
    doors.hook_modules()
    with recomputed(pipeline, cache, *CALL):
        pipeline.load_weights([])


def test_one_that_is_deleted() -> None:
    pipeline = Adapter()
    pipeline.load_weights = lambda weights: "mine"
    _, cache = installed(pipeline)
    del pipeline.load_weights
    doors = doors_of(pipeline)
    assert not doors.is_in_place()
    doors.hook_modules()
    with recomputed(pipeline, cache, *CALL):
        pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))
    omni_tensor_key.deactivate()
    assert "load_weights" not in vars(pipeline)


def test_it_needs_no_call_from_outside(call: Any) -> None:
    """The next lookup sees it, and empties the cache: it may have run already."""
    pipeline, cache = installed()
    pipeline.encode_prompt(*call)
    for amount in (1, 2):
        with recomputed(pipeline, cache, *call):
            pipeline.load_weights = lambda amount: pipeline.text_encoder.embed.weight.data.add_(amount)
            pipeline.load_weights(amount)
    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(3)
