"""vLLM-Omni's real LoRA manager over a tiny pipeline, on a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support import Adapter, installed
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager
from vllm_omni.lora.request import LoRARequest

SIZE, RANK = 8, 2


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """The groups of one process, which vLLM's linear layers ask for."""
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class Block(nn.Module):
    """One layer that an adapter can be put around: only vLLM's own linear layers can."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = ReplicatedLinear(SIZE, SIZE, bias=False, params_dtype=torch.float32)
        self.to_q.weight.data.fill_(0.1)
        # What the loader does after loading; on a CPU the layer cannot run without it.
        self.to_q.quant_method.process_weights_after_loading(self.to_q)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.to_q(nn.functional.one_hot(ids % SIZE, SIZE).float())[0]


class LoraPipeline(Adapter):
    """`_lora_components` is how a pipeline lets the manager reach more than its transformer."""

    def __init__(self, text: bool) -> None:
        super().__init__(Block)
        self.transformer = Block()
        if text:
            self._lora_components = ["text_encoder"]


class Adapters:
    """A pipeline with a cache and a LoRA manager, and adapters for it."""

    def __init__(self, folder: Path, text: bool, slots: int = 2) -> None:
        self.folder = folder
        self.pipeline, self.cache = installed(LoraPipeline(text))
        self.manager = DiffusionLoRAManager(self.pipeline, torch.device("cpu"), torch.float32, slots)
        # What puts an adapter's weights into the layers: before 0.28, in one with what finds the adapter by its number.
        self.takes_number = not hasattr(self.manager, "_bind_adapter_weights")
        self.binding = "_activate_adapter" if self.takes_number else "_bind_adapter_weights"

    def request(self, component: str, number: int = 1, value: float = 1.0, rank: int = RANK, **config: Any) -> Any:
        """An adapter on the disk, for one component."""
        path = self.folder / f"{component}-{number}-{value}-{rank}"
        path.mkdir(exist_ok=True)
        name = f"base_model.model.{component}.to_q.lora_"
        weights = {f"{name}A.weight": torch.full((rank, SIZE), value), f"{name}B.weight": torch.ones(SIZE, rank)}
        save_file(weights, path / "adapter_model.safetensors")
        default = {"r": rank, "lora_alpha": rank, "target_modules": ["to_q"], "peft_type": "LORA", "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(default | config))
        return LoRARequest(lora_name=path.name, lora_int_id=number, lora_path=str(path))
