"""The hooks on a pipeline and its text-encoding modules: what they are put on, and what they leave of it."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import omni_tensor_key
from omni_tensor_key import plugin
from omni_tensor_key.watch import watch_of

from .support import (
    IDS,
    MASK,
    WIDTH,
    Adapter,
    Encoder,
    LoadingEncoder,
    Tokenizer,
    identical,
    installed,
    is_hit,
    kept,
    new_weights,
    recomputed,
    without_cache,
)

CALL = (torch.tensor([IDS]), torch.tensor([MASK]))
TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def _active() -> Iterator[None]:
    gc.collect()  # pipelines that are still there are watched too
    omni_tensor_key.activate()
    yield
    omni_tensor_key.deactivate()
    assert isinstance(vars(LoadingEncoder)["load_weights"], types.FunctionType)
    assert "load_weights" not in vars(Adapter)


def doors_of(pipeline: Any) -> Any:
    door: Any = plugin._state.doors[plugin.modules.CACHE]
    return door._doors[watch_of(pipeline)]


def hooks_on(module: nn.Module) -> list[tuple[Any, ...]]:
    return [tuple(module._load_state_dict_pre_hooks), tuple(module._load_state_dict_post_hooks)]


def loaded(module: nn.Module, weights: Any) -> bool:
    return all(torch.equal(module.get_parameter(name), weight) for name, weight in weights)


class TestWhileOtherThreadsAreAtWork:
    def test_modules_that_stay_keep_their_hooks(self) -> None:
        pipeline, _ = installed(Adapter(LoadingEncoder))
        staying = [pipeline.text_encoder, pipeline.text_encoder.layers, pipeline.text_encoder.layers[1]]
        before = [hooks_on(module) for module in staying]
        load = pipeline.text_encoder.load_weights
        gone = pipeline.text_encoder.layers[0]
        pipeline.text_encoder.layers[0] = nn.Linear(WIDTH, WIDTH)
        pipeline.encode_prompt(*CALL)
        assert [hooks_on(module) for module in staying] == before
        assert pipeline.text_encoder.load_weights is load
        assert hooks_on(gone) == [(), ()]
        assert all(hooks_on(pipeline.text_encoder.layers[0]))

    @pytest.mark.parametrize(
        "change",
        [
            lambda encoder: encoder.load_state_dict(dict(new_weights(encoder))),
            lambda encoder: encoder.load_weights(new_weights(encoder)),
            lambda encoder: setattr(encoder.embed, "weight", nn.Parameter(torch.ones_like(encoder.embed.weight))),
        ],
    )
    def test_a_change_while_another_thread_looks_for_new_modules(self, change: Callable[[Any], Any]) -> None:
        looking, go_on = threading.Event(), threading.Event()

        class Slow(LoadingEncoder):
            slow = False

            def named_modules(self, *args: Any, **kwargs: Any) -> Any:
                # Only there: a new look at the pipeline goes through its modules too, before it empties the cache.
                frames = [frame.function for frame in inspect.stack()] if self.slow else []
                if "hook_modules" in frames and threading.current_thread() is thread:
                    looking.set()
                    assert go_on.wait(TIMEOUT_S)
                yield from super().named_modules(*args, **kwargs)

        pipeline, cache = installed(Adapter(Slow))
        pipeline.encode_prompt(*CALL)
        Slow.slow = True
        pipeline.tokenizer = Tokenizer(1)
        thread = threading.Thread(target=cache.get, args=("key",))
        thread.start()
        assert looking.wait(TIMEOUT_S)
        try:
            before = pipeline.encode_prompt(*CALL)
            assert is_hit(pipeline, cache, *CALL)
            change(pipeline.text_encoder)
            expected = without_cache(pipeline, *CALL)
            assert not identical(before, expected)
        finally:
            go_on.set()
            thread.join()
        assert identical(pipeline.encode_prompt(*CALL), expected)

    def test_a_new_module_that_was_used_and_changed_before_it_was_hooked(self) -> None:
        class Slow(Encoder):
            def named_modules(self, *args: Any, **kwargs: Any) -> Any:
                if "hook_modules" in [frame.function for frame in inspect.stack()]:
                    pipeline.encode_prompt(*CALL)
                    pipeline.text_encoder.load_state_dict(weights)
                yield from super().named_modules(*args, **kwargs)

        pipeline, _ = installed()
        pipeline.text_encoder = Slow()
        weights = dict(new_weights(Encoder()))
        pipeline.encode_prompt(*CALL)
        assert identical(pipeline.encode_prompt(*CALL), without_cache(pipeline, *CALL))

    def test_many_threads_leave_nothing_behind_and_disturb_nobody(self) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        pipeline = Adapter(LoadingEncoder)
        encoder, before = pipeline.text_encoder, [hooks_on(module) for module in pipeline.modules()]
        installed(pipeline)
        doors = doors_of(pipeline)
        weights = encoder.state_dict()
        wrong: list[BaseException] = []
        loaded_enough, stop = threading.Event(), threading.Event()

        def repeat(action: Callable[[], Any], until: threading.Event) -> None:
            try:
                while not until.is_set():
                    action()
            except BaseException as error:
                wrong.append(error)

        loading = [threading.Thread(target=repeat, args=(lambda: encoder.load_state_dict(weights), loaded_enough))]
        hooking = [threading.Thread(target=repeat, args=(doors.hook_modules, stop)) for _ in range(3)]
        for thread in (*loading, *hooking):
            thread.start()
        loaded_enough.wait(1)
        loaded_enough.set()
        loading[0].join()
        omni_tensor_key.deactivate()  # while the others are at it
        stop.set()
        for thread in hooking:
            thread.join()
        sys.setswitchinterval(interval)
        assert not wrong
        doors.hook_modules()
        assert [hooks_on(module) for module in pipeline.modules()] == before
        assert type(encoder).__dict__["load_weights"] is LoadingEncoder.load_weights
        assert "load_weights" not in vars(pipeline)
        assert "load_weights" not in vars(encoder)


class TestALoadStateDictThatFails:
    @pytest.mark.parametrize("of", [lambda pipeline: pipeline.text_encoder, lambda pipeline: pipeline])
    def test_in_a_child(self, of: Any) -> None:
        class Scaled(Encoder):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(WIDTH))  # written before any child is reached

            def forward(self, ids: torch.Tensor) -> torch.Tensor:
                return super().forward(ids) * self.scale

        def fail(*_: Any) -> None:
            raise OSError("a bad shard")

        pipeline, cache = installed(Adapter(Scaled))
        pipeline.text_encoder.embed.register_load_state_dict_pre_hook(fail)
        with recomputed(pipeline, cache, *CALL), pytest.raises(OSError, match="a bad shard"):
            of(pipeline).load_state_dict(dict(new_weights(of(pipeline))))

    def test_after_its_own_parameters(self) -> None:
        class Failing(nn.Linear):
            def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
                super()._load_from_state_dict(*args, **kwargs)
                raise KeyError("after")

        pipeline = Adapter()
        layer = pipeline.text_encoder.layers[0] = Failing(WIDTH, WIDTH)
        _, cache = installed(pipeline)
        with recomputed(pipeline, cache, *CALL), pytest.raises(KeyError, match="after"):
            layer.load_state_dict(dict(new_weights(layer)))

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
    def test_the_hooks_stay_behind_in_a_copy(self, duplicate: Any) -> None:
        pipeline, cache = installed()
        twin = duplicate(pipeline.text_encoder)
        with kept(pipeline, cache, *CALL):
            twin.load_state_dict(dict(new_weights(twin)))
        watch = watch_of(pipeline)
        assert pickle.dumps(twin).find(type(watch).__name__.encode()) < 0

    def test_a_shallow_copy_loads_when_the_original_is_gone(self) -> None:
        pipeline, cache = installed()
        pipeline.text_encoder = copy.copy(pipeline.text_encoder)
        with recomputed(pipeline, cache, *CALL):
            pipeline.text_encoder.load_state_dict(dict(new_weights(pipeline.text_encoder)))
        twin = copy.copy(pipeline.text_encoder)
        pipeline.text_encoder = None
        twin.load_state_dict(dict(new_weights(twin, seed=2)))


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


class Quiet(Adapter):
    """Has no `load_weights` at all."""

    @property
    def load_weights(self) -> Any:
        raise AttributeError("load_weights")


class TestALoadWeightsThatComesLater:
    def test_it_is_noticed_watched_and_left_behind(self) -> None:
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

    def test_around_the_one_that_was_there(self) -> None:
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

    def test_on_the_class(self) -> None:
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

    def test_where_there_was_none(self) -> None:
        pipeline, cache = installed(Quiet())
        doors = doors_of(pipeline)
        assert doors.is_in_place()
        Quiet.load_weights = lambda self, weights: self.text_encoder.embed.weight.data.add_(1)  # type: ignore
        assert not doors.is_in_place()
        doors.hook_modules()
        with recomputed(pipeline, cache, *CALL):
            pipeline.load_weights([])

    def test_one_that_is_deleted(self) -> None:
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


def test_hooking_that_fails_half_way_leaves_nothing_behind_in_the_end() -> None:
    class Failing(Encoder):
        def register_load_state_dict_post_hook(self, hook: Any) -> Any:
            raise RuntimeError("not here")

    pipeline, _ = installed(Adapter(LoadingEncoder))
    doors = doors_of(pipeline)
    first, second = LoadingEncoder(), Failing()
    pipeline.text_encoder = nn.Sequential(first, second)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not here"):
            doors.hook_modules()
        assert all(hooks_on(first))
        assert hooks_on(second) == [(), ()]
    doors.remove()
    assert hooks_on(first) == hooks_on(pipeline.text_encoder) == [(), ()]
    assert "load_weights" not in vars(first)
    assert vars(LoadingEncoder)["load_weights"] is LoadingEncoder.load_weights
