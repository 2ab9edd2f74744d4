"""Activation: the entry point that vLLM-Omni calls in each of its processes, and the public switches."""

from __future__ import annotations

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
    from .upstream.prompt_cache import CachePatches

_CACHE = "vllm_omni.diffusion.cache.prompt_embed_cache"
_LORA = "vllm_omni.diffusion.lora.manager"
_WORKER = "vllm_omni.diffusion.worker.diffusion_worker"

# The lock is not held while a module of vLLM-Omni is imported: an import may be waiting for it, in the hook, on another
# thread. It is taken again by its own thread: what is imported under it may import a hooked module.
_lock = threading.RLock()
_wanted = False
_hooked = False
_patches: dict[str, tuple[types.ModuleType, Patches]] = {}  # by name: the module they were made for, and what was done
_reported: set[str] = set()


def _upstream_version() -> str:
    try:
        return f"vllm-omni {version('vllm-omni')}"
    except PackageNotFoundError:
        return "this vllm-omni"


def _stand_down(difference: str) -> None:
    if difference not in _reported:
        _reported.add(difference)
        logger.warning(
            "omni_tensor_key stands down: %s: %s. Nothing is replaced; calls with tensor arguments go on as before.",
            _upstream_version(),
            difference,
        )


def _cache_patches() -> CachePatches | None:
    """Return what is in place in the cache module that is there now, or None."""
    module, patches = _patches.get(_CACHE, (None, None))
    if patches is None or module is not sys.modules.get(_CACHE) or not patches.in_place():
        return None
    return patches  # type: ignore[return-value]


def _patch(name: str) -> None:
    """Do this package's part in the module of this name, if it is imported and the part is not done yet."""
    # Here: in a process without diffusion none of it is imported.
    from .upstream.lora_manager import LoraPatches
    from .upstream.prompt_cache import CachePatches
    from .upstream.worker import WorkerPatches

    module = sys.modules.get(name)
    before, patches = _patches.get(name, (None, None))
    if module is None or (module is before and patches is not None and patches.in_place()):
        return
    if patches is not None:  # of a module that was reloaded or imported anew since
        patches.restore()
    if name == _CACHE:
        made = CachePatches(module)
        _patches[name] = (module, made)
        logger.info(
            "omni_tensor_key %s is active: encode_prompt() calls with token-ID and mask tensors of up to %d bytes are "
            "cacheable (%s).",
            version("omni-tensor-key"),
            settings().max_bytes,
            _upstream_version(),
        )
    else:
        _patches[name] = (module, LoraPatches(module) if name == _LORA else WorkerPatches(module, stats))


def _patch_all() -> None:
    with _lock:
        if not _wanted:
            return
        try:
            for name in (_CACHE, _LORA, _WORKER):
                _patch(name)
        except ContractMismatch as error:
            _restore()
            _stand_down(str(error))
        except BaseException:
            _restore()
            raise


def _restore() -> None:
    global _wanted
    _wanted = False
    while _patches:
        _patches.popitem()[1][1].restore()


def _on_import(module: types.ModuleType) -> None:
    """Never raises: it runs inside the import of `module`."""
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
        _wanted = True
    if not _hooked:
        _hooked = True
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
        for module, patches in _patches.values():
            if module is sys.modules.get(module.__name__):
                patches.check_restorable()
        _restore()


def is_active() -> bool:
    """Return whether this package's functions are in place in this process."""
    return _cache_patches() is not None


def stats() -> dict[str, Any]:
    """Return this process's counters; what is not counted is absent.

    "bypassed": calls that were not keyed, by pipeline, argument and reason; an empty argument is an unknown one.
    "cleared": how often a cache lost its entries, by pipeline and cause. "not_stored": outputs that were not stored,
    by pipeline and reason. "verified", "differed": hits that ran the encoder again, and those among them whose stored
    output was another, by pipeline. "bytes": how many bytes of tensors the entries keep alive, by pipeline.
    """
    patches = _cache_patches()
    return {} if patches is None else patches.stats()


def register() -> None:
    """Activate, as the entry point in the group `vllm_omni.general_plugins`; never raises."""
    try:
        activate()
    except Exception:
        logger.exception("omni_tensor_key could not be activated; nothing was replaced.")
