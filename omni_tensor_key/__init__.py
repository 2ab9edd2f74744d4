"""Content keys for token-ID and mask tensors in vLLM-Omni's prompt-embedding cache."""

from importlib.metadata import version

from .errors import UncacheableTensorError
from .key import TensorKey, tensor_key, tensor_keys
from .plugin import activate, deactivate, is_active

__version__ = version("omni-tensor-key")

__all__ = [
    "TensorKey",
    "UncacheableTensorError",
    "__version__",
    "activate",
    "deactivate",
    "is_active",
    "tensor_key",
    "tensor_keys",
]
