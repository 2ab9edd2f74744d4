"""Sleep, wake-up and the calls by name, through vLLM-Omni's real workers, runners and wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import CALLS, is_hit, new_weights, recomputed
from vllm_omni.diffusion.data import OmniSleepTask

import omni_tensor_key

from .workers import Allocator, CustomPipelineWorkerExtension, on_a_cpu, wrapped

pytestmark = [pytest.mark.usefixtures("active"), pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)]


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens, in order."""
    return on_a_cpu(monkeypatch)


def parts(wrapper: Any) -> tuple[Any, Any]:
    runner = wrapper.worker.model_runner
    return runner.pipeline, runner.prompt_embed_cache


class SilentExtension(CustomPipelineWorkerExtension):
    """As verl-omni's for NPUs: comes before DiffusionWorker, has its own sleep and wake-up and calls no other."""

    def __new__(cls, **kwargs: Any) -> Any:
        return super().__new__(cls)

    def sleep(self, level: int = 1) -> bool:
        Allocator.sleep("silently")
        return True

    def wake_up(self, tags: list[str] | None = None) -> bool:
        Allocator.wake_up("silently")
        return True

    def update_weights(self, weights: Any) -> None:
        self.model_runner.pipeline.load_weights(weights)  # type: ignore[attr-defined]


WORKERS = {"own": {}, "extension": {"extension": SilentExtension, "custom": {"pipeline_class": "any"}}}
WAYS = {
    "by name": lambda wrapper, level: wrapper.execute_method("sleep", level=level),
    "wrapper": lambda wrapper, level: wrapper.sleep(level),
    "task": lambda wrapper, level: wrapper.handle_sleep_task(OmniSleepTask(level=level, task_id="t")),
}


@pytest.mark.parametrize("worker", WORKERS.values(), ids=WORKERS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("level", [1, 2])
def test_the_cache_is_empty_before_the_allocator_sleeps(
    call: Any, worker: Any, way: Any, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries live outside the pool that sleep frees."""
    wrapper = wrapped(**worker)
    pipeline, cache = parts(wrapper)
    sizes, sleep = [], Allocator.sleep
    monkeypatch.setattr(
        Allocator, "sleep", lambda *tags, **kw: (sizes.append(cache.stats()["size"]), sleep(*tags, **kw))
    )
    pipeline.encode_prompt(*call)
    way(wrapper, level)
    assert sizes == [0]


@pytest.mark.parametrize("worker", WORKERS.values(), ids=WORKERS)
def test_what_is_encoded_before_the_weights_are_back_does_not_stay(call: Any, worker: Any) -> None:
    """After level 2 a parameter holds whatever was there, until somebody loads it."""
    wrapper = wrapped(**worker)
    pipeline, cache = parts(wrapper)
    wrapper.sleep(2)
    with torch.no_grad():
        pipeline.text_encoder.embed.weight.fill_(float("nan"))
    pipeline.encode_prompt(*call)
    wrapper.wake_up(None)
    assert not is_hit(pipeline, cache, *call)
    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder."))


@pytest.mark.parametrize("name", ["sleep", "wake_up"])
def test_what_is_encoded_while_the_allocator_works_does_not_stay(
    call: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = wrapped()
    pipeline, cache = parts(wrapper)
    original = getattr(Allocator, name)
    monkeypatch.setattr(Allocator, name, lambda *args, **kw: (pipeline.encode_prompt(*call), original(*args, **kw))[1])
    wrapper.execute_method(name, **({"level": 2} if name == "sleep" else {"tags": None}))
    assert pipeline.runs == 1
    assert not is_hit(pipeline, cache, *call)


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


def test_a_training_step_of_verl_omni(call: Any) -> None:
    wrapper = wrapped(SilentExtension, {"pipeline_class": "any"})
    pipeline, cache = parts(wrapper)
    for seed in (1, 2):
        with recomputed(pipeline, cache, *call):
            wrapper.execute_method("sleep", level=1)
            wrapper.execute_method("wake_up", tags=["weights"])
            for prefix, module in (("transformer.", pipeline.transformer), ("text_encoder.", pipeline.text_encoder)):
                for bucket in new_weights(module, prefix, seed):
                    wrapper.execute_method("update_weights", [bucket])


@pytest.mark.parametrize("options", [{"enable_prompt_embed_cache": False}, {"diffusion_load_format": "dummy"}])
def test_a_runner_without_a_cache_is_left_alone(call: Any, options: dict[str, Any]) -> None:
    wrapper = wrapped(**options)
    assert wrapper.worker.model_runner.prompt_embed_cache is None
    assert wrapper.sleep(1) == 0
    assert wrapper.wake_up(["weights"]) is True
    assert wrapper.execute_method("get_prompt_embed_cache_stats") is None
    assert wrapper.execute_method("clear_prompt_embed_cache") is None
    wrapper.worker.model_runner = None  # as after shutdown()
    assert wrapper.execute_method("get_prompt_embed_cache_stats") is None


def test_the_calls_by_name(call: Any) -> None:
    wrapper = wrapped()
    pipeline, cache = parts(wrapper)
    embeds, mask = pipeline.encode_prompt(*call)
    counted = wrapper.execute_method("get_prompt_embed_cache_stats")
    assert cache.stats().items() <= counted.items()
    assert counted["size"] == 1
    assert counted["bytes"] == embeds.nbytes + mask.nbytes
    assert counted["omni_tensor_key"]["bytes"]["Adapter"] >= counted["bytes"]
    pipeline.text_encoder.embed.weight.data.zero_()  # a write that nothing can see
    assert is_hit(pipeline, cache, *call)
    assert wrapper.execute_method("clear_prompt_embed_cache") is None
    assert wrapper.execute_method("get_prompt_embed_cache_stats")["size"] == 0
    assert not is_hit(pipeline, cache, *call)


def test_a_pipeline_that_is_loaded_again_has_an_empty_cache(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = wrapped(SilentExtension, {"pipeline_class": "any"})
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


def test_two_pipelines_in_one_process(call: Any) -> None:
    """Inline executors put several workers into one process: a sleep is of one of them."""
    first, second = wrapped(), wrapped()
    for wrapper in (first, second):
        parts(wrapper)[0].encode_prompt(*call)
    first.sleep(1)
    assert not is_hit(*parts(first), *call)
    assert is_hit(*parts(second), *call)


def test_workers_that_exist_before_the_extension_is_active(call: Any) -> None:
    omni_tensor_key.deactivate()
    classes: list[Any] = []
    try:
        wrappers = [wrapped(**worker) for worker in WORKERS.values()]
        classes = [type(wrapper.worker) for wrapper in wrappers]
        before = [dict(vars(cls)) for cls in classes]
    finally:
        omni_tensor_key.activate()
    for wrapper in wrappers:
        pipeline, cache = parts(wrapper)
        lists = [argument.tolist() if isinstance(argument, torch.Tensor) else argument for argument in call]
        pipeline.encode_prompt(*lists)
        wrapper.execute_method("sleep", level=1)
        assert cache.stats()["size"] == 0
    omni_tensor_key.deactivate()
    try:
        assert [dict(vars(cls)) for cls in classes] == before
    finally:
        omni_tensor_key.activate()
