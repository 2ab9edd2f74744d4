"""vLLM-Omni's own SDPA attention; its dispatcher has no branch for a platform that is out of tree."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuImpl(SDPAImpl):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None) -> Any:
        return self._forward_impl(query, key, value, attn_metadata)


class CpuBackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return CpuImpl
