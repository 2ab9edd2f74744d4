"""Host copies of device tensors, through torch."""

from __future__ import annotations

import torch


def _is_capturing(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    query = getattr(module, "is_current_stream_capturing", None)
    if query is None:
        return False
    with module.device(device):
        return bool(query())


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Copy each tensor to the host, or return None where that would synchronize a stream under graph capture.

    Raises what torch raises, such as the RuntimeError of an earlier asynchronous CUDA error.
    """
    if any(_is_capturing(device) for device in {tensor.device for tensor in tensors}):
        return None
    return [tensor.detach().to("cpu") for tensor in tensors]
