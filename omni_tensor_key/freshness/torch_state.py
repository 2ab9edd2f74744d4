"""The state of torch around a call with tensors, which its output depends on as well as on its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TorchState(NamedTuple):
    """The third item of the cache key of a call with tensors.

    autocast: for each device type for which autocast is on, its name and dtype.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    dtype: torch.dtype


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    if not torch._C._is_any_autocast_enabled():
        return ()
    accelerator = torch.accelerator.current_accelerator()  # of this build of torch: no device is initialized
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return tuple((name, torch.get_autocast_dtype(name)) for name in types if torch.is_autocast_enabled(name))


def call_state() -> TorchState | str:
    """Return the state around a call, or the reason for which a call with tensors must bypass the cache.

    "tracing": `torch.jit` records the encoder's operations, of which a hit would leave none. "dispatch_mode": a torch
    dispatch mode (fake tensors, a profiler of operations) sees or replaces them.
    """
    if torch._C._get_tracing_state() is not None:
        return "tracing"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "dispatch_mode"
    return TorchState(
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast(), torch.get_default_dtype()
    )
