"""Content keys of tensors, and the stand-ins for the functions with which vLLM-Omni's cache makes its keys."""

from .._core import KeyBuilder, TensorKey
from ..errors import UncacheableTensorError
from .builder import make_key_builder
from .reasons import explain
from .tensors import tensor_key, tensor_keys

__all__ = [
    "KeyBuilder",
    "TensorKey",
    "UncacheableTensorError",
    "explain",
    "make_key_builder",
    "tensor_key",
    "tensor_keys",
]
