"""The hooks on a pipeline and its text-encoding modules, while others load, and where a load or a hook fails."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import omni_tensor_key
from omni_tensor_key.watch import watch_of

from .support import (
    CALLS,
    WIDTH,
    Adapter,
    Encoder,
    LoadingEncoder,
    Tokenizer,
    doors_of,
    hooks_on,
    identical,
    installed,
    kept,
    new_weights,
    recomputed,
    without_cache,
)

pytestmark = pytest.mark.usefixtures("switched_on")

CALL = CALLS["tensors"]
TIMEOUT_S = 60


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

        pipeline, _ = installed(Adapter(Slow))
        pipeline.encode_prompt(*CALL)
        Slow.slow = True
        pipeline.tokenizer = Tokenizer(1)
        thread = threading.Thread(target=pipeline.encode_prompt, args=CALL)
        thread.start()
        assert looking.wait(TIMEOUT_S)
        changing = threading.Thread(target=change, args=(pipeline.text_encoder,))
        changing.start()
        changing.join(0.1)  # it may have to wait for the other
        go_on.set()
        thread.join()
        changing.join()
        assert identical(pipeline.encode_prompt(*CALL), without_cache(pipeline, *CALL))

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
