"""Keys of single tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import _core
from ..errors import uncacheable
from ..settings import settings
from .host_copy import to_host


def tensor_keys(tensors: Iterable[torch.Tensor]) -> list[_core.TensorKey]:
    """Return a `TensorKey` for each tensor.

    tensors: any shape and strides; dtype bool, (u)int8 to (u)int64, or any dtype of whole bytes without elements; on
        any device. All tensors of one device are read in one go.

    Raises UncacheableTensorError for a value that has no key, RuntimeError where the device reports an error.
    """
    listed = tuple(tensors)
    max_bytes = settings().max_bytes
    keys = _core.tensor_keys(listed, to_host, max_bytes)
    if isinstance(keys, list):
        return keys
    index, reason = keys
    raise uncacheable(listed[index], reason, max_bytes)


def tensor_key(tensor: torch.Tensor) -> _core.TensorKey:
    """Return the `TensorKey` of one tensor; see `tensor_keys`."""
    return tensor_keys([tensor])[0]
