"""The errors of this package, and in words why a value has no key."""

from __future__ import annotations

from typing import Any

_SENTENCES = {
    "type": "a {kind} is not a torch.Tensor",
    "subclass": "a {kind} is a subclass of torch.Tensor; only torch.Tensor and torch.nn.Parameter themselves are keyed",
    "graph_capture": "its CUDA stream is being captured into a graph, and reading the content would synchronize it",
    "dtype": "a {tensor} holds neither bools nor integers of 8, 16, 32 or 64 bits",
    "size": "a {tensor} has more than {max_bytes} bytes; OMNI_TENSOR_KEY_MAX_BYTES sets the limit per tensor",
    "unexportable": "a {tensor} with layout {layout} has no plain strided content that DLPack could describe",
    "storage": "a {tensor} has no storage: it is fake, or wrapped by a transform",
    "changed": "a {tensor} changed while its key was being made",
    "malformed": "a {tensor} describes itself wrongly",
}


def _describe(tensor: Any) -> str:
    try:
        shape = f"of shape {tuple(tensor.shape)}"
    except RuntimeError:  # a nested tensor
        shape = "of no one shape"
    return f"{str(tensor.dtype).removeprefix('torch.')} tensor {shape} on {tensor.device}"


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
    details = {"kind": f"{type(obj).__module__}.{type(obj).__qualname__}", "max_bytes": max_bytes}
    if reason not in ("type", "subclass", "graph_capture"):
        details |= {"tensor": _describe(obj), "layout": str(obj.layout).removeprefix("torch.")}
    return UncacheableTensorError(f"cannot key this value: {_SENTENCES[reason].format(**details)}.", reason)
