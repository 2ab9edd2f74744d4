"""How the arguments of a signature become the items of a key, found out once for each signature."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import torch

_CONSTANTS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
_MAX_PARAMETERS = 64
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _is_constant(value: object) -> bool:
    """Whether neither the value nor what it refers to can change, nor lead to a pipeline."""
    return type(value) in _CONSTANTS or (type(value) is tuple and all(type(item) in _CONSTANTS for item in value))


def binding_plan(
    signature: Any, hashable: Callable[[Any], Any], precomputed: tuple[str, ...]
) -> tuple[int, int, int, tuple[tuple[Any, ...], ...]] | None:
    """Return what the native key builder needs to bind a call, or None: upstream's own function must bind it then.

    A plan is: how many parameters take positional arguments, the index of *args and that of **kwargs (-1: none), and
    in the order of the signature for each parameter its name, whether it can be given by name, whether it brings
    precomputed embeddings, its default, and that default's finished (name, value), which is None where it has none.

    There is no plan for signatures with positional-only parameters, with a default that is no constant, with more than
    64 parameters, or of other classes than inspect's own.
    """
    if type(signature) is not Signature or len(signature.parameters) > _MAX_PARAMETERS:
        return None
    parameters = list(signature.parameters.values())
    kinds = [parameter.kind for parameter in parameters]
    if Parameter.POSITIONAL_ONLY in kinds or kinds != sorted(kinds) or max(map(kinds.count, _VARIADIC)) > 1:
        return None
    entries = []
    for parameter in parameters:
        name, default, is_variadic = parameter.name, parameter.default, parameter.kind in _VARIADIC
        if is_variadic:  # apply_defaults() gives what is not given an empty tuple and an empty dict
            default = () if parameter.kind is Parameter.VAR_POSITIONAL else {}
        elif default is not Parameter.empty and not _is_constant(default):
            return None
        if type(parameter) is not Parameter or type(name) is not str:
            return None
        item = None if default is Parameter.empty else (name, hashable(default))
        entries.append((name, not is_variadic, name in precomputed, default, item))
    indices = [kinds.index(kind) if kind in kinds else -1 for kind in _VARIADIC]
    return kinds.count(Parameter.POSITIONAL_OR_KEYWORD), indices[0], indices[1], tuple(entries)
