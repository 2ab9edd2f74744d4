"""This package's part in vLLM-Omni's prompt-embedding cache: the guarded cache, and what is replaced in its module."""

from __future__ import annotations

import functools
import math
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..freshness import (
    NotStorableError,
    PipelineGuard,
    TorchState,
    call_state,
    difference,
    private_copy,
    tensor_bytes,
)
from ..keys import make_key_builder
from ..settings import logger, settings
from .contract import check_contract
from .patches import Patches

if TYPE_CHECKING:
    from vllm_omni.diffusion.cache.prompt_embed_cache import PromptEmbedCache as _Base
else:
    _Base = object

_caches: weakref.WeakSet[GuardedPromptEmbedCache] = weakref.WeakSet()


def guarded_caches() -> list[GuardedPromptEmbedCache]:
    """Return the caches in front of a pipeline that still exists."""
    return [cache for cache in tuple(_caches) if cache.guard is not None and cache.guard.pipeline is not None]


def has_tensors(key: Any) -> bool:
    """Return whether this is the cache key of a call with tensors, as `KeyBuilder.build_key()` makes it."""
    return type(key) is tuple and len(key) == 3 and type(key[2]) is TorchState


@dataclass
class _Miss:
    """A lookup that missed, or a hit that is verified, until its result is stored."""

    key: Any
    generation: int
    stored: Any  # what is verified, or upstream's sentinel
    output: Any = None


class GuardedPromptEmbedCache(_Base):
    """Upstream's cache, with a guard: joined with upstream's class by `CachePatches`.

    Without a pipeline to guard it is upstream's, and stores nothing for calls with tensors.
    """

    MISS: Any  # upstream's sentinel
    guard: PipelineGuard | None = None

    def attach(self, pipeline: Any, calls: EncodeCalls) -> None:
        """Guard this pipeline, whose own encode_prompt() goes through `calls`."""
        self.verified = self.differed = self._hits_seen = 0
        self.not_stored: Counter[str] = Counter()
        reference = weakref.ref(self)

        def clear() -> bool:
            cache = reference()
            had_entries = cache is not None and cache.stats()["size"] > 0
            if cache is not None:
                cache.clear()
            return had_entries

        self._calls = calls
        self.guard = calls.guard = PipelineGuard(pipeline, clear)
        _caches.add(self)

    def nbytes(self) -> int:
        """Return how many bytes of memory the tensors of the entries keep alive."""
        with self._lock:
            return sum(map(tensor_bytes, self._store.values()))

    def get(self, key: Any) -> Any:
        """Return the stored output, or upstream's sentinel, also for a hit that is to be verified."""
        guard = self.guard
        if guard is None:
            return self._refuse(None) if has_tensors(key) else super().get(key)
        guard.refresh()
        if guard.has_tuner_layers and has_tensors(key):
            return self._refuse("peft")
        value = super().get(key)
        if value is self.MISS or self._is_verified():
            self._calls.thread.miss = _Miss(key, guard.generation, value)
            return self.MISS
        return value

    def _refuse(self, reason: str | None) -> Any:
        with self._lock:
            self.bypassed += 1
        if reason is not None:
            self.not_stored[reason] += 1
        return self.MISS

    def _is_verified(self) -> bool:
        """Whether this hit is one of those that run the encoder again: a question of their count alone.

        Ranks that see the same calls decide alike; else one would enter a collective that the other does not.
        """
        share = settings().verify
        if share == 0:
            return False
        with self._lock:
            self._hits_seen += 1
            return math.floor(self._hits_seen * share) > math.floor((self._hits_seen - 1) * share)

    def put(self, key: Any, value: Any) -> None:
        """Store what the call of the last miss on this thread returned, unless something has changed since.

        value: the output as upstream has detached it.
        """
        miss = self._calls.take_finished(key) if self.guard is not None else None
        if miss is None:
            if not has_tensors(key):
                super().put(key, value)  # by somebody else than upstream's wrapper
        elif miss.stored is not self.MISS:
            self._verify(miss, value)
        else:
            self._store_fresh(miss, value)

    def _verify(self, miss: _Miss, value: Any) -> None:
        assert self.guard is not None
        with self.guard.lock:
            if self.guard.generation != miss.generation:
                return  # the weights are others now
            self.verified += 1
            found = difference(miss.stored, value)
            if found is None:
                return
            self.differed += 1
            self.guard.invalidate("verify")
        logger.error(
            "omni_tensor_key: a cached output of %s differs from what the encoder returns now: %s. The cache is "
            "emptied. See OMNI_TENSOR_KEY_VERIFY in the documentation.",
            self.guard.name,
            found,
        )

    def _store_fresh(self, miss: _Miss, value: Any) -> None:
        guard, limit = self.guard, settings().cache_bytes
        assert guard is not None
        try:
            if has_tensors(miss.key):
                value = private_copy(miss.output)
        except NotStorableError as error:
            self.not_stored[str(error)] += 1
            return
        if limit is not None and tensor_bytes(value) > limit:
            self.not_stored["cache_bytes"] += 1
            return
        with guard.lock:
            if guard.generation != miss.generation or guard.changing:
                self.not_stored["changed"] += 1
                return
            super().put(miss.key, value)
            while limit is not None and self.nbytes() > limit:
                with self._lock:
                    self._store.popitem(last=False)


class EncodeCalls:
    """A pipeline's own encode_prompt(), below upstream's wrapper.

    Sees when the encoder runs on a thread, and its output before upstream changes the type.
    """

    def __init__(self, encode_prompt: Callable[..., Any]) -> None:
        functools.update_wrapper(self, encode_prompt)
        self.encode_prompt = encode_prompt
        self.guard: PipelineGuard | None = None
        self.thread = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.guard is None:
            return self.encode_prompt(*args, **kwargs)
        # Taken here: encode_prompt() may call itself through the cache.
        miss, self.thread.miss = getattr(self.thread, "miss", None), None
        with self.guard.encoding():
            output = self.encode_prompt(*args, **kwargs)
        if miss is not None:
            miss.output = output
            self.thread.finished = miss
        return output

    def take_finished(self, key: Any) -> _Miss | None:
        """Return the miss with this very key whose call has just ended on this thread, once."""
        miss, self.thread.finished = getattr(self.thread, "finished", None), None
        return miss if miss is not None and miss.key is key else None


class CachePatches(Patches):
    """What is replaced in one instance of upstream's module.

    Raises ContractMismatch, and leaves the module as it is, where it differs from what this package relies on.
    """

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__()
        tensors_only = check_contract(module)
        upstream: Any = module
        self.bypassed: Counter[tuple[str, str, str]] = Counter()
        builder = make_key_builder(
            hashable=upstream._hashable,
            build_key=upstream._build_key,
            not_hashable=upstream._NOT_HASHABLE,
            precomputed=upstream._PRECOMPUTED_EMBED_ARGS,
            call_state=call_state,
            on_bypass=self._on_bypass,
            max_bytes=settings().max_bytes,
            tensors_only=tensors_only,
        )
        base = upstream.PromptEmbedCache
        guarded = type("GuardedPromptEmbedCache", (GuardedPromptEmbedCache, base), {"MISS": upstream._CACHE_MISS})
        install = upstream.install_prompt_embed_cache
        self._install = guarded_install = self._guarded_install(install)
        self.replace(base, "put", self._refusing_put(base.put))
        self.replace(upstream, "PromptEmbedCache", guarded)
        for importer in list(sys.modules.values()):  # those that have imported it by name
            if importer is not None and vars(importer).get("install_prompt_embed_cache") is install:
                self.replace(importer, "install_prompt_embed_cache", guarded_install)
        # Last: from here on calls with tensors are keyed.
        self.replace(upstream, "_hashable", builder.hashable)
        self.replace(upstream, "_build_key", builder.build_key)

    def _on_bypass(self, model_tag: str, argument: str, reason: str) -> None:
        self.bypassed[str(model_tag), argument, reason] += 1

    @staticmethod
    def _refusing_put(put: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(put)
        def put_without_tensors(cache: Any, key: Any, value: Any) -> None:
            # A cache from before activation has no guard, so that nobody would notice changed weights.
            if isinstance(cache, GuardedPromptEmbedCache) or not has_tensors(key):
                put(cache, key, value)

        return put_without_tensors

    @staticmethod
    def _guarded_install(install: Callable[..., Any]) -> Any:
        @functools.wraps(install)
        def install_guarded(pipeline: Any, **options: Any) -> Any:
            encode_prompt = getattr(pipeline, "encode_prompt", None)
            if not callable(encode_prompt) or getattr(pipeline, "_prompt_embed_cache", None) is not None:
                return install(pipeline, **options)
            own = encode_prompt.encode_prompt if isinstance(encode_prompt, EncodeCalls) else encode_prompt
            calls = EncodeCalls(own)
            object.__setattr__(pipeline, "encode_prompt", calls)
            cache = None
            try:
                cache = install(pipeline, **options)
            finally:
                if cache is None:
                    object.__delattr__(pipeline, "encode_prompt")
                    if pipeline.encode_prompt != own:  # it was an attribute of the instance
                        object.__setattr__(pipeline, "encode_prompt", own)
            if isinstance(cache, GuardedPromptEmbedCache):
                try:
                    cache.attach(pipeline, calls)
                except TypeError as error:
                    logger.warning(
                        "omni_tensor_key: %s cannot be guarded (%s): its calls with tensors are not cached.",
                        type(pipeline).__name__,
                        error,
                    )
            return cache

        return install_guarded

    def restore(self) -> None:
        """Put upstream's functions back and empty the guarded caches."""
        super().restore()
        for importer in list(sys.modules.values()):  # those that have imported it by name since
            if importer is not None and vars(importer).get("install_prompt_embed_cache") is self._install:
                vars(importer)["install_prompt_embed_cache"] = self._install.__wrapped__
        for cache in guarded_caches():
            assert cache.guard is not None
            cache.guard.invalidate("deactivate")

    def stats(self) -> dict[str, Any]:
        """Return the counters of `omni_tensor_key.stats()`."""
        found: dict[str, Any] = {}
        for (tag, argument, reason), count in self.bypassed.copy().items():
            found.setdefault("bypassed", {}).setdefault(tag, {}).setdefault(argument, {})[reason] = count
        for cache in guarded_caches():
            assert cache.guard is not None
            name = cache.guard.name
            for kind, counter in {"cleared": cache.guard.cleared, "not_stored": cache.not_stored}.items():
                for cause, count in counter.copy().items():
                    by_cause = found.setdefault(kind, {}).setdefault(name, {})
                    by_cause[cause] = by_cause.get(cause, 0) + count
            numbers = {"verified": cache.verified, "differed": cache.differed, "bytes": cache.nbytes()}
            for kind, number in numbers.items():
                if number:
                    found.setdefault(kind, {})[name] = found.get(kind, {}).get(name, 0) + number
        return found
