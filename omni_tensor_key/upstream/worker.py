"""vLLM-Omni's diffusion worker: sleep and wake-up, and the cache's counters and `clear()` within reach of an RPC."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from ..settings import logger
from .guarded_cache import GuardedPromptEmbedCache
from .patches import Patches

_CLEARING = ("sleep", "wake_up")


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


def _clearing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Empty the cache before sleep, for entries live outside the pool that sleep frees, and after wake-up, for after
    level 2 the weights are not there until they are loaded again."""

    @functools.wraps(method)
    def clear_and_call(worker: Any, *args: Any, **kwargs: Any) -> Any:
        _clear(worker, method.__name__)
        try:
            return method(worker, *args, **kwargs)
        finally:
            _clear(worker, method.__name__)

    clear_and_call._clears = True  # type: ignore[attr-defined]
    return clear_and_call


class WorkerPatches(Patches):
    """The methods of DiffusionWorker and its subclasses; where it has others, sleep is not hooked, which is logged.

    stats: the counters of `omni_tensor_key.stats()`.
    """

    def __init__(self, module: types.ModuleType, stats: Callable[[], dict[str, Any]]) -> None:
        super().__init__(module)

        def get_prompt_embed_cache_stats(self: Any) -> dict[str, Any] | None:
            """Return the cache's counters, or None where this worker has no prompt-embedding cache.

            "bytes": how many bytes of memory the tensors of the entries keep alive. "omni_tensor_key": the counters of
            `omni_tensor_key.stats()`, of the worker's process.
            """
            cache = _cache_of(self)
            if cache is None:
                return None
            size = {"bytes": cache.nbytes()} if isinstance(cache, GuardedPromptEmbedCache) else {}
            return {**cache.stats(), **size, "omni_tensor_key": stats()}

        def clear_prompt_embed_cache(self: Any) -> None:
            """Drop all cached prompt embeddings of this worker."""
            _clear(self, "clear_prompt_embed_cache")

        worker_class = getattr(module, "DiffusionWorker", None)
        methods = dict(vars(worker_class)) if inspect.isclass(worker_class) else {}
        for call in (get_prompt_embed_cache_stats, clear_prompt_embed_cache):
            if methods and not hasattr(worker_class, call.__name__):
                self.replace(worker_class, call.__name__, call)
        missing = [name for name in _CLEARING if not inspect.isfunction(methods.get(name))]
        if missing:
            logger.warning(
                "omni_tensor_key: %s has no DiffusionWorker with %s() to hook: prompt-embedding caches are not emptied "
                "then.",
                module.__name__,
                "() and ".join(missing),
            )
            return

        def hook_subclass(cls: Any, /, **options: Any) -> None:
            super(worker_class, cls).__init_subclass__(**options)  # type: ignore[arg-type]
            self._hook(cls)

        self.replace(worker_class, "__init_subclass__", classmethod(hook_subclass))
        self._hook(worker_class)

    def _hook(self, cls: Any) -> None:
        """Hook a class and its subclasses: a worker extension comes before DiffusionWorker and may call no other."""
        for name in _CLEARING:
            method = inspect.getattr_static(cls, name)
            if inspect.isfunction(method) and not hasattr(method, "_clears"):
                self.replace(cls, name, _clearing(method))
        for subclass in cls.__subclasses__():
            self._hook(subclass)
