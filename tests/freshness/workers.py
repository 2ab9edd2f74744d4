"""vLLM-Omni's real workers, runners and wrappers on a CPU, with stubs for what only a GPU has."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import Adapter

if importlib.util.find_spec("torchvision") is None:
    # The worker's module takes one function from this one, which imports torchvision through models of other stages.
    _stage_init = types.ModuleType("vllm_omni.engine.stage_init_utils")
    _stage_init.set_death_signal = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    sys.modules.setdefault(_stage_init.__name__, _stage_init)

import vllm_omni.platforms
from vllm.config import VllmConfig
from vllm_omni.diffusion.lora import manager as lora_manager
from vllm_omni.diffusion.worker import diffusion_model_runner, diffusion_worker
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension as CustomPipelineWorkerExtension
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker, WorkerWrapperBase


class Allocator:
    """In the place of the CUDA allocator whose pool sleep frees."""

    events: list[Any]

    @classmethod
    def get_instance(cls) -> type[Allocator]:
        return cls

    @classmethod
    def get_current_usage(cls) -> int:
        return 0

    @classmethod
    def use_memory_pool(cls, tag: str) -> Any:
        return nullcontext()

    @classmethod
    def sleep(cls, offload_tags: Any = None) -> None:
        cls.events.append(("allocator sleeps", offload_tags))

    @classmethod
    def wake_up(cls, tags: Any = None) -> None:
        cls.events.append(("allocator wakes", tags))


class Platform:
    """In the place of the platform without a device, which raises NotImplementedError for all of these."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 1 << 30


class Profiler:
    """In the place of the one that asks the device how much memory a model takes."""

    consumed_memory = 0

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Runner(DiffusionModelRunner):
    """Without the constructor, which wants a device; load_model() and the rest are the real ones."""

    def __init__(self, vllm_config: Any, od_config: Any, device: Any) -> None:
        self.vllm_config, self.od_config, self.device = vllm_config, od_config, device
        self.pipeline = self.prompt_embed_cache = None
        self.diffusion_kv_backend = SimpleNamespace(refresh_block_table_layout=lambda: None)


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any] = Adapter) -> list[Any]:
    """Replace what only a GPU or a checkpoint has; returns the list in which the allocator notes what it is told."""
    release = version("vllm-omni")
    if not release.startswith("0.30."):
        pytest.skip(f"what a worker of vllm-omni {release} needs to run on a CPU is not known; 0.30's is")
    Allocator.events = []
    platform = Platform()
    monkeypatch.setattr(diffusion_worker, "_get_cumem_allocator_class", lambda: Allocator)
    for module in (diffusion_worker, diffusion_model_runner, vllm_omni.platforms):
        monkeypatch.setattr(module, "current_omni_platform", platform)
    monkeypatch.setattr(diffusion_worker, "get_process_gpu_memory", lambda rank: None)

    def init_device(worker: Any) -> None:
        worker.device, worker.vllm_config = torch.device("cpu"), VllmConfig()

    monkeypatch.setattr(DiffusionWorker, "init_device", init_device)
    monkeypatch.setattr(DiffusionWorker, "_create_profiler", lambda worker: None)
    # Two collections per worker, each of them seconds among the objects of a test run.
    monkeypatch.setattr(diffusion_worker, "gc", SimpleNamespace(collect=lambda: 0))

    class Loader:
        """In the place of the one that reads a checkpoint."""

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def load_model(self, **kwargs: Any) -> Any:
            return make()

    monkeypatch.setattr(diffusion_model_runner, "DiffusersPipelineLoader", Loader)
    monkeypatch.setattr(diffusion_model_runner, "DeviceMemoryProfiler", Profiler)
    idle = SimpleNamespace(offloads=lambda component: False, uses_allgather=lambda component: False)
    monkeypatch.setattr(diffusion_model_runner, "resolve_offload", lambda config: idle)
    monkeypatch.setattr(diffusion_model_runner, "enable_offload_backend", lambda config, made, device: (made, None))
    monkeypatch.setattr(diffusion_model_runner, "InteractionCoordinator", SimpleNamespace(build=lambda *args: None))
    return Allocator.events


def config(**options: Any) -> Any:
    """Of the many options, those that a worker reads here."""
    defaults: dict[str, Any] = {
        "cache_backend": None,
        "cache_config": None,
        "diffusion_load_format": "default",
        "diffusion_model_runner_cls": f"{__name__}.Runner",
        "enable_cpu_offload": False,
        "enable_layerwise_offload": False,
        "enable_prompt_embed_cache": True,
        "enable_sleep_mode": True,
        "enforce_eager": True,
        "dtype": torch.float32,
        "lora_backend": lora_manager.LoRABackend.PEFT,
        "lora_path": None,
        "lora_scale": 1.0,
        "max_cpu_loras": 1,
        "model_class_name": "Adapter",
        "parallel_config": None,
        "prompt_embed_cache_size": 4,
        "step_execution": False,
        "streaming_output": False,
    }
    return SimpleNamespace(**defaults | options)


def wrapped(extension: type | None = None, custom: dict[str, Any] | None = None, **options: Any) -> Any:
    """The wrapper that engines talk to, around a worker that it has composed and that has loaded its pipeline."""
    return WorkerWrapperBase(
        gpu_id=0,
        od_config=config(**options),
        base_worker_class=DiffusionWorker,
        worker_extension_cls=extension,
        custom_pipeline_args=custom,
    )
