"""vLLM-Omni's diffusion worker: sleep and wake-up, and the cache's counters and `clear()` within reach of an RPC."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from ..settings import logger
from .patches import Patches
from .prompt_cache import GuardedPromptEmbedCache


def _cache_of(worker: Any) -> Any:
    runner = getattr(worker, "model_runner", None)
    cache = getattr(runner, "prompt_embed_cache", None)
    # Or one that was installed on the pipeline without the runner.
    return cache if cache is not None else getattr(getattr(runner, "pipeline", None), "_prompt_embed_cache", None)


def _clear(worker: Any, cause: str) -> None:
    cache = _cache_of(worker)
    if isinstance(cache, GuardedPromptEmbedCache) and cache.guard is not None:
        cache.guard.invalidate(cause)
    elif cache is not None:
        cache.clear()


def _clearing_sleep(sleep: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sleep)
    def clear_and_sleep(worker: Any, *args: Any, **kwargs: Any) -> Any:
        # Before: entries live outside the pool that sleep frees. What this raises stops the sleep.
        _clear(worker, "sleep")
        return sleep(worker, *args, **kwargs)

    return clear_and_sleep


def _clearing_wake_up(wake_up: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wake_up)
    def wake_up_and_clear(worker: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return wake_up(worker, *args, **kwargs)
        finally:
            # After level 2 the weights are not there until they are loaded again.
            _clear(worker, "wake-up")

    return wake_up_and_clear


class WorkerPatches(Patches):
    """DiffusionWorker's methods.

    Where the class is another one, sleep is not hooked and one warning says so.
    """

    def __init__(self, module: types.ModuleType, stats: Callable[[], dict[str, Any]]) -> None:
        """stats: the counters of `omni_tensor_key.stats()`."""
        super().__init__()
        worker_class = getattr(module, "DiffusionWorker", None)
        if not inspect.isclass(worker_class):
            worker_class = object
        for name, clearing in {"sleep": _clearing_sleep, "wake_up": _clearing_wake_up}.items():
            method = vars(worker_class).get(name)
            if inspect.isfunction(method):
                self.replace(worker_class, name, clearing(method))
            else:
                logger.warning(
                    "omni_tensor_key: %s has no method DiffusionWorker.%s: prompt-embedding caches are not emptied "
                    "there; call clear_prompt_embed_cache.",
                    module.__name__,
                    name,
                )
        if worker_class is object:
            return

        def get_prompt_embed_cache_stats(self: Any) -> dict[str, Any] | None:
            """Return the cache's counters, or None where this worker has no prompt-embedding cache.

            "bytes": how many bytes of tensors the entries keep alive. Under the key "omni_tensor_key" are the counters
            of `omni_tensor_key.stats()`, of the worker's process.
            """
            cache = _cache_of(self)
            if cache is None:
                return None
            size = {"bytes": cache.nbytes()} if isinstance(cache, GuardedPromptEmbedCache) else {}
            return {**cache.stats(), **size, "omni_tensor_key": stats()}

        def clear_prompt_embed_cache(self: Any) -> None:
            """Drop all cached prompt embeddings of this worker."""
            _clear(self, "clear_prompt_embed_cache")

        for call in (get_prompt_embed_cache_stats, clear_prompt_embed_cache):
            if not hasattr(worker_class, call.__name__):
                self.replace(worker_class, call.__name__, call)
