"""Activation: the entry point that vLLM-Omni calls in each of its processes, and the public switches."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wrapt

from . import modules
from .errors import ContractMismatch
from .log import logger
from .settings import settings

if TYPE_CHECKING:
    from .patches import Patches

# What is done in the modules this package has a part in, in the order of need: where the first is not as expected,
# nothing is done in the others, and where one of the others is not, nothing stays done in the first. By name: imported
# with the module in question, so that a process without diffusion pays for none of it.
_DOORS = {
    modules.CACHE: ("upstream", "CacheDoor"),
    modules.LORA: ("workers", "LoraDoor"),
    modules.WORKER: ("workers", "WorkerDoor"),
}


class _State:
    """The process's activation.

    Who changes it holds `lock`; not while a module of vLLM-Omni is imported: an import may be waiting for it, in the
    hook, on another thread; nor while something is logged: a handler may wait for it. A finalizer that runs meanwhile
    may switch too: hence a lock that its own thread can take again. Who only asks does not take it: a finalizer or a
    handler on another thread may hold what the switch waits for.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.wanted = False
        self.hooked = False
        self.ready: dict[str, Callable[[], Patches]] = {}  # of each imported module, what does this package's part
        self.doors: dict[str, Patches] = {}
        self.warnings: set[str] = set()
        self.unsaid: deque[tuple[int, str, tuple[object, ...]]] = deque()

    @property
    def active(self) -> bool:
        doors = dict(self.doors)
        return modules.CACHE in doors and all(door.in_place() for door in doors.values())


_state = _State()
# A child that is forked while another thread switches would have this lock taken for ever, and half of the doors. Who
# forks while another thread encodes or loads is in the same trouble with upstream's own locks.
os.register_at_fork(before=_state.lock.acquire, after_in_parent=_state.lock.release, after_in_child=_state.lock.release)


def _upstream_version() -> str:
    try:
        return f"vllm-omni {version('vllm-omni')}"
    except PackageNotFoundError:
        return "this vllm-omni"


def _say(level: int, text: str, *arguments: object) -> None:
    """Log a line as soon as the lock is free."""
    _state.unsaid.append((level, text, arguments))


def _speak() -> None:
    while _state.unsaid:
        with contextlib.suppress(IndexError):  # another thread says it
            level, text, arguments = _state.unsaid.popleft()
            logger.log(level, text, *arguments)


def _stand_down(difference: str) -> None:
    if difference not in _state.warnings:
        _state.warnings.add(difference)
        _say(
            logging.WARNING,
            "omni_tensor_key stands down: %s: %s. Nothing is replaced; calls with tensor arguments go on as before.",
            _upstream_version(),
            difference,
        )


def _abandon() -> None:
    """Give up until somebody calls `activate()` again: undo what is done, as far as it is in this package's hands."""
    _state.wanted = False
    doors = list(_state.doors.values())
    _state.doors.clear()
    with contextlib.ExitStack() as steps:  # the last one first, and all of them, whatever one raises
        for door in doors:
            steps.callback(door.abandon)


def _open_doors() -> None:
    """Do this package's part in every module that is ready. The lock is held."""
    if not _state.wanted or modules.CACHE not in _state.ready:
        return
    first = modules.CACHE not in _state.doors
    try:
        for name in _DOORS:
            if name in _state.ready and name not in _state.doors:
                _state.doors[name] = _state.ready[name]()
    except BaseException as error:
        _abandon()
        if not isinstance(error, Exception):
            raise
        _stand_down(str(error) if isinstance(error, ContractMismatch) else f"{type(error).__name__}: {error}")
        return
    if first:
        from . import backend

        _say(
            logging.INFO,
            "omni_tensor_key %s is active: encode_prompt() calls with token-ID and mask tensors of up to %d bytes are "
            "cacheable (%s%s, %s).",
            version("omni-tensor-key"),
            settings().max_bytes,
            backend.DESCRIPTION,
            ", upstream's own binding" if getattr(_state.doors[modules.CACHE], "tensors_only", False) else "",
            _upstream_version(),
        )


def _on_import(module: types.ModuleType) -> None:
    """Never raises: it runs inside the import of `module`."""
    try:
        importlib.import_module(module.__name__)  # waits, where it is another thread that is still at it
        home, door = _DOORS[module.__name__]
        open_door = getattr(importlib.import_module(f".{home}", __package__), door)
        with _state.lock:
            _state.ready[module.__name__] = functools.partial(open_door, module)
            _open_doors()
        _speak()
    except Exception:
        with _state.lock:
            _abandon()
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
    """
    if not settings().enabled:
        logger.info("omni_tensor_key is off: OMNI_TENSOR_KEY=0.")
        return
    with _state.lock:
        _state.wanted = True
    if not _state.hooked:
        _check_presence()
        for name in _DOORS:
            wrapt.register_post_import_hook(_on_import, name)  # at once if it is imported already
            # Another thread may have begun to import it before there was a hook, which nobody calls then: wait for it.
            importlib._bootstrap._lock_unlock_module(name)  # type: ignore[attr-defined]
            if name in sys.modules and name not in _state.ready:
                _on_import(sys.modules[name])
        _state.hooked = True  # last: a child that is forked before has to do it again, which does no harm
    else:
        with _state.lock:
            _open_doors()
    _speak()


def deactivate() -> None:
    """Put upstream's own functions back and drop the entries of the watched caches.

    Calls with tensors bypass the cache again. Raises RuntimeError, and changes nothing, where other code has replaced
    the same functions since. Not to be called from a finalizer: it waits for locks that a thread may hold which drops
    an entry.
    """
    with _state.lock:
        for door in _state.doors.values():
            door.check_restorable()
        _abandon()


def is_active() -> bool:
    """Whether this package's functions are in place in this process."""
    return _state.active


def stats() -> dict[str, Any]:
    """Return this process's counters.

    "bypassed": calls that were not keyed, by pipeline, argument and reason; an empty argument is an unknown one.
    "cleared": how often a watched cache lost its entries, by pipeline and cause. What is not counted is absent.
    """
    cache: Any = _state.doors.get(modules.CACHE)
    return {} if cache is None else cache.stats()


def cache_stats() -> list[tuple[str, dict[str, Any]]]:
    """Each watched cache's pipeline, by name, and what its worker's `get_prompt_embed_cache_stats` returns."""
    cache: Any = _state.doors.get(modules.CACHE)
    return [] if cache is None else cache.cache_stats()


def register() -> None:
    """The entry point in the group `vllm_omni.general_plugins`: `activate()` that never raises."""
    try:
        activate()
    except Exception:
        logger.exception("omni_tensor_key could not be activated; nothing was replaced.")
