"""What `load_weights` is watched on, and what is left of that: classes, instances and their copies."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import omni_tensor_key

from .support import (
    CALLS,
    Adapter,
    Encoder,
    LoadingEncoder,
    hooks_on,
    installed,
    is_hit,
    kept,
    loaded,
    new_weights,
    recomputed,
)

pytestmark = pytest.mark.usefixtures("switched_on")

CALL = CALLS["tensors"]


def _fill(weights: Any) -> Any:
    return ("filled", weights)


class _Callable:
    def __call__(self, weights: Any) -> Any:
        return ("filled", weights)


class _OfTheClass:
    def __init__(self) -> None:
        self.function = lambda cls, weights: ("filled", weights)

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return functools.partial(self.function, cls)


KINDS: dict[str, Any] = {
    "staticmethod": staticmethod(_fill),
    "classmethod": classmethod(lambda cls, weights: ("filled", weights)),
    "callable": _Callable(),
    "partial": functools.partial(_fill),
    "partialmethod": functools.partialmethod(lambda self, strict, weights: ("filled", weights), True),
    "property": property(lambda self: _fill),
    "descriptor": _OfTheClass(),
}


@pytest.mark.parametrize("inherited", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_kind_of_load_weights_that_a_class_can_have(kind: Any, inherited: bool) -> None:
    def with_it(base: Any) -> Any:
        cls = type("WithIt", (base,), {"load_weights": kind})
        return type("Heir", (cls,), {}) if inherited else cls

    pipeline = with_it(Adapter)()
    pipeline.text_encoder = with_it(Encoder)()
    before = [dict(vars(type(owner))) for owner in (pipeline, pipeline.text_encoder)]
    _, cache = installed(pipeline)
    for owner in (pipeline, pipeline.text_encoder):
        pipeline.encode_prompt(*CALL)
        weights = [("name", 1)]
        assert owner.load_weights(weights) == ("filled", weights)
        assert not is_hit(pipeline, cache, *CALL)
    omni_tensor_key.deactivate()
    assert [dict(vars(type(owner))) for owner in (pipeline, pipeline.text_encoder)] == before


def test_vllm_omnis_own_loader_is_known_by_a_class_that_inherits_it() -> None:
    class Heir(Adapter):
        pass

    for cls in (Adapter, Heir):
        pipeline, cache = installed(cls())
        with kept(pipeline, cache, *CALL):
            pipeline.load_weights(new_weights(pipeline.transformer, "transformer."))


class Delegating(nn.Module):
    """Hands every attribute on to the module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LoadingEncoder()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


DUPLICATES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "of a copy": lambda module: copy.deepcopy(copy.deepcopy(module)),
}


class TestCopies:
    @pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
    def test_of_a_wrapper_that_hands_on(self, duplicate: Any) -> None:
        pipeline, cache = installed(Adapter(Delegating))
        twin = duplicate(pipeline.text_encoder)
        weights = new_weights(twin.inner)
        with kept(pipeline, cache, *CALL):
            twin.load_weights(weights)
        assert loaded(twin.inner, weights)
        with recomputed(pipeline, cache, *CALL):
            pipeline.text_encoder.load_weights(weights)

    @pytest.mark.parametrize("encoder", [LoadingEncoder, Delegating])
    def test_a_shallow_one_loads_into_itself(self, encoder: Any) -> None:
        pipeline, cache = installed(Adapter(encoder))
        original = pipeline.text_encoder
        twin = copy.copy(original)
        twin._modules = copy.deepcopy(original._modules)
        target = getattr(twin, "inner", twin)
        weights = new_weights(target)
        with kept(pipeline, cache, *CALL):
            twin.load_weights(weights)
        assert loaded(target, weights)
        assert not loaded(getattr(original, "inner", original), weights)
        with recomputed(pipeline, cache, *CALL):
            pipeline.text_encoder = twin
            twin.load_weights(weights)
        del original
        with recomputed(pipeline, cache, *CALL):
            twin.load_weights(new_weights(target, seed=2))

    def test_a_shallow_one_of_a_pipeline_loads_into_itself(self) -> None:
        pipeline, cache = installed()
        twin = copy.copy(pipeline)
        twin._modules = copy.deepcopy(pipeline._modules)
        weights = new_weights(twin, "")
        with kept(pipeline, cache, *CALL):
            twin.load_weights(weights)
        assert loaded(twin, weights)
        assert not loaded(pipeline, weights)

    def test_deactivation_leaves_nothing_on_a_shallow_one(self) -> None:
        encoder = LoadingEncoder()
        attributes = set(vars(encoder))
        pipeline = Adapter()
        pipeline.text_encoder = encoder
        installed(pipeline)
        twin = copy.copy(encoder)
        omni_tensor_key.deactivate()
        assert set(vars(twin)) == attributes
        assert hooks_on(twin) == [(), ()]


class TestTheClass:
    """`load_weights` is watched on the class; nothing of it shows in others, and nothing stays."""

    def test_others_of_the_class_are_left_alone(self) -> None:
        class Child(LoadingEncoder):
            def load_weights(self, weights: Any) -> Any:
                return ("child", super().load_weights(weights))

        pipeline, cache = installed(Adapter(LoadingEncoder))
        for other in (LoadingEncoder(), Child()):
            weights = new_weights(other)
            with kept(pipeline, cache, *CALL):
                other.load_weights(weights)
            assert loaded(other, weights)
        assert LoadingEncoder.load_weights(other, weights) == dict(weights).keys()
        pipeline.text_encoder = Child()
        pipeline.encode_prompt(*CALL)
        with recomputed(pipeline, cache, *CALL):
            assert pipeline.text_encoder.load_weights(weights)[0] == "child"

    def test_a_wrapper_around_something_that_does_not_load_has_no_such_method(self) -> None:
        pipeline, _ = installed(Adapter(Delegating))
        other = Delegating()
        other.inner = Encoder()
        assert hasattr(pipeline.text_encoder, "load_weights")
        assert not hasattr(other, "load_weights")
        assert not hasattr(Delegating, "load_weights")

    @pytest.mark.parametrize("first_to_go", [0, 1])
    def test_it_gets_its_own_back_with_the_last_instance(self, first_to_go: int) -> None:
        class Heir(LoadingEncoder):
            pass

        before = dict(vars(Heir)), dict(vars(LoadingEncoder))
        found = [installed(Adapter(Heir)) for _ in range(2)]
        assert Heir.load_weights is before[1]["load_weights"]
        found[first_to_go][0].text_encoder = None
        found[first_to_go][1].get("key")
        pipeline, cache = found[1 - first_to_go]
        with recomputed(pipeline, cache, *CALL):
            pipeline.text_encoder.load_weights(new_weights(pipeline.text_encoder))
        pipeline.text_encoder = None
        cache.get("key")
        assert (dict(vars(Heir)), dict(vars(LoadingEncoder))) == before

    def test_what_others_put_on_it_meanwhile_stays(self) -> None:
        class Heir(LoadingEncoder):
            pass

        def theirs(self: Any, weights: Any) -> str:
            return "theirs"

        pipeline, _ = installed(Adapter(Heir))
        Heir.load_weights = theirs  # type: ignore[assignment, method-assign]
        omni_tensor_key.deactivate()
        assert vars(Heir)["load_weights"] is theirs
        assert pipeline.text_encoder.load_weights([]) == "theirs"

    def test_a_method_whose_object_is_gone_says_so(self) -> None:
        pipeline, _ = installed(Adapter(LoadingEncoder))
        load = pipeline.text_encoder.load_weights
        pipeline.text_encoder = None
        with pytest.raises(ReferenceError, match="gone"):
            load([])
