"""Outputs of `encode_prompt()`: private copies of them, their size, and how two of them differ."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class NotStorableError(Exception):
    """An output that must not be stored for a call with tensors; the text is the reason, in one word."""


def _is_immutable(value: Any) -> bool:
    return type(value) in _IMMUTABLE or isinstance(value, enum.Enum)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_exact = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    is_wrapped = tensor.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return is_exact and not is_wrapped and not tensor.is_quantized and not tensor.is_meta


def private_copy(output: Any) -> Any:
    """Return the output with a clone in place of every tensor, so that nobody else can write what is stored.

    The encoder may write its next output to the same buffer, the output may be a view of the caller's own mask or of a
    whole batch, and the caller may edit what it was returned.

    output: strided tensors, immutable values, and tuples, named tuples, lists and dicts of these.

    Raises NotStorableError for anything else: "output_type", also where upstream would change the type of a container;
    "requires_grad" for a tensor that does, since a hit would have no graph.
    """
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            raise NotStorableError("requires_grad")
        if _is_plain(output):
            return output.detach().clone()
    elif _is_immutable(output):
        return output
    elif type(output) in (tuple, list):
        return type(output)(map(private_copy, output))
    elif type(output) is dict and all(map(_is_immutable, output)):
        return {name: private_copy(value) for name, value in output.items()}
    # torch.return_types have no _fields, and upstream makes plain tuples of them.
    elif isinstance(output, tuple) and hasattr(output, "_fields") and not getattr(output, "__dict__", None):
        return type(output)(*map(private_copy, output))
    raise NotStorableError("output_type")


def tensor_bytes(output: Any) -> int:
    """Return how many bytes of memory the tensors of a stored output keep alive, each storage once."""
    sizes = {}
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and _is_plain(tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(tensor, torch.Tensor):
            sizes[id(tensor)] = tensor.element_size() * tensor.numel()
    return sum(sizes.values())


def _tensor_difference(stored: torch.Tensor, fresh: torch.Tensor) -> str | None:
    if not (_is_plain(stored) and _is_plain(fresh)):  # only entries of list keys hold others, which have no bytes
        return None if type(stored) is type(fresh) else f"{type(stored)} was stored, {type(fresh)} is encoded"
    for name in ("dtype", "shape", "device"):
        if getattr(stored, name) != getattr(fresh, name):
            return f"{name} {getattr(stored, name)} was stored, {getattr(fresh, name)} is encoded"
    before, now = (tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous() for tensor in (stored, fresh))
    bits = [tensor.view(torch.uint8).reshape(-1, stored.element_size()) for tensor in (before, now)]
    differs = (bits[0] != bits[1]).any(1)
    if not differs.any():
        return None
    wide = torch.complex128 if stored.is_complex() else torch.float64
    largest = (before[differs].to(wide) - now[differs].to(wide)).abs().max()
    return f"{int(differs.sum())} of {stored.numel()} elements differ, by at most {float(largest):g}"


def difference(stored: Any, fresh: Any) -> str | None:
    """Return where two outputs first differ and by how much, in words, or None where they are equal bit by bit.

    Plain tensors and immutable values are compared, and the containers that they are in; of other tensors the type.
    """
    (before, before_structure), (now, now_structure) = map(pytree.tree_flatten_with_path, (stored, fresh))
    if before_structure != now_structure:
        return "output: its structure is another"
    for (path, old), (_, new) in zip(before, now, strict=True):
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            found = _tensor_difference(old, new)
        else:
            same = type(old) is type(new) and (old is new or not _is_immutable(old) or old == new or old != old)
            found = None if same else f"{old!r} was stored, {new!r} is encoded"
        if found is not None:
            return f"output{pytree.keystr(path)}: {found}"
    return None
