"""Outputs of encode_prompt() that must not be stored as they are."""

from __future__ import annotations

from typing import Any

import torch


def _shares_storage(tensor: torch.Tensor, sources: list[int]) -> bool:
    try:
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    except (RuntimeError, NotImplementedError):  # sparse, nested, fake, ...: no one storage to look at
        return True
    # An input lies inside its own storage, so its address tells whether that is this one. The end counts, for a view
    # without elements at the end of its storage; a neighbour that begins there costs one needless clone.
    return start != 0 and any(start <= source <= end for source in sources)


def without_aliases(value: Any, sources: list[int]) -> Any:
    """Return `value` with a clone in place of every tensor that shares storage with an input of the call.

    value: what upstream is about to store: a tensor, or tuples (named ones too), lists and dicts of tensors.
    sources: the addresses from which the call's input tensors were read.
    """
    if isinstance(value, torch.Tensor):
        return value.clone() if _shares_storage(value, sources) else value
    if isinstance(value, tuple):
        items = [without_aliases(item, sources) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [without_aliases(item, sources) for item in value]
    if isinstance(value, dict):
        return {name: without_aliases(item, sources) for name, item in value.items()}
    return value
