"""Keys of single tensors, and in words why a value cannot be part of a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .. import _core
from ..errors import UncacheableTensorError, uncacheable
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


def _elements(obj: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The elements of lists, tuples and dicts, in the order in which upstream looks at them, and where they are."""
    if isinstance(obj, list | tuple):
        for index, item in enumerate(obj):
            yield from _elements(item, f"{place}[{index}]")
    elif isinstance(obj, dict):
        for key in sorted(obj, key=repr):
            yield from _elements(obj[key], f"{place}[{key!r}]")
    else:
        yield place, obj


def _is_keyed_by_upstream(obj: Any) -> bool:
    if obj is None or isinstance(obj, str | int | float | bytes | torch.device | torch.dtype):
        return True
    if type(obj).__module__.split(".", 1)[0] != "numpy" or not hasattr(obj, "item"):
        return False
    try:
        return not isinstance(obj.item(), torch.Tensor) and all(
            _is_keyed_by_upstream(value) for _, value in _elements(obj.item(), "")
        )
    except (ValueError, TypeError):
        return False


def explain(obj: Any) -> str | None:
    """Say in one sentence why a call with this argument would bypass the cache, or return None if it would not.

    obj: a tensor, or anything else that `encode_prompt()` takes. Of a list, tuple or dict, the first element that has
        no key is named with its place.

    Raises RuntimeError where the device of a tensor reports an error.
    """
    for place, value in _elements(obj, ""):
        if _is_keyed_by_upstream(value):
            continue
        try:
            tensor_key(value)
        except UncacheableTensorError as error:
            return f"{place}: {error}" if place else str(error)
    return None
