"""A prompt-embedding cache that is emptied when what its entries were computed with may have changed."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import text_path
from .log import logger

_ATTRIBUTE = "_omni_tensor_key_watch"
_MAX_MISSED = 4096


def _same(value: Any) -> Callable[[Any], bool]:
    """A test whether something is this very object, which it does not keep alive. What is gone is not None."""
    try:
        reference = weakref.ref(value)
    except TypeError:  # None, a number, a string
        return lambda other: other is value
    return lambda other: other is not None and other is reference()


class Watch:
    """The connection between a pipeline and its cache. Keeps neither alive."""

    def __init__(self, pipeline: Any, cache: Any) -> None:
        self._pipeline = weakref.ref(pipeline)
        self._cache = weakref.ref(cache)
        self.name = type(pipeline).__name__
        self._lock = threading.Lock()
        self._generation = 0
        self._changing = 0
        self._missed: dict[int, int] = {}
        self._forgetful = False
        self._expected: list[Callable[[], bool]] = []
        self.cleared: Counter[str] = Counter()  # how often entries were dropped, by cause
        self._look()

    @property
    def pipeline(self) -> Any:
        """The pipeline, or None when it is gone."""
        return self._pipeline()

    @property
    def capacity(self) -> int:
        """How many entries the cache holds at most; 0 when it is gone."""
        return getattr(self._cache(), "max_size", 0)

    def _look(self) -> None:
        pipeline = self.pipeline
        self._generators = text_path.generator_names(pipeline)
        registered = getattr(pipeline, "_modules", {})  # with those that are None: they may come back
        parts = {**text_path.children(pipeline), **text_path.text_tools(pipeline), **registered}
        self._module_count = len(registered)
        # Weak: the cache may outlive the pipeline, and must not keep its weights alive. Not id(): it may be reused.
        self._parts = [(name, _same(part)) for name, part in parts.items()]

    def _is_as_seen(self, pipeline: Any) -> bool:
        attributes = vars(pipeline)
        modules = attributes.get("_modules", {})
        if len(modules) != self._module_count:
            return False
        return all(same(modules[name] if name in modules else attributes.get(name)) for name, same in self._parts)

    def text_modules(self) -> list[Any]:
        """The pipeline's modules that encode text."""
        return [module for name, module in text_path.children(self.pipeline).items() if not self.generates(name)]

    def generates(self, name: str) -> bool:
        """Whether a parameter of this dotted name lies outside the text-encoding path."""
        return name.split(".", 1)[0] in self._generators

    def invalidate(self, cause: str) -> None:
        """Empty the cache; results of calls that are running now will not be stored either."""
        cache, pipeline = self._cache(), self.pipeline
        # LingBotWorld keeps a second cache of text embeddings below encode_prompt().
        inner = getattr(pipeline, "_prompt_embeds_cache", None)
        if isinstance(inner, dict):
            inner.clear()
        with self._lock:  # taken before upstream's lock, here and in store()
            self._generation += 1
            if cache is None or cache.stats()["size"] == 0:
                return
            cache.clear()
            self.cleared[cause] += 1
        logger.debug("omni_tensor_key: prompt-embedding cache of %s cleared: %s.", self.name, cause)

    def keep(self, cause: str) -> None:
        """Note that the cache survives an event that left the text-encoding path alone."""
        logger.debug(
            "omni_tensor_key: prompt-embedding cache of %s kept: %s touched nothing but %s.",
            self.name,
            cause,
            ", ".join(sorted(self._generators)),
        )

    @contextmanager
    def changing(self, cause: str) -> Iterator[None]:
        """Weights of the text-encoding path change in here: nothing is stored, and the cache is empty afterwards."""
        with self._lock:
            self._changing += 1
        try:
            self.invalidate(cause)
            yield
        finally:
            with self._lock:
                self._changing -= 1
            self.invalidate(cause)

    def expect(self, part: Callable[[], object], new: object) -> None:
        """Note that `part()`, somewhere in a text-encoding module, is about to become `new`."""
        old = part()
        if old is new:
            return
        still = _same(old)
        with self._lock:
            self._expected.append(lambda: not still(part()))
        self.invalidate("a part of a text encoder was replaced")

    def before_get(self) -> bool:
        """Empty the cache if a child of the pipeline, a tokenizer or a processor is not the one it was.

        Returns whether that was so.
        """
        pipeline = self.pipeline
        if pipeline is None:
            return False
        if self._expected:
            with self._lock:
                self._expected = [replaced for replaced in self._expected if not replaced()]
        elif self._is_as_seen(pipeline):
            return False
        self._look()
        self.invalidate("a part of the pipeline was replaced")
        return True

    def after_miss(self, key: object) -> None:
        """Remember to which state of the weights the value that is about to be computed for `key` belongs."""
        with self._lock:
            if len(self._missed) >= _MAX_MISSED:  # calls that raised have left theirs behind
                self._missed.clear()
                self._forgetful = True
            # By identity: get() and put() of one call see the same object, and a later one at its address its own.
            self._missed[id(key)] = self._generation

    def store(self, key: object, put: Callable[[], None]) -> None:
        """Call `put`, unless something has changed since the miss of `key`."""
        with self._lock:
            missed = self._missed.pop(id(key), None if self._forgetful else self._generation)
            if self._changing == 0 and missed == self._generation:
                put()


def watch_of(owner: Any) -> Watch | None:
    """The watch of a pipeline or of a cache, or None."""
    found = getattr(owner, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, Watch) else None


def attach(pipeline: Any, cache: Any) -> Watch:
    """Start a watch and leave it on both. Raises TypeError for a pipeline that cannot be referred to weakly."""
    watch = Watch(pipeline, cache)
    for owner in (pipeline, cache):
        object.__setattr__(owner, _ATTRIBUTE, watch)
    return watch


def detach(watch: Watch) -> None:
    """Take a watch off its pipeline and its cache."""
    for owner in (watch.pipeline, watch._cache()):
        if owner is not None and watch_of(owner) is watch:
            object.__delattr__(owner, _ATTRIBUTE)
