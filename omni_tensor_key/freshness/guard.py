"""The guard of a pipeline's prompt-embedding cache: a generation number, and what raises it."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..settings import logger
from . import module_events
from .snapshot import PartsSnapshot

_generations = itertools.count(1)


def _child_of(module: torch.nn.Module | None, name: str) -> Any:
    """Return the module, parameter or buffer that is registered under this name, or None."""
    if module is None:
        return None
    registered = (module._modules.get(name), module._parameters.get(name), module._buffers.get(name))
    return next((child for child in registered if child is not None), None)


class PipelineGuard:
    """Knows whether a pipeline still encodes as it did when the entries of its cache were stored.

    Keeps neither the pipeline nor the cache alive. `lock` is taken before the lock of upstream's cache.

    Raises TypeError for a pipeline that cannot be referenced weakly or has no attributes of its own.
    """

    def __init__(self, pipeline: Any, clear: weakref.WeakMethod[Callable[[], bool]]) -> None:
        """clear: a method of the cache that empties it, and returns whether there was something in it."""
        self.name = type(pipeline).__name__
        self.lock = threading.RLock()  # refresh() invalidates under it
        self.generation = next(_generations)
        self.changing = 0
        self.counts: Counter[tuple[str, ...]] = Counter()  # of what is in stats(), such as ("cleared", "lora")
        self.clear = clear
        self._warned = False
        self._pipeline = weakref.ref(pipeline)
        self._thread = threading.local()
        # Children that were assigned in text-encoding modules since the snapshot, and whether they replaced one.
        self._assigned: list[tuple[weakref.ref[torch.nn.Module], str, bool]] = []
        self._parts = PartsSnapshot(pipeline)
        module_events.observe_load_weights(pipeline)
        module_events.add_guard(self)
        self._look_for_tuner_layers()

    @property
    def pipeline(self) -> Any:
        """The pipeline, or None when it is gone."""
        return self._pipeline()

    def generates(self, name: str) -> bool:
        """Return whether a module or parameter of this dotted name encodes no text."""
        return name.split(".", 1)[0] in self._parts.generators

    def encodes_with(self, module: torch.nn.Module) -> bool:
        """Return whether a module is a part of a text-encoding module."""
        return module in self._parts.modules

    def refresh(self) -> None:
        """Empty the cache if a part of the pipeline is not the object that it was; asked at every lookup."""
        pipeline = self._pipeline()
        if pipeline is None or (not self._assigned and self._parts.holds(pipeline)):
            return
        with self.lock:
            assigned, self._assigned = self._assigned, []
            # A child that has come and gone again is no change.
            changed = any(replaced or _child_of(module(), name) is not None for module, name, replaced in assigned)
            if changed or not self._parts.holds(pipeline):
                self._parts.update(pipeline)
                module_events.observe_load_weights(pipeline)
                self.invalidate("replaced")
        self._look_for_tuner_layers()

    def _look_for_tuner_layers(self) -> None:  # without the lock: a log handler may wait for another thread
        self.has_tuner_layers = self._parts.has_tuner_layers()
        if self.has_tuner_layers and not self._warned:
            self._warned = True
            logger.warning(
                "omni_tensor_key: a text encoder of %s has PEFT tuner layers, whose state changes unseen: calls with "
                "tensors are not cached while they are there.",
                self.name,
            )

    def invalidate(self, cause: str) -> None:
        """Empty the cache. Results of calls that are running now will not be stored either."""
        with self.lock:
            self.generation = next(_generations)
            clear = self.clear()
            if clear is not None and clear():
                self.counts["cleared", cause] += 1

    @contextmanager
    def change(self, cause: str) -> Iterator[None]:
        """Inside, weights change: the cache is empty before and after, and nothing is stored meanwhile."""
        with self.lock:
            self.changing += 1
            self.invalidate(cause)
        try:
            yield
        finally:
            with self.lock:
                self.changing -= 1
                self.invalidate(cause)

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Inside, this thread runs the pipeline's encoder: what it assigns in its own modules is no change."""
        thread = self._thread
        thread.depth = getattr(thread, "depth", 0) + 1
        try:
            yield
        finally:
            thread.depth -= 1
            if thread.depth == 0 and getattr(thread, "assigned", False):
                thread.assigned = False
                with self.lock:
                    self._parts.update_modules()
                self._look_for_tuner_layers()

    def module_assigned(self, module: torch.nn.Module, name: str, value: object) -> None:
        """Note that a module, parameter or buffer of a text-encoding module is about to be assigned."""
        if not self.encodes_with(module):
            return
        child = _child_of(module, name)
        if child is value:
            return
        if getattr(self._thread, "depth", 0) > 0:
            self._thread.assigned = True
            return
        with self.lock:
            self.generation = next(_generations)
            self._assigned.append((weakref.ref(module), name, child is not None))
