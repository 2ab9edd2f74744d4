"""A cache that really hits, while weights and memory change under it: cases 39 to 42."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import omni_tensor_key

from .support import IDS, MASK, installed, outcome

pytestmark = pytest.mark.usefixtures("active")


class Pipeline(nn.Module):
    """Its values depend on its text encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = nn.Embedding(32, 4)
        self.transformer = nn.Linear(4, 4)

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> torch.Tensor:
        return self.text_encoder(torch.as_tensor(prompt_ids) % 32).detach()

    def load_weights(self, weights: Any) -> set[str]:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)
        return set(parameters)


def changed(pipeline: Any, call: tuple[Any, ...], change: Any) -> bool:
    """Whether the call's value is, after the change, the one that the encoder gives now, and not the old one."""
    before = pipeline.encode_prompt(*call)
    change()
    after = pipeline.encode_prompt(*call)
    return torch.equal(after, type(pipeline).encode_prompt(pipeline, *call)) and not torch.equal(before, after)


@pytest.mark.parametrize("call", [(IDS, MASK), (IDS.tolist(), MASK.tolist())], ids=["tensors", "lists"])
def test_case_39_new_weights_give_new_values(call: tuple[Any, ...]) -> None:
    pipeline, _ = installed(Pipeline())
    weights = [("text_encoder.weight", torch.randn(32, 4))]
    assert changed(pipeline, call, lambda: pipeline.load_weights(iter(weights)))
    state = nn.Embedding(32, 4).state_dict()
    assert changed(pipeline, call, lambda: pipeline.text_encoder.load_state_dict(state))
    assert changed(pipeline, call, lambda: setattr(pipeline, "text_encoder", nn.Embedding(32, 4)))


def test_case_39_an_adapter_under_the_same_name() -> None:
    from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager

    pipeline, cache = installed(Pipeline())
    manager: Any = object.__new__(DiffusionLoRAManager)
    manager.__dict__.update(
        pipeline=pipeline,
        max_cached_adapters=2,
        _lora_modules={"text_encoder": object()},
        _registered_adapters={7: nn.Module()},
        _adapter_scales={7: 1.0},
        _adapter_access_order={},
        _pinned_adapters=set(),
        _active_adapter_id=7,
        _suspended_adapter_id=None,
    )
    manager._deactivate_all_adapters = lambda: setattr(manager, "_active_adapter_id", None)
    pipeline.encode_prompt(IDS)
    assert manager.remove_adapter(7)
    assert cache.stats()["size"] == 0


@pytest.fixture
def worker(active: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A real DiffusionWorker without the device that its constructor needs, and a pipeline with a cache."""
    if importlib.util.find_spec("torchvision") is None:
        # The worker's module takes one function from this one, which imports torchvision through other stages' models.
        stub: Any = types.ModuleType("vllm_omni.engine.stage_init_utils")
        stub.set_death_signal = None
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

    class Worker(DiffusionWorker):
        def sleep(self, level: int = 1) -> int:
            self.entries_at_sleep.append(self.model_runner.prompt_embed_cache.stats()["size"])
            return 0

        def wake_up(self, tags: Any = None) -> bool:
            return True

    made: Any = object.__new__(Worker)
    pipeline, cache = installed(Pipeline())
    made.model_runner = types.SimpleNamespace(pipeline=pipeline, prompt_embed_cache=cache)
    made.entries_at_sleep = []
    omni_tensor_key.deactivate()
    omni_tensor_key.activate()  # finds the worker
    yield made
    made.model_runner = None


@pytest.mark.parametrize("level", [1, 2])
def test_case_40_entries_are_dropped_before_sleep(worker: Any, level: int) -> None:
    runner = worker.model_runner
    runner.pipeline.encode_prompt(IDS)
    assert runner.prompt_embed_cache.stats()["size"] == 1
    worker.sleep(level)
    assert worker.entries_at_sleep == [0]
    runner.pipeline.encode_prompt(IDS)
    worker.wake_up()
    assert runner.prompt_embed_cache.stats()["size"] == 0


def test_case_41_the_worker_can_be_asked_and_flushed(worker: Any) -> None:
    runner = worker.model_runner
    runner.pipeline.encode_prompt(IDS)
    runner.pipeline.encode_prompt(IDS)
    # collective_rpc calls methods of the worker by name.
    counts = worker.get_prompt_embed_cache_stats()
    assert (counts["size"], counts["hits"], counts["misses"]) == (1, 1, 1)
    worker.clear_prompt_embed_cache()
    assert runner.prompt_embed_cache.stats()["size"] == 0
    assert worker.get_prompt_embed_cache_stats()["size"] == 0


def test_case_42_counters_that_do_not_exist_are_absent(worker: Any) -> None:
    worker.model_runner = types.SimpleNamespace(pipeline=None, prompt_embed_cache=None)
    assert worker.get_prompt_embed_cache_stats() is None
    worker.model_runner = None
    assert worker.get_prompt_embed_cache_stats() is None

    omni_tensor_key.deactivate()
    assert omni_tensor_key.stats() == {}
    omni_tensor_key.activate()
    assert "bypassed" not in omni_tensor_key.stats()
    pipeline, cache = installed(Pipeline())
    pipeline.encode_prompt(IDS, torch.ones(3))
    assert outcome(cache) == (0, 0, 1)
    assert omni_tensor_key.stats()["bypassed"] == {"Pipeline": {"attention_mask": {"dtype": 1}}}
    assert "cleared" not in omni_tensor_key.stats()
