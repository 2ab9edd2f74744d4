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
_LORA = "vllm_omni.diffusion.lora.manager"
_WORKER = "vllm_omni.diffusion.worker.diffusion_worker"

_lock = threading.RLock()
_patches: dict[str, tuple[types.ModuleType, Patches]] = {}  # by name: the module they were made for, and what was done
_imported: set[str] = set()  # of these three, those whose import has ended
_wanted = False
_hooked = False


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
    module, patches = _patches.get(name, (None, None))
    is_there = patches is not None and module is sys.modules.get(name) and patches.changed_since() is None
    return patches if is_there else None


def _patch(name: str) -> None:
    # Imported here: a process without diffusion needs none of it.
    from .upstream.lora_manager import LoraPatches
    from .upstream.prompt_cache import CachePatches
    from .upstream.worker import WorkerPatches

    module = sys.modules.get(name)
    if module is None or name not in _imported or _in_place(name) is not None:
        return
    if name in _patches:  # the module was reloaded or imported anew since
        _patches.pop(name)[1].restore()
    if name == _CACHE:
        _patches[name] = (module, CachePatches(module))
        logger.info(
            "omni_tensor_key %s is active: encode_prompt() calls with token-ID and mask tensors of up to %d bytes are "
            "cacheable.",
            version("omni-tensor-key"),
            settings().max_bytes,
        )
    else:
        _patches[name] = (module, LoraPatches(module) if name == _LORA else WorkerPatches(module, stats))


def _patch_all() -> None:
    """Do this package's part in the modules that are imported: in the cache module first, or in none."""
    with _lock:
        try:
            if _wanted:
                for name in (_CACHE, _LORA, _WORKER):
                    _patch(name)
        except BaseException as error:
            _restore()
            if not isinstance(error, ContractMismatch):
                raise
            _stand_down(str(error))


def _restore() -> None:
    global _wanted
    _wanted = False
    while _patches:
        _patches.popitem()[1][1].restore()


def _on_import(module: types.ModuleType) -> None:
    """Never raises: it runs inside the import of `module`."""
    _imported.add(module.__name__)
    try:
        _patch_all()
    except Exception:
        logger.exception("omni_tensor_key could not be activated; nothing is replaced.")


def _check_presence() -> None:
    """Warn where the cache module can never be imported, so that the hook would wait for ever in silence."""
    spec = importlib.util.find_spec("vllm_omni")
    places = spec.submodule_search_locations if spec else None
    if not places:
        _stand_down("it is not installed")
    elif not any(list(Path(place, "diffusion", "cache").glob("prompt_embed_cache.*")) for place in places):
        _stand_down(
            "it has no prompt-embedding cache (diffusion/cache/prompt_embed_cache.py); 0.22 is the first with one"
        )


def activate() -> None:
    """Make calls with tensor arguments cacheable in this process.

    If vLLM-Omni's cache module is not imported yet, this happens when it is. Idempotent. Where the module differs from
    what this package relies on, one warning says how and nothing is replaced. `OMNI_TENSOR_KEY=0` makes this a no-op.
    Not for use beside running calls of `encode_prompt()`.
    """
    global _hooked, _wanted
    if not settings().enabled:
        logger.info("omni_tensor_key is off: OMNI_TENSOR_KEY=0.")
        return
    with _lock:
        _wanted, first, _hooked = True, not _hooked, True
    if first:
        _check_presence()
        for name in (_CACHE, _LORA, _WORKER):
            wrapt.register_post_import_hook(_on_import, name)  # called at once if it is imported already
    _patch_all()


def deactivate() -> None:
    """Put upstream's own functions back and empty the guarded caches.

    Calls with tensors bypass the cache again. Raises RuntimeError, and changes nothing, where other code has replaced
    the same functions since. Not for use beside running calls of `encode_prompt()`.
    """
    with _lock:
        for name, (module, patches) in _patches.items():
            changed = patches.changed_since() if module is sys.modules.get(name) else None
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
