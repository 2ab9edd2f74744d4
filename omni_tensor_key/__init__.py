"""Content keys for token-ID and mask tensors in vLLM-Omni's prompt-embedding cache."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import TensorKey
    from .bypass import explain
    from .errors import UncacheableTensorError
    from .key import tensor_key, tensor_keys
    from .plugin import activate, deactivate, is_active, stats

    __version__: str

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

# Imported when first used: the command line must be able to say what is wrong with an installation whose extension
# cannot be loaded.
_HOMES = {
    "TensorKey": "backend",
    "UncacheableTensorError": "errors",
    "activate": "plugin",
    "deactivate": "plugin",
    "explain": "bypass",
    "is_active": "plugin",
    "stats": "plugin",
    "tensor_key": "key",
    "tensor_keys": "key",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("omni-tensor-key")
    elif name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
