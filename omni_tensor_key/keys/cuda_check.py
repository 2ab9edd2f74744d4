"""The CUDA unit's first reading on each device, compared with torch's own copies of the same tensors."""

from __future__ import annotations

import torch

from .. import _core
from ..settings import logger
from .host_copy import is_capturing, to_host

_MAX_BYTES = 1 << 20


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


def check_cuda_unit(index: int) -> bool | None:
    """Whether the unit reads on this CUDA device what torch copies from there; None where that cannot be told now.

    Where it does not, the error is logged: the caller must not use the unit again.
    """
    device = torch.device("cuda", index)
    with torch._C.DisableTorchFunction():
        if is_capturing(device):
            return None
        try:
            patterns = _patterns(device)
            if type(patterns[0]) is not torch.Tensor:  # somebody's dispatch mode makes other tensors
                return None
            by_unit = _core.tensor_keys(patterns, to_host, _MAX_BYTES, True)
            by_torch = _core.tensor_keys(patterns, to_host, _MAX_BYTES, False)
        except torch.OutOfMemoryError:
            return None
    if not isinstance(by_unit, list) or not isinstance(by_torch, list):
        return None
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
