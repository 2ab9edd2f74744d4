"""The errors of this package, and in words why a value has no key."""

from __future__ import annotations

from typing import Any


def _describe(obj: Any) -> str:
    try:
        shape = f"of shape {tuple(obj.shape)}"
    except RuntimeError:  # a nested tensor
        shape = "of no one shape"
    return f"{str(obj.dtype).removeprefix('torch.')} tensor {shape} on {obj.device}"


def _sentence(obj: Any, reason: str, max_bytes: int) -> str:
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    if reason == "type":
        return f"a {kind} is not a torch.Tensor"
    if reason == "subclass":
        return f"a {kind} is a subclass of torch.Tensor; only torch.Tensor and torch.nn.Parameter themselves are keyed"
    if reason == "graph_capture":
        return "its CUDA stream is being captured into a graph, and reading the content would synchronize it"
    if reason == "dtype":
        return f"a {_describe(obj)} holds neither bools nor integers of 8, 16, 32 or 64 bits"
    if reason == "size":
        return (
            f"a {_describe(obj)} has more than {max_bytes} bytes; OMNI_TENSOR_KEY_MAX_BYTES sets the limit per tensor"
        )
    if reason == "unexportable":
        layout = str(obj.layout).removeprefix("torch.")
        return f"a {_describe(obj)} with layout {layout} has no plain strided content that DLPack could describe"
    if reason == "storage":
        return f"a {_describe(obj)} has no storage: it is fake, or wrapped by a transform"
    if reason == "changed":
        return f"a {_describe(obj)} changed while its key was being made"
    return f"a {_describe(obj)} describes itself wrongly"


class ContractMismatch(Exception):
    """A module of vLLM-Omni differs from what this package relies on; the text names the difference."""


class UncacheableTensorError(TypeError):
    """A value that has no key.

    reason: one word for programs: "type", "subclass", "dtype", "size", "unexportable", "storage",
        "graph_capture", "changed" or "malformed". The text names the dtype, layout, device or size.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


def uncacheable(obj: Any, reason: str, max_bytes: int) -> UncacheableTensorError:
    """Return the error that says why `obj` has no key."""
    return UncacheableTensorError(f"cannot key this value: {_sentence(obj, reason, max_bytes)}.", reason)
