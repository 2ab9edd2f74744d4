"""Host copies of device tensors, through torch."""

from __future__ import annotations

import functools

import torch

from ..settings import logger


@functools.cache
def note_host_copy(why: str) -> None:
    """Log, once for each reason, why CUDA tensors go through `to_host` and not through the CUDA unit."""
    logger.warning(
        "CUDA tensors are copied to the host before they are hashed, which gives the same keys but is slower: %s", why
    )


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a graph."""
    module = torch.get_device_module(device)
    query = getattr(module, "is_current_stream_capturing", None)
    if query is None:
        return False
    with module.device(device):
        return bool(query())


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Copy tensors to the host, each in a copy of its own.

    Returns None where that would synchronize a stream under graph capture. Raises what torch raises, such as the
    RuntimeError of an earlier asynchronous CUDA error.
    """
    if any(map(is_capturing, {tensor.device for tensor in tensors})):
        return None
    return [tensor.detach().to("cpu") for tensor in tensors]
