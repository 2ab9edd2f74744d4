"""What is replaced in vLLM-Omni's module of the prompt-embedding cache."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import ContractMismatch
from ..freshness.torch_state import call_state
from ..keys import make_key_builder
from ..settings import logger, settings
from .contract import check_calls, check_tensors, follows_known_rules
from .guarded_cache import EncodeCalls, GuardedPromptEmbedCache, guarded_caches, has_tensors
from .patches import Patches

_INSTALL = "install_prompt_embed_cache"


def _importers(function: Any) -> Iterator[types.ModuleType]:
    """The modules that have this install function, by which name they have imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_INSTALL) is function:
            yield module


def _put_without_tensors(put: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(put)
    def put_without_tensors(cache: Any, key: Any, value: Any) -> None:
        # A cache from before activation has no guard, so that nobody would notice changed weights.
        if isinstance(cache, GuardedPromptEmbedCache) or not has_tensors(key):
            put(cache, key, value)

    return put_without_tensors


def _guarded_install(install: Callable[..., Any]) -> Any:
    @functools.wraps(install)
    def install_guarded(pipeline: Any, **options: Any) -> Any:
        encode_prompt = getattr(pipeline, "encode_prompt", None)
        if not callable(encode_prompt) or getattr(pipeline, "_prompt_embed_cache", None) is not None:
            return install(pipeline, **options)
        name = type(pipeline).__name__
        if not hasattr(pipeline, "__dict__"):
            logger.warning("omni_tensor_key: %s has no guard, so tensors are not cached: it has no __dict__.", name)
            return install(pipeline, **options)
        own = encode_prompt.encode_prompt if isinstance(encode_prompt, EncodeCalls) else encode_prompt
        calls, cache = EncodeCalls(own), None
        object.__setattr__(pipeline, "encode_prompt", calls)
        try:
            cache = install(pipeline, **options)
        finally:
            if cache is None:
                object.__setattr__(pipeline, "encode_prompt", own)
        if isinstance(cache, GuardedPromptEmbedCache):
            try:
                cache.attach(pipeline, calls)
            except TypeError as error:
                logger.warning("omni_tensor_key: %s has no guard, so tensors are not cached: %s.", name, error)
        return cache

    return install_guarded


class CachePatches(Patches):
    """This package's functions in the place of upstream's, in one instance of the module.

    Raises ContractMismatch, and leaves the module as it is, where it differs from what this package relies on.
    """

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module)
        self._bypassed: Counter[tuple[str, str, str]] = Counter()
        try:
            self._replace_all(module)
            check_calls(module, _guarded_install)
            self._bypassed.clear()
        except Exception as error:
            super().restore()
            if isinstance(error, ContractMismatch):
                raise
            raise ContractMismatch(f"a probe failed with {type(error).__name__}: {error}") from error

    def _replace_all(self, upstream: Any) -> None:
        check_tensors(upstream._hashable, upstream._NOT_HASHABLE)
        builder = make_key_builder(
            tensors_only=not follows_known_rules(upstream),
            hashable=upstream._hashable,
            build_key=upstream._build_key,
            not_hashable=upstream._NOT_HASHABLE,
            precomputed=upstream._PRECOMPUTED_EMBED_ARGS,
            call_state=call_state,
            on_bypass=self._on_bypass,
            max_bytes=settings().max_bytes,
        )
        base, bases = upstream.PromptEmbedCache, (GuardedPromptEmbedCache, upstream.PromptEmbedCache)
        self._install = _guarded_install(upstream.install_prompt_embed_cache)
        self.replace(base, "put", _put_without_tensors(base.put))
        self.replace(upstream, "PromptEmbedCache", type("PromptEmbedCache", bases, {"MISS": upstream._CACHE_MISS}))
        for importer in _importers(upstream.install_prompt_embed_cache):
            self.replace(importer, _INSTALL, self._install)
        # Last: from here on calls with tensors are keyed.
        self.replace(upstream, "_hashable", builder.hashable)
        self.replace(upstream, "_build_key", builder.build_key)

    def _on_bypass(self, model_tag: str, argument: str, reason: str) -> None:
        self._bypassed[str(model_tag), argument, reason] += 1

    def restore(self) -> None:
        """Put upstream's functions back and empty the guarded caches."""
        super().restore()
        for importer in _importers(self._install):  # those that have imported it while it was in place
            vars(importer)[_INSTALL] = self._install.__wrapped__
        for _, guard in guarded_caches():
            guard.invalidate("deactivate")

    def stats(self) -> dict[str, Any]:
        """Return the counters of `omni_tensor_key.stats()`."""
        found: dict[str, Any] = {}
        for (tag, argument, reason), count in self._bypassed.copy().items():
            found.setdefault("bypassed", {}).setdefault(tag, {}).setdefault(argument, {})[reason] = count
        totals: Counter[tuple[str, ...]] = Counter()  # several pipelines may be of one class
        for cache, guard in guarded_caches():
            counts = guard.counts.copy() | Counter({("bytes",): cache.nbytes()})
            totals.update({(kind, guard.name, *rest): count for (kind, *rest), count in counts.items()})
        for (kind, name, *rest), count in totals.items():
            place, last = found.setdefault(kind, {}), name
            if rest:
                place, last = place.setdefault(name, {}), rest[0]
            place[last] = count
        return found
