"""Content keys for token-ID and mask tensors in vLLM-Omni's prompt-embedding cache."""

from importlib.metadata import version

from .backend import TensorKey
from .bypass import explain
from .errors import UncacheableTensorError
from .key import tensor_key, tensor_keys
from .plugin import activate, deactivate, is_active, stats

__version__ = version("omni-tensor-key")

__all__ = [
    "TensorKey",
    "UncacheableTensorError",
    "__version__",
    "activate",
    "deactivate",
    "explain",
    "is_active",
    "stats",
    "tensor_key",
    "tensor_keys",
]
