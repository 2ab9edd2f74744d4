"""Outputs of encode_prompt() that must not be stored as they are."""

from __future__ import annotations

import enum
from typing import Any, Final

import torch

NOT_STORABLE: Final = object()

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


def _is_immutable(value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return all(map(_is_immutable, value))
    return kind in _SCALARS or issubclass(kind, enum.Enum)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its storage, or its sparse parts: no other tensor hangs on it.

    Attributes are none here: upstream has detached the tensor.
    """
    if tensor.is_nested or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    # The scales of other schemes are tensors.
    return not tensor.is_quantized or tensor.qscheme() == torch.per_tensor_affine


def _own(tensor: torch.Tensor, sources: list[int]) -> torch.Tensor:
    if tensor.layout in _SPARSE:
        return tensor.clone()  # of indices and values, any of which may be an input
    storage = tensor.untyped_storage()
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    # An input lies inside its own storage, so its address tells whether that is this one. The end counts, for a view
    # without elements at the end of its storage; a neighbour that begins there costs one needless clone.
    aliases = start != 0 and any(start <= source <= end for source in sources)
    return tensor.clone() if aliases else tensor


def _without_aliases(value: Any, sources: list[int]) -> Any:
    if type(value) in (torch.Tensor, torch.nn.Parameter) and _is_plain(value):
        return _own(value, sources)
    if _is_immutable(value):
        return value
    if isinstance(value, tuple):
        items = [_without_aliases(item, sources) for item in value]
        if not hasattr(value, "_fields"):
            return tuple(items)
        if not getattr(value, "__dict__", None):  # what else a named tuple has been given
            return type(value)(*items)
    elif isinstance(value, list):
        return [_without_aliases(item, sources) for item in value]
    elif isinstance(value, dict) and all(map(_is_immutable, value)):
        return {name: _without_aliases(item, sources) for name, item in value.items()}
    raise TypeError(f"a {type(value).__name__} may refer to an input")


def without_aliases(value: Any, sources: list[int]) -> Any:
    """Return `value` with a clone in place of every tensor that shares storage with an input, or NOT_STORABLE.

    value: what upstream is about to store: a tensor, or tuples (named ones too), lists and dicts of tensors and of
        immutable values. With anything else in it (an object, an array, a tensor subclass) it is not storable: it may
        refer to an input in ways that cannot be seen from here.
    sources: the addresses from which the call's input tensors were read.
    """
    try:
        return _without_aliases(value, sources)
    except Exception:  # of torch too: a tensor whose storage cannot be looked at, no memory for a clone
        return NOT_STORABLE
