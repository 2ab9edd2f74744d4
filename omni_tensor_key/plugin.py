"""Activation: the entry point that vLLM-Omni calls in each of its processes, and the public switches."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
import types
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wrapt

from .errors import ContractMismatch
from .settings import logger, settings

if TYPE_CHECKING:
    from .upstream.patches import Patches

_CACHE = "vllm_omni.diffusion.cache.prompt_embed_cache"
_MODULES = (_CACHE, "vllm_omni.diffusion.lora.manager", "vllm_omni.diffusion.worker.diffusion_worker")

_lock = threading.RLock()
_patches: dict[str, Patches] = {}  # by the name of the module
_imported: set[str] = set()  # of these three, those whose import has ended
_wanted = False


@functools.cache  # once for each difference
def _stand_down(difference: str) -> None:
    try:
        release = f"vllm-omni {version('vllm-omni')}"
    except PackageNotFoundError:
        release = "this vllm-omni"
    logger.warning(
        "omni_tensor_key stands down: %s: %s. Nothing is replaced; calls with tensor arguments go on as before.",
        release,
        difference,
    )


def _in_place(name: str) -> Any:
    """Return the patches of the module that is imported under this name now, or None."""
    patches = _patches.get(name)
    return patches if patches and patches.is_of_imported_module() and patches.changed_since() is None else None


def _make_patches(module: types.ModuleType) -> Patches:
    # Imported here: a process without diffusion needs none of it.
    from .upstream.lora_manager import LoraPatches
    from .upstream.prompt_cache import CachePatches
    from .upstream.worker import WorkerPatches

    if module.__name__ != _CACHE:
        return LoraPatches(module) if "lora" in module.__name__ else WorkerPatches(module, stats)
    patches = CachePatches(module)
    logger.info(
        "omni_tensor_key %s is active: encode_prompt() calls with token-ID and mask tensors of up to %d bytes are "
        "cacheable.",
        version("omni-tensor-key"),
        settings().max_bytes,
    )
    return patches


def _patch_all() -> None:
    """Patch the modules that are imported: the cache module first, or none."""
    with _lock:
        try:
            for name in _MODULES if _wanted else ():
                module = sys.modules.get(name)
                if module is None or name not in _imported or _in_place(name) is not None:
                    continue
                if name in _patches:  # the module was reloaded or imported anew since
                    _patches.pop(name).restore()
                _patches[name] = _make_patches(module)
        except BaseException as error:
            _restore()
            if not isinstance(error, ContractMismatch):
                raise
            _stand_down(str(error))


def _restore() -> None:
    global _wanted
    _wanted = False
    while _patches:
        _patches.popitem()[1].restore()


def _on_import(module: types.ModuleType) -> None:
    """Never raises: it runs inside the import of `module`."""
    _imported.add(module.__name__)
    try:
        _patch_all()
    except Exception:
        logger.exception("omni_tensor_key could not be activated; nothing is replaced.")


@functools.cache
def _hook_imports() -> None:
    """Patch each module when its import ends; warn where the cache module can never be imported."""
    spec = importlib.util.find_spec("vllm_omni")
    places = spec.submodule_search_locations if spec else None
    if not places:
        _stand_down("it is not installed")
    elif not any(list(Path(place, "diffusion", "cache").glob("prompt_embed_cache.*")) for place in places):
        _stand_down(
            "it has no prompt-embedding cache (diffusion/cache/prompt_embed_cache.py); 0.22 is the first with one"
        )
    for name in _MODULES:
        wrapt.register_post_import_hook(_on_import, name)  # called at once if it is imported already


def activate() -> None:
    """Make calls with tensor arguments cacheable in this process.

    If vLLM-Omni's cache module is not imported yet, this happens when it is. Idempotent. Where the module differs from
    what this package relies on, one warning says how and nothing is replaced. `OMNI_TENSOR_KEY=0` makes this a no-op.
    Not for use beside running calls of `encode_prompt()`.
    """
    global _wanted
    if not settings().enabled:
        logger.info("omni_tensor_key is off: OMNI_TENSOR_KEY=0.")
        return
    with _lock:
        _wanted = True
    _hook_imports()
    _patch_all()


def deactivate() -> None:
    """Put upstream's own functions back and empty the guarded caches.

    Calls with tensors bypass the cache again. Raises RuntimeError, and changes nothing, where other code has replaced
    the same functions since. Not for use beside running calls of `encode_prompt()`.
    """
    with _lock:
        for patches in _patches.values():
            changed = patches.changed_since() if patches.is_of_imported_module() else None
            if changed is not None:
                raise RuntimeError(
                    f"{changed} was replaced by other code after omni_tensor_key was activated; undo that first"
                )
        _restore()


def is_active() -> bool:
    """Return whether this package's functions are in place in this process."""
    return _in_place(_CACHE) is not None


def stats() -> dict[str, Any]:
    """Return this process's counters, by pipeline; what is not counted is absent.

    "bypassed": calls that were not keyed, by argument (empty: no one argument) and reason. "cleared": how often a cache
    lost its entries, by cause. "not_stored": outputs that were not stored, by reason. "verified", "differed": hits that
    ran the encoder again, and those among them whose stored output was another. "bytes": of memory that the tensors of
    the entries keep alive.
    """
    patches = _in_place(_CACHE)
    return {} if patches is None else dict(patches.stats())


def register() -> None:
    """Activate, as the entry point in the group `vllm_omni.general_plugins`; never raises."""
    try:
        activate()
    except Exception:
        logger.exception("omni_tensor_key could not be activated; nothing was replaced.")
