"""This package's part in vLLM-Omni's prompt-embedding cache: what is replaced in the module, and the caches watched."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from . import backend, inner_cache
from .bypass import on_bypass
from .contract import check_contract, has_known_rules
from .debug import Fingerprints
from .host_copy import to_host
from .log import logger
from .outputs import NOT_STORABLE, without_aliases
from .patches import Patches
from .settings import settings
from .watch import Watch, attach, detach, watch_of
from .weights import WeightDoors

# Where upstream imports install_prompt_embed_cache by name.
_IMPORTERS = ("vllm_omni.diffusion.cache", "vllm_omni.diffusion.worker.diffusion_model_runner")


class CacheDoor(Patches):
    """This package's functions in the place of upstream's, in one module.

    Raises ContractMismatch, and leaves the module as it is, where it differs from what this package relies on.
    """

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__()
        check_contract(module)
        upstream: Any = module
        self.tensors_only = not has_known_rules(module)
        self._cache_class: Any = upstream.PromptEmbedCache
        self._miss = upstream._CACHE_MISS
        self._watches: set[Watch] = set()
        self._orphans: weakref.WeakSet[Any] = weakref.WeakSet()
        self._attaching = threading.RLock()  # a finalizer that runs meanwhile may install a cache too
        self._closed = False
        self._install: Any = self  # what is in the place of upstream's, once it is
        self._fingerprints = Fingerprints() if settings().debug else None
        self.builder = backend.KeyBuilder(
            upstream._hashable,
            upstream._build_key,
            upstream._NOT_HASHABLE,
            upstream._PRECOMPUTED_EMBED_ARGS,
            to_host,
            settings().max_bytes,
            on_bypass,
            self.tensors_only,
        )
        try:
            self._replace_all(upstream)
        except BaseException:
            self.abandon()
            raise

    def _replace_all(self, module: Any) -> None:
        install = module.install_prompt_embed_cache
        self._install = watched_install = self._watched_install(install)
        self.replace(self._cache_class, "get", self._guarded_get(self._cache_class.get))
        self.replace(self._cache_class, "put", self._guarded_put(self._cache_class.put))
        self.replace(module, "install_prompt_embed_cache", watched_install)
        for importer in map(sys.modules.get, _IMPORTERS):
            if importer is not None and vars(importer).get("install_prompt_embed_cache") is install:
                self.replace(importer, "install_prompt_embed_cache", watched_install)
        # Last: from here on calls with tensors are keyed, and everything that guards their entries is in place.
        self.replace(module, "_hashable", self.builder.hashable)
        self.replace(module, "_build_key", self.builder.build_key)

    def _watch(self, pipeline: Any, cache: Any) -> None:
        try:
            self._attach(pipeline, cache)
        except Exception as error:
            self._give_up(type(pipeline).__name__, cache, error)

    def _give_up(self, name: str, cache: Any, error: Exception) -> None:
        self._orphans.add(cache)
        logger.warning(
            "omni_tensor_key: %s cannot be watched for changed weights (%s), so its calls with tensors are not cached.",
            name,
            error,
        )

    def _attach(self, pipeline: Any, cache: Any) -> None:
        with self._attaching:
            # A call that began before the extension was deactivated may come here after it.
            if self._closed or watch_of(cache) is not None:
                return
            self.watches()  # drops those whose pipeline is gone
            earlier = watch_of(pipeline)
            if earlier is not None and earlier.pipeline is pipeline:  # and not one of which the pipeline is a copy
                earlier.close("its cache was uninstalled")
                self._unwatch(earlier)
            watch = Watch(pipeline, cache)
            watch.doors = WeightDoors(watch)
            self._watches.add(watch)
            try:
                if cache.stats()["size"] > 0:
                    cache.clear()  # nobody has watched what its entries were made with, or whether they alias an input
                inner_cache.put_out_of_use(pipeline)
                attach(watch)  # last: other threads find a watch that is complete
            except BaseException:
                self._unwatch(watch)
                raise

    def _adopt(self, cache: Any, caller: types.FrameType) -> Watch | None:
        """Watch a cache that was installed before this package came, or behind its back, when it is first asked."""
        if self._closed or cache in self._orphans or "encode_fn" not in caller.f_locals:
            return None
        pipeline = _owner(caller.f_locals["encode_fn"], cache)
        if pipeline is not None:
            self._watch(pipeline, cache)
            return watch_of(cache)
        self._orphans.add(cache)
        logger.debug("omni_tensor_key: a prompt-embedding cache has no pipeline to watch; tensors are not keyed in it.")
        return None

    def _unwatch(self, watch: Watch) -> None:
        self._watches.discard(watch)
        detach(watch)
        inner_cache.put_back(watch.pipeline)
        if watch.doors is not None:
            watch.doors.remove()

    def watches(self) -> list[Watch]:
        """The watches of the pipelines that still exist."""
        watches = list(self._watches)
        for watch in watches:
            if watch.pipeline is None:
                self._unwatch(watch)
        return [watch for watch in watches if watch.pipeline is not None]

    def _watched_install(self, install: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(install)
        def install_and_watch(pipeline: Any, *args: Any, **kwargs: Any) -> Any:
            cache = install(pipeline, *args, **kwargs)
            if cache is not None:
                self._watch(pipeline, cache)
            return cache

        return install_and_watch

    def _guarded_get(self, get: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        miss, fingerprints = self._miss, self._fingerprints

        @functools.wraps(get)
        def guarded_get(cache: Any, key: Any) -> Any:
            watch = watch_of(cache) or self._adopt(cache, sys._getframe(1))
            if watch is None:
                return get(cache, key)
            try:
                watch.before_get()
            except Exception as error:
                watch.invalidate("a part of the pipeline cannot be watched")
                self._unwatch(watch)
                self._give_up(watch.name, cache, error)
                return get(cache, key)
            value = get(cache, (watch.token, key))
            if value is miss:
                watch.after_miss(key)
            elif fingerprints is not None:
                fingerprints.check(watch, key, value)
            return value

        return guarded_get

    def _guarded_put(self, put: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
        fingerprints = self._fingerprints

        @functools.wraps(put)
        def guarded_put(cache: Any, key: Any, value: Any) -> None:
            watch = watch_of(cache)
            sources = backend.sources(key)
            if sources is not None:
                if watch is None:
                    return  # nobody would notice changed weights; _watch() or _adopt() has said so
                value = without_aliases(value, sources)
                if value is NOT_STORABLE:
                    logger.debug(
                        "omni_tensor_key: an output of %s may refer to an input and is not stored.", watch.name
                    )
                    watch.store(key, lambda: None)  # its miss is over
                    return
            if watch is None:
                put(cache, key, value)
                return
            if fingerprints is not None:
                fingerprints.take(watch, key, value)
            watch.store(key, lambda: put(cache, (watch.token, key), value))

        return guarded_put

    def stats(self) -> dict[str, Any]:
        """The counters of `omni_tensor_key.stats()`."""
        counted: dict[str, Any] = {}
        for (pipeline, argument, reason), count in self.builder.bypassed().items():
            by_argument = counted.setdefault("bypassed", {}).setdefault(pipeline, {})
            by_argument.setdefault(argument, {})[reason] = count
        for watch in self.watches():
            for cause, count in dict(watch.cleared).items():  # a copy: other threads count on
                by_cause = counted.setdefault("cleared", {}).setdefault(watch.name, {})
                by_cause[cause] = by_cause.get(cause, 0) + count
        return counted

    def cache_stats(self) -> list[tuple[str, dict[str, Any]]]:
        """The counters of each watched cache, with its pipeline's name."""
        mine = {"omni_tensor_key": self.stats()}
        found = [(watch.name, getattr(watch.pipeline, "_prompt_embed_cache", None)) for watch in self.watches()]
        return [(name, {**cache.stats(), **mine}) for name, cache in found if cache is not None]

    def _put_back_imported(self) -> None:
        """Put upstream's function back where it was imported by name while another was in its place."""
        for importer in filter(None, map(sys.modules.get, _IMPORTERS)):
            names: Any = vars(importer)
            if names.get("install_prompt_embed_cache") is self._install:
                names["install_prompt_embed_cache"] = self._install.__wrapped__

    def abandon(self) -> None:
        """Put upstream's own attributes back and stop watching.

        The entries are dropped: nobody would notice changed weights from here on. For the same reason, whoever still
        has one of this package's functions gets upstream's keys from it.
        """
        with self._attaching:
            self._closed = True
        watches = list(self._watches)
        with contextlib.ExitStack() as steps:  # the last one first, and all of them, whatever one raises
            for watch in watches:
                steps.callback(self._unwatch, watch)
            steps.callback(self._put_back_imported)
            steps.callback(super().abandon)
            # After the entries are gone: keys that cease to be equal in the middle of a lookup would make it fail.
            steps.callback(self.builder.close)
            for watch in watches:
                steps.callback(watch.close, "deactivate")


def _owner(method: Any, cache: Any) -> Any:
    """The pipeline whose encode_prompt() this is, through decorators, if the cache is the pipeline's; or None."""
    # Not by gc.get_referrers(): it has tuples that other threads are still filling, which fail with a SystemError there
    # when somebody else refers to them, and lacks what gc.freeze() has put aside.
    for _ in range(100):  # a decorator may say that it wraps itself
        owner = getattr(method, "__self__", None)
        if getattr(owner, "__dict__", {}).get("_prompt_embed_cache") is cache:
            return owner
        method = getattr(method, "__wrapped__", None)
    return None
