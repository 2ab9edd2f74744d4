"""A prompt-embedding cache that is emptied when what its entries were computed with may have changed."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import text_path
from .log import logger
from .parts import Seen, parts_of

if TYPE_CHECKING:
    import torch

    from .weights import WeightDoors

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
        self.doors: WeightDoors | None = None
        # Stands before every key in the cache. Calls that began before this watch may hold upstream's own get() and
        # put(): what they find and store is not what is found and stored here.
        self.token = object()
        # Taken before upstream's lock. A finalizer may come back here on the same thread.
        self._lock = threading.RLock()
        self._generation = 0
        self._changing = 0
        self._closed = False
        self._missed: dict[int, int] = {}
        self._in_cache = False
        self._clear_again = False
        self._expected: dict[tuple[int, str], tuple[weakref.ref[torch.nn.Module], Callable[[Any], bool]]] = {}
        self.cleared: Counter[str] = Counter()  # how often entries were dropped, by cause
        self._generators = text_path.generator_names(pipeline)
        self._seen = Seen(pipeline, parts_of(pipeline))

    @property
    def pipeline(self) -> Any:
        """The pipeline, or None when it is gone."""
        return self._pipeline()

    @property
    def capacity(self) -> int:
        """How many entries the cache holds at most; 0 when it is gone."""
        return getattr(self._cache(), "max_size", 0)

    def text_modules(self) -> list[Any]:
        """The pipeline's modules that encode text."""
        return [module for name, module in text_path.children(self.pipeline).items() if not self.generates(name)]

    def generates(self, name: str) -> bool:
        """Whether a parameter of this dotted name lies outside the text-encoding path."""
        return name.split(".", 1)[0] in self._generators

    def _use_cache(self, use: Callable[[], None]) -> None:
        """Call a method of the cache. The lock is held; values that go with it may have finalizers that come back."""
        self._in_cache = True
        try:
            use()
        finally:
            self._in_cache = False

    def _clear(self, cause: str) -> bool:
        """Empty the cache, and have the results of running calls not stored; returns whether it had entries."""
        cache = self._cache()
        with self._lock:
            self._generation += 1
            if self._in_cache:  # which holds upstream's lock on this thread
                self._clear_again = True
                return False
            if cache is None or cache.stats()["size"] == 0:
                return False
            self._use_cache(cache.clear)
            self._clear_again = False
            self.cleared[cause] += 1
            return True

    def invalidate(self, cause: str) -> None:
        """Empty the cache; results of calls that are running now will not be stored either."""
        if self._clear(cause):
            logger.debug("omni_tensor_key: prompt-embedding cache of %s cleared: %s.", self.name, cause)

    def close(self, cause: str) -> None:
        """Empty the cache, for good: nothing is stored from here on. Nothing is logged either."""
        with self._lock:
            self._closed = True
            self._clear(cause)

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

    def expect(self, module: torch.nn.Module, name: str, new: object) -> None:
        """Note that this part of a text-encoding module is about to become `new`."""
        old = _part(module, name)
        if old is new:
            return
        with self._lock:
            self._expected[id(module), name] = (weakref.ref(module), _same(old))
        self.invalidate("a part of a text encoder was replaced")

    def _arrived(self) -> dict[Any, Any]:
        """Of what was expected, that which has become what it was to become, or is gone."""
        found = {}
        for (key, name), expectation in list(self._expected.items()):
            reference, still = expectation
            module = reference()
            if module is None or not still(_part(module, name)):
                found[key, name] = expectation
        return found

    def before_get(self) -> None:
        """Empty the cache if a part of the pipeline that its entries depend on is not the one it was.

        Raises whatever hooking a new part raises.
        """
        pipeline, doors = self._pipeline(), self.doors
        if pipeline is None or doors is None:
            return
        if not self._expected and self._seen.matches(pipeline) and doors.is_in_place():
            return
        with self._lock:
            parts = parts_of(pipeline)
            seen = Seen(pipeline, parts)
            if not self._expected and self._seen.has(parts) and doors.is_in_place():
                self._seen = seen  # attributes came or went that are none of these parts
                return
            arrived = self._arrived()
            self._generators = text_path.generator_names(pipeline)
            doors.hook_modules()
            dropped = self._clear("a part of the pipeline was replaced")
            # Last: from here on, other threads read what is in the cache.
            self._seen = seen
            for key, expectation in arrived.items():
                if self._expected.get(key) is expectation:
                    del self._expected[key]
        if dropped:
            logger.debug("omni_tensor_key: prompt-embedding cache of %s cleared: a part was replaced.", self.name)

    def after_miss(self, key: object) -> None:
        """Remember to which state of the weights the value that is about to be computed for `key` belongs."""
        with self._lock:
            if len(self._missed) >= _MAX_MISSED:  # calls that raised have left theirs behind
                self._missed.clear()
            # By identity: get() and put() of one call see the same object, and a later one at its address its own.
            self._missed[id(key)] = self._generation

    def store(self, key: object, put: Callable[[], None]) -> None:
        """Call `put`, unless something has changed since the miss of `key`, or nobody has seen that miss."""
        with self._lock:
            missed = self._missed.pop(id(key), None)
            if missed == self._generation and self._changing == 0 and not self._closed:
                self._use_cache(put)
                if self._clear_again:
                    self._clear_again = False
                    self._clear("a part of a text encoder was replaced")


def _part(module: torch.nn.Module, name: str) -> object:
    return vars(module)["_modules"].get(name, vars(module)["_parameters"].get(name))


def watch_of(owner: Any) -> Watch | None:
    """The watch of a pipeline or of a cache, or None."""
    found = getattr(owner, "__dict__", {}).get(_ATTRIBUTE)
    return found if isinstance(found, Watch) else None


def attach(watch: Watch) -> None:
    """Leave a watch on its pipeline and its cache. Raises where they cannot have such an attribute."""
    for owner in (watch.pipeline, watch._cache()):
        object.__setattr__(owner, _ATTRIBUTE, watch)


def detach(watch: Watch) -> None:
    """Take a watch off its pipeline and its cache."""
    for owner in (watch.pipeline, watch._cache()):
        if owner is not None and watch_of(owner) is watch:
            vars(owner).pop(_ATTRIBUTE, None)  # another thread may do so too
