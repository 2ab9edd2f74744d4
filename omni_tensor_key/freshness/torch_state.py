"""The state of torch around a call with tensors, on which its output depends as well."""

from __future__ import annotations

import torch
from torch import get_default_dtype, is_grad_enabled, is_inference_mode_enabled
from torch._C import _get_tracing_state, _is_any_autocast_enabled, _len_torch_dispatch_stack


class TorchState(tuple[bool, bool, tuple[tuple[str, torch.dtype], ...], torch.dtype]):
    """Grad mode, inference mode, device types and dtypes of autocast, default dtype: the third item of a cache key."""

    __slots__ = ()


_float32 = torch.float32
_USUAL: list[list[TorchState]] = [
    [TorchState((grad, inference, (), _float32)) for inference in (False, True)] for grad in (False, True)
]


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    accelerator = torch.accelerator.current_accelerator()  # of this build of torch: no device is initialized
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return tuple((name, torch.get_autocast_dtype(name)) for name in types if torch.is_autocast_enabled(name))


def call_state() -> TorchState | str:
    """Return the state around a call, or the reason for which a call with tensors must bypass the cache.

    "tracing": `torch.jit` records the encoder's operations, of which a hit would leave none. "dispatch_mode": a torch
    dispatch mode, such as that of fake tensors, sees or replaces them.
    """
    if _get_tracing_state() is not None:
        return "tracing"
    if _len_torch_dispatch_stack() > 0:
        return "dispatch_mode"
    grad, inference, dtype = is_grad_enabled(), is_inference_mode_enabled(), get_default_dtype()
    if dtype is _float32 and not _is_any_autocast_enabled():
        usual: TorchState = _USUAL[grad][inference]  # a fifth of this function's time is the making of a new one
        return usual
    return TorchState((grad, inference, _autocast(), dtype))
