"""Content keys for token-ID and mask tensors in vLLM-Omni's prompt-embedding cache."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import UncacheableTensorError
    from .keys import TensorKey, explain, tensor_key, tensor_keys
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


def __getattr__(name: str) -> Any:
    """Import at first use: the command line must be able to say what is wrong with an extension that cannot load."""
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("omni-tensor-key")
    elif name in ("activate", "deactivate", "is_active", "stats"):
        value = getattr(import_module(".plugin", __name__), name)
    elif name in __all__:
        value = getattr(import_module(".keys", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
