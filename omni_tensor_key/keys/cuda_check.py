"""The CUDA unit's first reading on each device, compared with torch's own copies of the same tensors."""

from __future__ import annotations

import torch

from .. import _core
from ..settings import logger
from .host_copy import is_capturing, note_host_copy, to_host

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


def _tells_streams(device: torch.device) -> bool:
    """Whether torch's DLPack table tells the current stream.

    Where another backend is registered beside CUDA, it answers with the default stream (torch 2.13).
    """
    module = torch.get_device_module(device)
    side = module.Stream(device)
    with module.stream(side):
        try:
            return bool(_core.cuda_stream(device.index) == side.cuda_stream)
        except NotImplementedError:
            return False


def check_cuda_unit(tensor: torch.Tensor) -> bool | None:
    """Whether the unit is to be used on this tensor's device: it reads there what torch copies, in the right order.

    None where that cannot be told now. Where it is not, why is logged.
    """
    device = tensor.device
    with torch._C.DisableTorchFunction():
        if is_capturing(device):
            return None
        if not _tells_streams(device):
            note_host_copy("torch does not tell the current CUDA stream. A second backend beside CUDA is one cause.")
            return False
        try:
            patterns = _patterns(device)
            by_unit = _core.tensor_keys(patterns, to_host, _MAX_BYTES, True)
            by_torch = _core.tensor_keys(patterns, to_host, _MAX_BYTES, False)
        except (NotImplementedError, torch.OutOfMemoryError):
            return None  # the unit cannot read now, or memory is short
    if not isinstance(by_unit, list) or not isinstance(by_torch, list):
        return None  # a dispatch mode makes other tensors of ours
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
