"""Sleep, wake-up and the calls by name, through vLLM-Omni's real workers, runners and wrappers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from vllm_omni.diffusion.data import OmniSleepTask

import omni_tensor_key

from .support import Adapter, is_hit, new_weights, recomputed
from .workers import Allocator, CustomPipelineWorkerExtension, on_a_cpu, wrapped

pytestmark = pytest.mark.usefixtures("active")


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens, in order."""
    return on_a_cpu(monkeypatch)


@pytest.fixture
def noted(events: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The same, with the clearing of caches."""
    from vllm_omni.diffusion.cache.prompt_embed_cache import PromptEmbedCache

    clear = PromptEmbedCache.clear

    def note_and_clear(self: Any) -> None:
        events.append("cleared")
        clear(self)

    monkeypatch.setattr(PromptEmbedCache, "clear", note_and_clear)
    return events


def parts(wrapper: Any) -> tuple[Any, Any]:
    runner = wrapper.worker.model_runner
    return runner.pipeline, runner.prompt_embed_cache


ASLEEP = {1: ("allocator sleeps", ("weights",)), 2: ("allocator sleeps", ())}
WAYS = {
    "by name": lambda wrapper, level: wrapper.execute_method("sleep", level=level),
    "wrapper": lambda wrapper, level: wrapper.sleep(level),
    "task": lambda wrapper, level: wrapper.handle_sleep_task(OmniSleepTask(level=level, task_id="t")),
    "task as a dict": lambda wrapper, level: wrapper.execute_method(
        "handle_sleep_task", {"level": level, "task_id": "t"}
    ),
}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_cache_is_cleared_before_the_allocator_sleeps(call: Any, way: Any, level: int, noted: list[Any]) -> None:
    wrapper = wrapped()
    pipeline, cache = parts(wrapper)
    pipeline.encode_prompt(*call)
    way(wrapper, level)
    assert noted == ["cleared", ASLEEP[level]]
    assert cache.stats()["size"] == 0


@pytest.mark.parametrize("level", [1, 2])
def test_a_clear_that_fails_stops_the_sleep(
    call: Any, level: int, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = wrapped()
    pipeline, cache = parts(wrapper)
    pipeline.encode_prompt(*call)

    def fail() -> None:
        raise RuntimeError("mine")

    monkeypatch.setattr(cache, "clear", fail)
    for way in (WAYS["by name"], WAYS["wrapper"]):
        with pytest.raises(RuntimeError, match="mine"):
            way(wrapper, level)
    for way in (WAYS["task"], WAYS["task as a dict"]):
        answer = way(wrapper, level)
        assert (answer.status, answer.error_msg) == ("ERROR", "mine")
    assert events == []


def test_the_task_is_answered_as_before(call: Any) -> None:
    wrapper = wrapped()
    parts(wrapper)[0].encode_prompt(*call)
    assert WAYS["task"](wrapper, 1).status == "SUCCESS"
    assert wrapper.execute_method("sleep", level=1) == 0
    assert wrapper.wake_up(["weights"]) is True


class ColocateExtension(CustomPipelineWorkerExtension):
    """As verl-omni's: comes before DiffusionWorker, loads a custom pipeline and takes weights over IPC."""

    def __new__(cls, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def update_weights(self, weights: Any) -> None:
        self.model_runner.pipeline.load_weights(weights)  # type: ignore[attr-defined]


class SilentExtension(ColocateExtension):
    """As verl-omni's for NPUs: has its own sleep and wake-up and calls no other."""

    def sleep(self, level: int = 1) -> bool:
        Allocator.sleep("silently")
        return True

    def wake_up(self, tags: list[str] | None = None) -> bool:
        Allocator.wake_up("silently")
        return True


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_extension_with_its_own_sleep(call: Any, way: Any, noted: list[Any]) -> None:
    wrapper = wrapped(SilentExtension, {"pipeline_class": "any"})
    pipeline, _ = parts(wrapper)
    pipeline.encode_prompt(*call)
    way(wrapper, 1)
    assert noted == ["cleared", ("allocator sleeps", "silently")]
    pipeline.encode_prompt(*call)
    wrapper.execute_method("wake_up", tags=["weights"])
    assert noted[2:] == [("allocator wakes", "silently"), "cleared"]


def test_a_training_step_of_verl_omni(call: Any, noted: list[Any]) -> None:
    wrapper = wrapped(ColocateExtension, {"pipeline_class": "any"})
    pipeline, cache = parts(wrapper)
    for seed in (1, 2):
        with recomputed(pipeline, cache, *call):
            wrapper.execute_method("sleep", level=1)
            wrapper.execute_method("wake_up", tags=["weights"])
            for prefix, module in (("transformer.", pipeline.transformer), ("text_encoder.", pipeline.text_encoder)):
                for bucket in new_weights(module, prefix, seed):
                    wrapper.execute_method("update_weights", [bucket])
        for bucket in new_weights(pipeline.transformer, "transformer.", seed + 10):
            wrapper.execute_method("update_weights", [bucket])
        assert is_hit(pipeline, cache, *call)


def test_what_is_encoded_before_the_weights_are_back_does_not_stay(call: Any) -> None:
    """After level 2 a parameter holds whatever was there, until somebody loads it."""
    wrapper = wrapped()
    pipeline, cache = parts(wrapper)
    wrapper.sleep(2)
    with torch.no_grad():
        pipeline.text_encoder.embed.weight.fill_(float("nan"))
    pipeline.encode_prompt(*call)
    wrapper.wake_up(None)
    assert not is_hit(pipeline, cache, *call)
    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))


def test_wake_up_clears_even_where_it_fails(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = wrapped()
    pipeline, cache = parts(wrapper)
    pipeline.encode_prompt(*call)

    def fail(tags: Any = None) -> None:
        raise MemoryError("mine")

    monkeypatch.setattr(Allocator, "wake_up", fail)
    with pytest.raises(MemoryError, match="mine"):
        wrapper.wake_up(["weights"])
    assert not is_hit(pipeline, cache, *call)


@pytest.mark.parametrize("options", [{"enable_prompt_embed_cache": False}, {"diffusion_load_format": "dummy"}])
def test_a_runner_without_a_cache_is_left_alone(options: dict[str, Any], noted: list[Any]) -> None:
    wrapper = wrapped(**options)
    assert wrapper.worker.model_runner.prompt_embed_cache is None
    for level in (1, 2) if wrapper.worker.model_runner.pipeline is not None else (1,):
        assert wrapper.sleep(level) == 0
    assert wrapper.wake_up(["weights"]) is True
    assert wrapper.execute_method("get_prompt_embed_cache_stats") is None
    assert wrapper.execute_method("clear_prompt_embed_cache") is None
    assert "cleared" not in noted
    wrapper.worker.model_runner = None  # as after shutdown()
    assert wrapper.execute_method("get_prompt_embed_cache_stats") is None
    assert wrapper.execute_method("clear_prompt_embed_cache") is None


def test_a_cache_that_the_runner_does_not_know(call: Any, noted: list[Any]) -> None:
    from vllm_omni.diffusion.cache.prompt_embed_cache import install_prompt_embed_cache

    wrapper = wrapped(enable_prompt_embed_cache=False)
    pipeline = wrapper.worker.model_runner.pipeline
    install_prompt_embed_cache(pipeline)
    pipeline.encode_prompt(*call)
    wrapper.sleep(1)
    assert noted == ["cleared", ASLEEP[1]]


def test_the_calls_by_name(call: Any) -> None:
    wrapper = wrapped()
    pipeline, cache = parts(wrapper)
    pipeline.encode_prompt(*call)
    counted = wrapper.execute_method("get_prompt_embed_cache_stats")
    assert cache.stats().items() <= counted.items()
    assert counted["size"] == 1
    assert wrapper.execute_method("clear_prompt_embed_cache") is None
    assert wrapper.execute_method("get_prompt_embed_cache_stats")["size"] == 0
    assert not is_hit(pipeline, cache, *call)
    assert (
        omni_tensor_key.stats()["cleared"]["Adapter"]["clear_prompt_embed_cache"] >= 1
    )  # an earlier test's worker may be alive


def test_a_direct_write_needs_the_call_by_name(call: Any) -> None:
    """What nothing can see: the storage of a parameter, written to directly."""
    wrapper = wrapped()
    pipeline, cache = parts(wrapper)
    runner = wrapper.worker.model_runner
    for clear in (lambda: wrapper.execute_method("clear_prompt_embed_cache"), runner.clear_prompt_embed_cache):
        pipeline.encode_prompt(*call)
        pipeline.text_encoder.embed.weight.data.copy_(torch.randn(16, 4))
        assert is_hit(pipeline, cache, *call)  # stale
        with recomputed(pipeline, cache, *call):
            pipeline.text_encoder.embed.weight.data.copy_(torch.randn(16, 4))
            clear()


def test_a_pipeline_that_is_loaded_again_has_an_empty_cache(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = wrapped(ColocateExtension, {"pipeline_class": "any"})
    pipeline, cache = parts(wrapper)
    pipeline.encode_prompt(*call)
    del pipeline
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    wrapper.execute_method("re_init_pipeline", {"pipeline_class": "any"})
    again, other_cache = parts(wrapper)
    assert other_cache is not cache
    assert not is_hit(again, other_cache, *call)
    with recomputed(again, other_cache, *call):
        again.load_weights(new_weights(again.text_encoder, "text_encoder."))


def test_workers_that_exist_before_the_extension_is_active(call: Any, noted: list[Any]) -> None:
    omni_tensor_key.deactivate()
    try:
        wrappers = [wrapped(), wrapped(SilentExtension, {"pipeline_class": "any"})]
        classes = [type(wrapper.worker) for wrapper in wrappers]
        before = [dict(vars(cls)) for cls in classes]
        gc.freeze()  # as engines do once they are up
    finally:
        omni_tensor_key.activate()
    for wrapper in wrappers:
        pipeline, cache = parts(wrapper)
        noted.clear()
        pipeline.encode_prompt(*call)
        wrapper.execute_method("sleep", level=1)
        assert noted[0] == "cleared"
        assert wrapper.execute_method("get_prompt_embed_cache_stats")["size"] == 0
        pipeline.encode_prompt(*call)
        with recomputed(pipeline, cache, *call):
            pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))
    omni_tensor_key.deactivate()
    try:
        assert [dict(vars(cls)) for cls in classes] == before
    finally:
        omni_tensor_key.activate()


def test_two_pipelines_in_one_process(call: Any) -> None:
    """Inline executors put several workers into one process: a sleep is of one of them."""
    first, second = wrapped(), wrapped()
    for wrapper in (first, second):
        parts(wrapper)[0].encode_prompt(*call)
    first.sleep(1)
    assert not is_hit(*parts(first), *call)
    assert is_hit(*parts(second), *call)
    assert isinstance(parts(first)[0], Adapter)
