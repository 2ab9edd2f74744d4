"""Content keys for token-ID and mask tensors in vLLM-Omni's prompt-embedding cache."""

from importlib import import_module
from pathlib import Path
from types import ModuleType
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


def _import(module: str) -> ModuleType:
    """Import a module of this package; where the compiled one is missing, say what to do."""
    try:
        return import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}._core":
            raise
        folder = Path(__file__).parent
        advice = "install omni-tensor-key again, with pip's --force-reinstall"
        if folder.with_name("pyproject.toml").is_file():
            advice = "this is the source folder: leave that directory, or run `pip install -e .` in it"
        raise ImportError(f"{folder} has no compiled module _core; {advice}.", name=error.name) from None


def __getattr__(name: str) -> Any:
    """Import at first use: the command line must be able to say what is wrong with an extension that cannot load."""
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("omni-tensor-key")
    elif name in ("activate", "deactivate", "is_active", "stats"):
        value = getattr(_import("plugin"), name)
    elif name in __all__:
        value = getattr(_import("keys"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
