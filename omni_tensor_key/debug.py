"""The check behind `OMNI_TENSOR_KEY_DEBUG=1`: stored outputs are read-only by contract, and this finds who writes."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .host_copy import to_host
from .watch import Watch


def _tensors(value: Any, path: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _tensors(item, f"{path}[{name!r}]")


def _fingerprint(tensor: torch.Tensor) -> tuple[object, ...]:
    content = b""
    if tensor.numel() > 0 and (copies := to_host([tensor.to_dense() if tensor.layout != torch.strided else tensor])):
        flat = copies[0].resolve_conj().resolve_neg().contiguous().reshape(-1)
        content = bytes(flat.view(torch.uint8).numpy())
    return (tuple(tensor.shape), tensor.dtype, hashlib.blake2b(content, digest_size=16).digest())


def _fingerprints(value: Any) -> dict[str, tuple[object, ...]]:
    return {path: _fingerprint(tensor) for path, tensor in _tensors(value)}


class Fingerprints:
    """What the values stored in each cache looked like when they were stored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By watch and key: the value's address, and its fingerprints by element.
        self._of: weakref.WeakKeyDictionary[Watch, dict[Any, tuple[int, dict[str, tuple[object, ...]]]]] = (
            weakref.WeakKeyDictionary()
        )

    def take(self, watch: Watch, key: Any, value: Any) -> None:
        """Remember `value` as it is now."""
        fingerprints = _fingerprints(value)
        with self._lock:
            stored = self._of.setdefault(watch, {})
            stored.pop(key, None)
            stored[key] = (id(value), fingerprints)
            while len(stored) > watch.capacity:
                del stored[next(iter(stored))]  # the cache has dropped that one too

    def check(self, watch: Watch, key: Any, value: Any) -> None:
        """Raise RuntimeError if `value` is not what was stored under `key`."""
        with self._lock:
            stored = self._of.get(watch, {})
            address, then = stored.get(key, (0, {}))
            if address != id(value):
                return  # stored before this check was active, or by another thread just now
            stored[key] = stored.pop(key)  # in the order in which the cache drops them
        now = _fingerprints(value)
        for path in dict.fromkeys((*then, *now)):
            if then.get(path) != now.get(path):
                raise RuntimeError(
                    f"omni_tensor_key: {path} of {watch.name}.encode_prompt() was edited in place after it was cached "
                    f"under {key!r}. Outputs of a cached encode_prompt() are read-only: clone before writing."
                )
