"""The platform: what vLLM-Omni asks of a device, answered for a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

RANKS = 2  # the highest number of ranks that the tests start


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def is_available(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def get_device_count(cls) -> int:
        return RANKS

    @classmethod
    def get_device_version(cls) -> None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        pass

    @classmethod
    def empty_cache(cls) -> None:
        pass

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        return cls.get_free_memory(), cls.get_device_total_memory()

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return 0

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        pass

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        return "omni_cpu.attention.CpuBackend"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        # A worker's process asks for this before it starts the thread that takes outputs off the device.
        from vllm_omni.diffusion.worker import diffusion_worker

        diffusion_worker._get_cumem_allocator_class = lambda: _NoPool
        if not isinstance(diffusion_worker.torch, _TorchWithCpuStreams):
            diffusion_worker.torch = _TorchWithCpuStreams("torch")
            pack = diffusion_worker.pack_diffusion_output_shm
            diffusion_worker.pack_diffusion_output_shm = lambda output, d2h_stream=None: pack(output)
        return str(super().get_diffusion_worker_cls())


class _NoPool:
    """In the place of the CUDA memory pool that sleep empties: on a CPU the weights stay where they are."""

    get_instance = classmethod(lambda cls: cls)
    get_current_usage = staticmethod(lambda: 0)
    use_memory_pool = staticmethod(lambda tag=None: nullcontext())
    sleep = staticmethod(lambda offload_tags=None: None)
    wake_up = staticmethod(lambda tags=None: None)
    release_pools = staticmethod(lambda: None)


class _TorchWithCpuStreams(ModuleType):
    """`torch` as the worker's module sees it: the CPU is its accelerator."""

    accelerator = SimpleNamespace(current_accelerator=lambda: torch.device("cpu"), empty_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
