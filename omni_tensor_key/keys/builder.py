"""The native key builder, with what it needs from Python handed to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _core
from .cuda_check import check_cuda_unit
from .host_copy import note_host_copy, to_host
from .signature import binding_plan

_core.set_cuda_functions(check_cuda_unit, note_host_copy)


def make_key_builder(
    *,
    hashable: Callable[[Any], Any],
    build_key: Callable[..., Any],
    not_hashable: object,
    precomputed: tuple[str, ...],
    call_state: Callable[[], Any],
    on_bypass: Callable[[str, str, str], object],
    max_bytes: int,
    tensors_only: bool,
) -> _core.KeyBuilder:
    """Return the object whose `hashable` and `build_key` stand in for upstream's `_hashable` and `_build_key`.

    hashable, build_key, not_hashable, precomputed: upstream's own.
    call_state: called once per call that has a tensor, before any is looked at. A str is the reason for which the call
        must bypass the cache; anything else is hashable, and becomes the last item of the call's key.
    on_bypass: called with the model tag, the argument's name or "", and the reason.
    max_bytes: the largest tensor that is keyed.
    tensors_only: upstream's functions do all but the tensors.
    """
    return _core.KeyBuilder(
        hashable,
        build_key,
        not_hashable,
        precomputed,
        binding_plan,
        call_state,
        on_bypass,
        to_host,
        max_bytes,
        tensors_only,
    )
