"""Keys of single tensors, and the backend that makes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .host_copy import to_host
from .settings import settings

if TYPE_CHECKING or settings().backend == "native":
    from . import _core as backend
else:
    from . import reference as backend

TensorKey = backend.TensorKey


def backend_description() -> str:
    """The backend in use, for the log line: its name and, for the native one, the instruction set of its hash."""
    if settings().backend == "reference":
        return "reference backend"
    return f"native backend, {backend.SIMD_PATHS[0]}"


def tensor_keys(tensors: Iterable[torch.Tensor]) -> list[TensorKey]:
    """Return a `TensorKey` for each tensor.

    tensors: any shape and strides; dtype bool, (u)int8 to (u)int64, or any dtype without elements; on any device. All
        tensors of one device are read in one go.

    Raises UncacheableTensorError for a value that has no key, RuntimeError where the device reports an error.
    """
    return backend.tensor_keys(tensors, to_host, settings().max_bytes)


def tensor_key(tensor: torch.Tensor) -> TensorKey:
    """Return the `TensorKey` of one tensor; see `tensor_keys`."""
    return tensor_keys([tensor])[0]
