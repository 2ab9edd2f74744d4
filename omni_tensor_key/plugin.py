"""Activation: the entry point that vLLM-Omni calls in each of its processes, and the public switches."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import types
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import wrapt

from .contract import MODULE, ContractMismatch
from .key import backend_description
from .log import logger
from .settings import settings
from .upstream import Replacement


class _State:
    """The process's activation. Guarded by `lock`, which is never held while a module is imported: an import may be
    waiting for it, in the hook, on another thread.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted = False
        self.hooked = False
        self.warnings: set[str] = set()
        self.replacement: Replacement | None = None


_state = _State()


def _upstream_version() -> str:
    try:
        return f"vllm-omni {version('vllm-omni')}"
    except PackageNotFoundError:
        return "this vllm-omni"


def _stand_down(difference: str) -> None:
    if difference not in _state.warnings:
        _state.warnings.add(difference)
        logger.warning(
            "omni_tensor_key stands down: %s: %s. Nothing was replaced; calls with tensor arguments go on as before.",
            _upstream_version(),
            difference,
        )


def _replace_in(module: types.ModuleType) -> None:
    """Replace the module's functions if that is wanted and not done. Never raises: it runs inside an import."""
    with _state.lock:
        if not _state.wanted or (_state.replacement is not None and _state.replacement.in_place()):
            return
        _state.replacement = None
        try:
            _state.replacement = Replacement(module)
        except ContractMismatch as mismatch:
            _stand_down(str(mismatch))
        except Exception as error:
            _stand_down(f"{type(error).__name__}: {error}")
            logger.debug("omni_tensor_key could not be activated", exc_info=True)
        else:
            logger.info(
                "omni_tensor_key %s is active: encode_prompt() calls with token-ID and mask tensors of up to %d bytes "
                "are cacheable (%s, %s).",
                version("omni-tensor-key"),
                settings().max_bytes,
                backend_description(),
                _upstream_version(),
            )


def _check_presence() -> None:
    """Warn where the cache module can never be imported, so that the hook would wait for ever in silence."""
    spec = importlib.util.find_spec("vllm_omni")
    places = spec.submodule_search_locations if spec else None
    if not places:
        _stand_down("it is not installed")
    elif not any(list(Path(place, "diffusion", "cache").glob("prompt_embed_cache.*")) for place in places):
        _stand_down("it has no prompt-embedding cache (diffusion/cache/prompt_embed_cache.py); 0.22 is the first with one")


def activate() -> None:
    """Make calls with tensor arguments cacheable in this process.

    If vLLM-Omni's cache module is not imported yet, this happens when it is. Idempotent. Where the module differs from
    what this package relies on, one warning says how and nothing is replaced. `OMNI_TENSOR_KEY=0` makes this a no-op.
    """
    if not settings().enabled:
        logger.info("omni_tensor_key is off: OMNI_TENSOR_KEY=0.")
        return
    with _state.lock:
        _state.wanted = True
        hooked, _state.hooked = _state.hooked, True
    if MODULE in sys.modules:
        # Waits for the import to end if another thread is in the middle of it.
        _replace_in(importlib.import_module(MODULE))
    elif not hooked:
        _check_presence()
        wrapt.register_post_import_hook(_replace_in, MODULE)


def deactivate() -> None:
    """Put upstream's own functions back; entries already cached stay, and calls with tensors bypass the cache again.

    Raises RuntimeError where other code has replaced the same functions since.
    """
    with _state.lock:
        _state.wanted = False
        if _state.replacement is not None:
            _state.replacement.restore()
            _state.replacement = None


def is_active() -> bool:
    """Whether the replaced functions are in place in this process."""
    with _state.lock:
        return _state.replacement is not None and _state.replacement.in_place()


def register() -> None:
    """The entry point in the group `vllm_omni.general_plugins`: `activate()` that never raises."""
    try:
        activate()
    except Exception:
        logger.exception("omni_tensor_key could not be activated; nothing was replaced.")
