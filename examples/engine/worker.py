"""A worker extension, as trainers have one: counts the runs of the text encoder, and syncs weights."""

from __future__ import annotations

import os
import time
from typing import Any

from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.platforms import current_omni_platform

# vLLM-Omni fuses these parameters while it loads, so their names are not those of a checkpoint.
FUSED = ("to_qkv", "add_kv_proj")


class RolloutWorker(CustomPipelineWorkerExtension):
    """Methods that the rollout calls on every rank with collective_rpc()."""

    model_runner: Any
    _runs = 0
    _seconds = 0.0
    _began = 0.0

    def count_encoder_runs(self) -> None:
        """Count the runs of the text encoder and their seconds from now on."""

        def before(*_: Any) -> None:
            current_omni_platform.synchronize()
            self._began = time.perf_counter()

        def after(*_: Any) -> None:
            current_omni_platform.synchronize()
            self._seconds += time.perf_counter() - self._began
            self._runs += 1

        encoder = self.model_runner.pipeline.text_encoder
        encoder.register_forward_pre_hook(before)
        encoder.register_forward_hook(after)

    def counts(self) -> dict[str, Any]:
        """What happened since count_encoder_runs(), the counters of the cache, and the process."""
        cache = self.model_runner.get_prompt_embed_cache_stats()
        return {"runs": self._runs, "seconds": self._seconds, "pid": os.getpid(), **cache}

    def sync_weights(self, part: str, factor: float) -> int:
        """Load the weights of *part* ("transformer", "text_encoder"), each times *factor*; return how many."""
        pipeline = self.model_runner.pipeline
        weights = [
            (name, parameter.detach() * factor)
            for name, parameter in pipeline.named_parameters()
            if name.startswith(f"{part}.") and not any(fused in name for fused in FUSED)
        ]
        pipeline.load_weights(weights)
        return len(weights)
