"""The ways in which cached embeddings become stale or costly on the worker's side: LoRA adapters, sleep and wake-up.

Both hooks are installed when vLLM-Omni imports the module in question, and both are absent in a process that never
serves diffusion.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from . import metrics
from .errors import ContractMismatch
from .patches import Patches, bound
from .watch import Watch, watch_of


def _own_methods(module: types.ModuleType, class_name: str, names: list[str]) -> Any:
    cls = getattr(module, class_name, None)
    for name in names:
        if not isinstance(vars(cls).get(name) if isinstance(cls, type) else None, types.FunctionType):
            raise ContractMismatch(f"{module.__name__} has no method {class_name}.{name}")
    return cls


def _text_lora(manager: Any, watch: Watch) -> object:
    """What is active of the adapters that reach text-encoding modules; two equal answers mean that nothing changed."""
    try:
        names = tuple(name for name in manager._lora_modules if not watch.generates(name))
        if not names:
            return None
        active = manager._active_adapter_id
        # The adapter's own identity too: another one may have been loaded under the same id.
        model = manager._registered_adapters.get(active)
        return (names, active, manager._adapter_scales.get(active), None if model is None else weakref.ref(model))
    except (AttributeError, TypeError):
        return object()  # another kind of manager: equal to nothing


def _watched_adapter_change(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def change(manager: Any, *args: Any, **kwargs: Any) -> Any:
        watch = watch_of(getattr(manager, "pipeline", None))
        if watch is None:
            return method(manager, *args, **kwargs)
        before, failed = _text_lora(manager, watch), True
        try:
            result = method(manager, *args, **kwargs)
            failed = False
            return result
        finally:
            after = _text_lora(manager, watch)
            # A failed change may have left other weights behind, or had them there for a while.
            if after != before or (failed and after is not None):
                watch.invalidate("a LoRA adapter of a text encoder changed")

    return change


class LoraDoor(Patches):
    """The LoRA manager's methods, watched. Raises ContractMismatch where it has other methods."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__()
        names = ["set_active_adapter", "add_adapter", "remove_adapter"]
        manager = _own_methods(module, "DiffusionLoRAManager", names)
        for name in names:
            self.replace(manager, name, _watched_adapter_change(vars(manager)[name]))


def _cache_of(worker: Any) -> Any:
    runner = getattr(worker, "model_runner", None)
    cache = getattr(runner, "prompt_embed_cache", None)
    # Or one that was installed on the pipeline without the runner.
    return cache if cache is not None else getattr(getattr(runner, "pipeline", None), "_prompt_embed_cache", None)


def _clear(worker: Any, cause: str) -> None:
    cache = _cache_of(worker)
    if cache is None:
        return
    watch = watch_of(cache)
    if watch is not None:
        watch.invalidate(cause)
    else:
        cache.clear()


def _watched_sleep(sleep: Any) -> Callable[..., Any]:
    @functools.wraps(sleep)
    def clear_and_sleep(worker: Any, *args: Any, **kwargs: Any) -> Any:
        # Before: entries live outside the pool that sleep frees. What this raises stops the sleep.
        _clear(worker, "sleep")
        return bound(sleep, worker, type(worker))(*args, **kwargs)

    return clear_and_sleep


def _watched_wake_up(wake_up: Any) -> Callable[..., Any]:
    @functools.wraps(wake_up)
    def wake_up_and_clear(worker: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return bound(wake_up, worker, type(worker))(*args, **kwargs)
        finally:
            # After level 2 the weights are not there until they are loaded again.
            _clear(worker, "wake-up")

    return wake_up_and_clear


_WATCHED = {"sleep": _watched_sleep, "wake_up": _watched_wake_up}


def _get_stats(self: Any) -> dict[str, Any] | None:
    """Return the cache's counters, or None where this worker has no prompt-embedding cache.

    Under the key "omni_tensor_key" are the counters of `omni_tensor_key.stats()`, of the worker's process.
    """
    cache = _cache_of(self)
    if cache is None:
        return None
    from .plugin import stats  # which imports this module

    return {**cache.stats(), "omni_tensor_key": stats()}


def _clear_cache(self: Any) -> None:
    """Drop all cached prompt embeddings of this worker."""
    _clear(self, "clear_prompt_embed_cache")


class WorkerDoor(Patches):
    """DiffusionWorker's sleep and wake-up, watched, and the two calls that `collective_rpc` cannot reach otherwise.

    Raises ContractMismatch where the class has other methods.
    """

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__()
        worker_class = _own_methods(module, "DiffusionWorker", ["__init__", "sleep", "wake_up"])
        self._lock = threading.Lock()
        self._closed = False
        initialize = vars(worker_class)["__init__"]

        @functools.wraps(initialize)
        def watch_and_initialize(worker: Any, *args: Any, **kwargs: Any) -> None:
            self._watch(type(worker))
            initialize(worker, *args, **kwargs)

        self._stop_metrics = metrics.register(self._read_stats)
        try:
            self.replace(worker_class, "__init__", watch_and_initialize)
            calls = {"get_prompt_embed_cache_stats": _get_stats, "clear_prompt_embed_cache": _clear_cache}
            for name, method in calls.items():
                if not hasattr(worker_class, name):
                    self.add(worker_class, name, method)
            self._watch_with_subclasses(worker_class)
        except BaseException:
            self.abandon()
            raise

    def _watch_with_subclasses(self, cls: type[Any]) -> None:
        self._watch(cls)
        for subclass in cls.__subclasses__():
            self._watch_with_subclasses(subclass)

    def _watch(self, cls: type) -> None:
        """Watch the methods of a class, also those of a worker extension that comes before DiffusionWorker."""
        with self._lock:
            for name, watched in _WATCHED.items():
                method = inspect.getattr_static(cls, name)
                if self._closed or any(method is new for *_, new in self._replaced):
                    continue
                if name in vars(cls):
                    self.replace(cls, name, watched(method))
                else:
                    self.add(cls, name, watched(method))

    def _read_stats(self) -> list[tuple[str, dict[str, Any]]]:
        from .plugin import cache_stats  # which imports this module

        return cache_stats()

    def abandon(self) -> None:
        """Put the classes' own methods back."""
        with self._lock:
            self._closed = True
            super().abandon()
        self._stop_metrics()
