"""Content keys for token-ID and mask tensors in vLLM-Omni's prompt-embedding cache."""

from importlib import import_module
from pathlib import Path
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


def _load_core() -> None:
    """Load the compiled module; where it is missing, say what to do."""
    try:
        import_module("._core", __name__)
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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("omni-tensor-key")
    else:
        _load_core()
        in_plugin = name in ("activate", "deactivate", "is_active", "stats")
        value = getattr(import_module(".plugin" if in_plugin else ".keys", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
