"""GuardedPromptEmbedCache: vLLM-Omni's prompt-embedding cache with a guard."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..freshness.guard import PipelineGuard
from ..freshness.module_events import guards
from ..freshness.outputs import NotStorableError, difference, private_copy, tensor_bytes
from ..freshness.torch_state import TorchState
from ..settings import Settings, logger, settings

_UpstreamCache: Any = object  # upstream's class, which is known at activation only, comes after it among the bases


def guarded_caches() -> list[tuple[GuardedPromptEmbedCache, PipelineGuard]]:
    """Return the caches in front of pipelines that still exist, and their guards."""
    found = [(guard.clear(), guard) for guard in guards()]
    return [(clear.__self__, guard) for clear, guard in found if clear is not None]  # type: ignore[attr-defined]


def has_tensors(key: Any) -> bool:
    """Return whether this is the cache key of a call with tensors, as `KeyBuilder.build_key()` makes it."""
    return type(key) is tuple and bool(key) and type(key[-1]) is TorchState


@dataclass
class _Miss:
    """A lookup that missed, or a hit that is verified, until its result is stored."""

    key: Any
    generation: int
    stored: Any  # what is verified, or upstream's sentinel
    output: Any = None


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


class GuardedPromptEmbedCache(_UpstreamCache):  # type: ignore[misc]
    """Upstream's cache, with a guard; a class with this one and upstream's as bases takes the place of upstream's.

    Without a pipeline to guard it is upstream's, and stores nothing for calls with tensors.
    """

    MISS: Any  # upstream's sentinel
    guard: PipelineGuard | None = None
    settings: Settings

    def attach(self, pipeline: Any, calls: EncodeCalls) -> None:
        """Guard this pipeline, whose own encode_prompt() goes through `calls`."""
        self.settings = settings()
        self._hits_counted = 0
        self._thread = calls.thread  # not `calls`, which keeps the pipeline alive
        self.guard = calls.guard = PipelineGuard(pipeline, weakref.WeakMethod(self._drop_entries))

    def _drop_entries(self) -> bool:
        had_entries = len(self._store) > 0
        self.clear()
        return had_entries

    def nbytes(self) -> int:
        """Return how many bytes of memory the tensors of the entries keep alive."""
        with self._lock:
            return sum(map(tensor_bytes, self._store.values()))

    def get(self, key: Any) -> Any:
        """Return the stored output, or upstream's sentinel, also for a hit that is to be verified."""
        guard = self.guard
        if guard is None:
            return self._bypass() if has_tensors(key) else super().get(key)
        guard.refresh()
        if guard.has_tuner_layers and has_tensors(key):
            guard.counts["not_stored", "peft"] += 1
            return self._bypass()
        generation = guard.generation  # before the entry is taken, which a change may then drop
        value = super().get(key)
        if value is self.MISS or self._is_verified():
            self._thread.miss = _Miss(key, generation, value)
            return self.MISS
        return value

    def _bypass(self) -> Any:
        with self._lock:
            self.bypassed += 1
        return self.MISS

    def _is_verified(self) -> bool:
        """Whether this hit is one of those that run the encoder again: a question of their count alone.

        Ranks that see the same calls decide alike; else one would enter a collective that the other does not.
        """
        share = self.settings.verify
        if share == 0:
            return False
        with self._lock:
            self._hits_counted += 1
            return math.floor(self._hits_counted * share) > math.floor((self._hits_counted - 1) * share)

    def put(self, key: Any, value: Any) -> None:
        """Store what the call of the last miss on this thread returned, unless something has changed since.

        value: the output as upstream has detached it.
        """
        guard, miss = self.guard, None
        if guard is not None:
            miss, self._thread.finished = getattr(self._thread, "finished", None), None
        if guard is None or miss is None or miss.key is not key:
            if not has_tensors(key):
                super().put(key, value)  # by somebody else than upstream's wrapper
        elif miss.stored is self.MISS:
            reason = self._store_output(guard, miss, value)
            if reason is not None:
                guard.counts["not_stored", reason] += 1
        else:
            # What is stored for a call with tensors is a copy of the output before upstream detaches it.
            self._verify(guard, miss, miss.output if has_tensors(key) else value)

    def _store_output(self, guard: PipelineGuard, miss: _Miss, value: Any) -> str | None:
        """Store the output of a miss, or return why it is not stored."""
        limit = self.settings.cache_bytes
        if has_tensors(miss.key):
            try:
                value = private_copy(miss.output)
            except NotStorableError as error:
                return str(error)
        if limit is not None and tensor_bytes(value) > limit:
            return "cache_bytes"
        with guard.lock:
            if guard.generation != miss.generation or guard.changing:
                return "changed"
            super().put(miss.key, value)
            while limit is not None and self.nbytes() > limit:
                with self._lock:
                    if self._store:  # somebody else may have cleared it
                        self._store.popitem(last=False)
        return None

    def _verify(self, guard: PipelineGuard, miss: _Miss, value: Any) -> None:
        with guard.lock:
            if guard.generation != miss.generation:
                return  # what was stored is gone
            guard.counts["verified",] += 1
            found = difference(miss.stored, value)
            if found is None:
                return
            guard.counts["differed",] += 1
            guard.invalidate("verify")
        logger.error(
            "omni_tensor_key: a cached output of %s differs from what the encoder returns now: %s. The cache is "
            "emptied. OMNI_TENSOR_KEY_VERIFY in docs/lifecycle.md says what this means.",
            guard.name,
            found,
        )
