"""The CUDA unit's first reading on each device, compared with torch's own copies of the same tensors."""

from __future__ import annotations

import torch

from . import _core
from .host_copy import is_capturing, to_host
from .log import logger

_MAX_BYTES = 1 << 20


class _NotByUnit(Exception):
    """The unit has left a tensor to torch."""


def _refuse(tensors: list[torch.Tensor]) -> None:
    raise _NotByUnit


def _patterns(device: torch.device) -> list[torch.Tensor]:
    """Tensors for every way in which the kernel reads: each width of a load, whole blocks and rests, gathered."""
    words = torch.arange(1, 40_001) * 0x1E3779B97F4A7C15  # wraps around: all bytes of a word vary
    rows = words.to(device).reshape(200, 200)
    octets = rows.view(torch.uint8)
    return [
        rows,
        rows[1, 1:],
        rows[3, 4],
        rows.T[:50],
        rows[:, 3:70:3],
        rows[:1].expand(5, 200),
        rows.view(torch.int32).T[::7],
        rows.view(torch.int16)[5:9, 1:778],
        octets[:, 3:900],
        octets.reshape(-1)[5:100_008],
        octets[0, 8:9],
    ]


def _keys_by_torch(tensors: list[torch.Tensor]) -> list[_core.TensorKey]:
    wanted = _core.use_cuda_unit(False)  # in this thread
    try:
        return _core.tensor_keys(tensors, to_host, _MAX_BYTES)
    finally:
        _core.use_cuda_unit(wanted)


def compare_with_torch(tensor: torch.Tensor) -> bool | None:
    """Whether the unit reads on this tensor's device what torch copies from there; None where that cannot be told now.

    Where it does not, the error is logged: the caller must not use the unit again.
    """
    device = tensor.device
    with torch._C.DisableTorchFunction():
        if is_capturing(device):
            return None
        try:
            patterns = _patterns(device)
            if type(patterns[0]) is not torch.Tensor:  # somebody's dispatch mode makes other tensors
                return None
            by_unit = _core.tensor_keys(patterns, _refuse, _MAX_BYTES)
        except (_NotByUnit, torch.OutOfMemoryError):
            return None
        by_torch = _keys_by_torch(patterns)
    wrong = [number for number, keys in enumerate(zip(by_unit, by_torch, strict=True)) if keys[0] != keys[1]]
    if wrong:
        logger.error(
            "omni_tensor_key: on %s the CUDA unit read other bytes than torch (patterns %s of %d). Please report this. "
            "CUDA tensors are copied to the host from now on, which gives the right keys but is slower.",
            device,
            ", ".join(map(str, wrong)),
            len(patterns),
        )
    return not wrong
