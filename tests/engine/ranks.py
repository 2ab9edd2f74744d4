"""A worker extension whose answer holds those of all ranks; vLLM-Omni passes on the first rank's alone."""

from __future__ import annotations

from typing import Any

import torch.distributed
from vllm_omni.diffusion.distributed.parallel_state import get_world_group
from worker import RolloutWorker


class RanksWorker(RolloutWorker):
    def counts_of_ranks(self) -> list[dict[str, Any]]:
        """counts() of every rank, with omni_tensor_key.stats() of its process."""
        import omni_tensor_key

        answers: list[Any] = [None] * torch.distributed.get_world_size()
        mine = {**self.counts(), "stats": omni_tensor_key.stats()}
        torch.distributed.all_gather_object(answers, mine, group=get_world_group().cpu_group)
        return answers

    def write_weight(self) -> None:
        """Change the text encoder where no hook can see it."""
        next(self.model_runner.pipeline.text_encoder.parameters()).data.mul_(1.5)
