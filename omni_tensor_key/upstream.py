"""This package's part in vLLM-Omni's prompt-embedding cache: what is replaced in the module, and the caches watched."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

from . import backend
from .bypass import on_bypass
from .contract import check_contract, has_known_rules
from .debug import Fingerprints
from .host_copy import to_host
from .log import logger
from .outputs import without_aliases
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
        self._doors: dict[Watch, WeightDoors] = {}
        self._orphans: weakref.WeakSet[Any] = weakref.WeakSet()
        self._attaching = threading.RLock()  # a finalizer that runs meanwhile may install a cache too
        self._closed = False
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
        install = upstream.install_prompt_embed_cache
        watched_install = self._watched_install(install)
        self.replace(self._cache_class, "get", self._guarded_get(self._cache_class.get))
        self.replace(self._cache_class, "put", self._guarded_put(self._cache_class.put))
        self.replace(module, "install_prompt_embed_cache", watched_install)
        for importer in map(sys.modules.get, _IMPORTERS):
            if importer is not None and vars(importer).get("install_prompt_embed_cache") is install:
                self.replace(importer, "install_prompt_embed_cache", watched_install)
        for pipeline, cache in _installed(self._cache_class):
            self._watch(pipeline, cache)
            cache.clear()  # nobody has watched what its entries were made with, or whether they alias an input
        # Last: from here on calls with tensors are keyed, and everything that guards their entries is in place.
        self.replace(module, "_hashable", self.builder.hashable)
        self.replace(module, "_build_key", self.builder.build_key)

    def _watch(self, pipeline: Any, cache: Any) -> None:
        try:
            self._attach(pipeline, cache)
        except Exception as error:
            logger.warning(
                "omni_tensor_key: %s cannot be watched for changed weights (%s), so its calls with tensors are not "
                "cached.",
                type(pipeline).__name__,
                error,
            )
            self._orphans.add(cache)

    def _attach(self, pipeline: Any, cache: Any) -> None:
        with self._attaching:
            # A call that began before the extension was deactivated may come here after it.
            if self._closed or watch_of(cache) is not None:
                return
            self.watches()  # drops those whose pipeline is gone
            if (earlier := watch_of(pipeline)) is not None:  # its cache was uninstalled
                self._unwatch(earlier)
            watch = attach(pipeline, cache)
            try:
                self._doors[watch] = WeightDoors(watch)
            except BaseException:
                detach(watch)
                raise

    def _adopt(self, cache: Any) -> Watch | None:
        """Watch a cache that was installed behind our back, by a function that was imported before we came."""
        if self._closed or cache in self._orphans:
            return None
        for pipeline in _owners(cache):
            self._watch(pipeline, cache)
        watch = watch_of(cache)
        if watch is None:
            self._orphans.add(cache)
            logger.debug(
                "omni_tensor_key: a prompt-embedding cache has no pipeline to watch; tensors are not keyed in it."
            )
        return watch

    def _unwatch(self, watch: Watch) -> None:
        doors = self._doors.pop(watch, None)
        if doors is not None:
            doors.remove()
        detach(watch)

    def watches(self) -> list[Watch]:
        """The watches of the pipelines that still exist."""
        watches = list(self._doors)
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
            watch = watch_of(cache) or self._adopt(cache)
            if watch is None:
                return get(cache, key)
            if watch.before_get() and (doors := self._doors.get(watch)) is not None:
                doors.hook_modules()
            value = get(cache, key)
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
            if watch is None:
                put(cache, key, value)
                return
            if fingerprints is not None:
                fingerprints.take(watch, key, value)
            watch.store(key, lambda: put(cache, key, value))

        return guarded_put

    def stats(self) -> dict[str, Any]:
        """The counters of `omni_tensor_key.stats()`."""
        counted: dict[str, Any] = {}
        for (pipeline, argument, reason), count in self.builder.bypassed().items():
            by_argument = counted.setdefault("bypassed", {}).setdefault(pipeline, {})
            by_argument.setdefault(argument, {})[reason] = count
        for watch in self.watches():
            for cause, count in watch.cleared.items():
                by_cause = counted.setdefault("cleared", {}).setdefault(watch.name, {})
                by_cause[cause] = by_cause.get(cause, 0) + count
        return counted

    def abandon(self) -> None:
        """Put upstream's own attributes back and stop watching.

        The entries are dropped: nobody would notice changed weights from here on. For the same reason, whoever still
        has one of this package's functions gets upstream's keys from it.
        """
        self.builder.close()
        super().abandon()
        with self._attaching:
            self._closed = True
        for watch in list(self._doors):
            watch.invalidate("deactivate")
            self._unwatch(watch)


def _owners(cache: Any) -> list[Any]:
    """The pipelines that the cache is installed on."""
    # Depending on the Python release, an instance or its dictionary refers to an attribute's value. Not
    # gc.get_objects(): it has tuples that other threads are still filling, who fail with a SystemError if somebody else
    # refers to them.
    referrers = gc.get_referrers(cache)
    owners = [owner for item in referrers if type(item) is dict for owner in gc.get_referrers(item)]
    found = []
    for owner in (*referrers, *owners):
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is dict and attributes.get("_prompt_embed_cache") is cache and owner not in found:
            found.append(owner)
    return found


def _installed(cache_class: type) -> list[tuple[Any, Any]]:
    """The pipelines that already have a cache, each with its cache."""
    caches = [item for item in gc.get_referrers(cache_class) if type(item) is cache_class]
    return [(pipeline, cache) for cache in caches for pipeline in _owners(cache)]
