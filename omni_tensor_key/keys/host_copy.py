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


def _copy_packed(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of one device to the host in one copy, as the bytes of all of them."""
    # The widest items first, so that each tensor begins at a multiple of its item size, as a view of it must.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    # as_strided, since contiguous() may keep any stride in a tensor of one element.
    parts = [tensors[i].contiguous().as_strided((tensors[i].numel(),), (1,)).view(torch.uint8) for i in order]
    packed = torch.cat(parts).to("cpu")
    copies = list(tensors)
    for i, part in zip(order, packed.split([part.numel() for part in parts]), strict=True):
        copies[i] = part.view(tensors[i].dtype).reshape(tensors[i].shape)
    return copies


def _copy(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if len(tensors) > 1:
        try:
            return _copy_packed(tensors)
        except NotImplementedError:
            pass  # this device cannot view, pack or make contiguous one of the dtypes; copying it can any device
    return [tensor.to("cpu") for tensor in tensors]


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Copy tensors with elements to the host, all of one device in one copy where the device can pack them.

    Returns None where that would synchronize a stream under graph capture. Raises what torch raises, such as the
    RuntimeError of an earlier asynchronous CUDA error.
    """
    of_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        of_device.setdefault(tensor.device, []).append(i)
    if any(is_capturing(device) for device in of_device):
        return None
    copies = [tensor.detach() for tensor in tensors]
    for indices in of_device.values():
        for i, copy in zip(indices, _copy([copies[i] for i in indices]), strict=True):
            copies[i] = copy
    return copies
