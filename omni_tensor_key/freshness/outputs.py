"""Outputs of `encode_prompt()`: private copies of them, their size, and how two of them differ."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import torch

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class NotStorableError(Exception):
    """An output that must not be stored for a call with tensors; the text is the reason, in one word."""


def _is_immutable(value: Any) -> bool:
    return type(value) in _IMMUTABLE or isinstance(value, enum.Enum)


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        raise NotStorableError("requires_grad")  # a hit would have no graph
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise NotStorableError("output_type")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotStorableError("output_type")
    return tensor.detach().clone()


def private_copy(output: Any) -> Any:
    """Return the output with a clone in place of every tensor, so that nobody else can write what is stored.

    The encoder may write its next output to the same buffer, the output may be a view of the caller's own mask or of a
    whole batch, and the caller may edit what it was returned.

    output: tensors, immutable values, and tuples, named tuples, lists and dicts of these.

    Raises NotStorableError for anything else: "output_type", also where upstream would change the type of a container;
    "requires_grad" for a tensor that does.
    """
    if isinstance(output, torch.Tensor):
        return _copy_tensor(output)
    if _is_immutable(output):
        return output
    kind = type(output)
    if kind is tuple or kind is list:
        return kind(map(private_copy, output))
    if kind is dict and all(map(_is_immutable, output)):
        return {name: private_copy(value) for name, value in output.items()}
    # A named tuple of Python's: torch.return_types have no _fields, and upstream makes plain tuples of them.
    if isinstance(output, tuple) and hasattr(output, "_fields") and not getattr(output, "__dict__", None):
        return kind(*map(private_copy, output))
    raise NotStorableError("output_type")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def tensor_bytes(output: Any) -> int:
    """Return how many bytes of memory the tensors of a stored output keep alive, each storage once."""
    storages = {}
    for tensor in _tensors(output):
        if tensor.layout is torch.strided and not tensor.is_nested:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:
            storages[id(tensor)] = tensor.element_size() * tensor.numel()
    return sum(storages.values())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).reshape(-1, tensor.element_size())


def _tensor_difference(stored: torch.Tensor, fresh: torch.Tensor, place: str) -> str | None:
    for name in ("dtype", "shape", "device", "layout"):
        before, now = getattr(stored, name), getattr(fresh, name)
        if before != now:
            return f"{place}: {name} {before} was stored, {now} is encoded"
    if stored.numel() == 0:
        return None
    differs = (_bits(stored) != _bits(fresh)).any(1)
    count = int(differs.sum())
    if count == 0:
        return None
    wide = torch.complex128 if stored.is_complex() else torch.float64
    pair = [tensor.detach().reshape(-1)[differs].to(wide) for tensor in (stored, fresh)]
    largest = float((pair[0] - pair[1]).abs().max())
    return f"{place}: {count} of {stored.numel()} elements differ, by at most {largest:g}"


def difference(stored: Any, fresh: Any, place: str = "output") -> str | None:
    """Return where two outputs first differ and by how much, in words, or None where they are equal bit by bit."""
    if isinstance(stored, torch.Tensor) and isinstance(fresh, torch.Tensor):
        return _tensor_difference(stored, fresh, place)
    if type(stored) is not type(fresh):
        return f"{place}: a {type(stored).__name__} was stored, a {type(fresh).__name__} is encoded"
    if isinstance(stored, dict):
        if list(stored) != list(fresh):
            return f"{place}: other names"
        pairs = [(f"{place}[{name!r}]", stored[name], fresh[name]) for name in stored]
    elif isinstance(stored, tuple | list):
        if len(stored) != len(fresh):
            return f"{place}: {len(stored)} items were stored, {len(fresh)} are encoded"
        pairs = [(f"{place}[{i}]", *both) for i, both in enumerate(zip(stored, fresh, strict=True))]
    else:
        same = stored is fresh or not _is_immutable(stored) or stored == fresh  # what is mutable is not compared
        return None if same else f"{place}: {stored!r} was stored, {fresh!r} is encoded"
    return next((found for name, *both in pairs if (found := difference(*both, name)) is not None), None)
