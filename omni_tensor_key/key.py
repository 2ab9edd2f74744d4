"""Keys of single tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from . import backend
from .backend import TensorKey
from .host_copy import to_host
from .settings import settings


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
