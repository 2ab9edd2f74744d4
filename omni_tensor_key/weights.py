"""The ways in which the weights that encode text can change under a cache, on the pipeline's side."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from . import text_path
from .watch import Watch

_MARK = "_omni_tensor_key_original"


class _Load:
    """One call of `load_weights`: looks at the names on their way to the real loader."""

    def __init__(self, watch: Watch, cause: str, stack: ExitStack) -> None:
        self._watch = watch
        self._cause = cause
        self._stack = stack
        self.touched = False

    def touch(self) -> None:
        """From here on until the load ends, text-encoding weights may be half written."""
        if not self.touched:
            self.touched = True
            self._stack.enter_context(self._watch.changing(self._cause))

    def _see(self, item: Any) -> None:
        name = item[0] if isinstance(item, tuple) and item else None
        if not isinstance(name, str) or not self._watch.generates(name):
            self.touch()

    def _stream(self, weights: Iterator[Any]) -> Iterator[Any]:
        for item in weights:
            self._see(item)
            yield item

    def observe(self, weights: Any) -> Any:
        """What to hand to the real loader in the place of `weights`. An iterator is read once, by the loader."""
        if isinstance(weights, list | tuple):
            for item in weights:
                self._see(item)
        elif isinstance(weights, Iterator):
            return self._stream(weights)
        else:
            self.touch()  # its names cannot be seen
        return weights


def _watched_load(owner: Any, method: str, begin: Callable[[ExitStack], _Load | None]) -> None:
    """Put a method on the object `owner` that runs the owner's own one under the eyes of `begin`'s load."""
    own = vars(owner).get(method)
    # Weak: a bound method in the owner's own dictionary would be a cycle that keeps its weights until a collection.
    reference = weakref.ref(owner)

    @functools.wraps(getattr(owner, method))
    def load(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        function = own or functools.partial(getattr(type(target), method), target)
        with ExitStack() as stack:
            current = begin(stack)
            if current is not None:
                if args:
                    args = (current.observe(args[0]), *args[1:])
                elif "weights" in kwargs:
                    kwargs["weights"] = current.observe(kwargs["weights"])
                else:
                    current.touch()
            return function(*args, **kwargs)

    setattr(load, _MARK, own)
    object.__setattr__(owner, method, load)


def _unwatch_load(owner: Any, method: str) -> None:
    load = vars(owner).get(method)
    if hasattr(load, _MARK):
        own = getattr(load, _MARK)
        if own is None:
            object.__delattr__(owner, method)
        else:
            object.__setattr__(owner, method, own)


class WeightDoors:
    """The hooks on one watched pipeline and its text-encoding modules."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._handles: list[Any] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        pipeline = watch.pipeline
        if callable(getattr(pipeline, "load_weights", None)):
            _watched_load(pipeline, "load_weights", self._begin_pipeline_load)
        self.hook_modules()

    def _begin_pipeline_load(self, stack: ExitStack) -> _Load:
        watch, pipeline = self._watch, self._watch.pipeline
        load = _Load(watch, "load_weights", stack)
        stack.callback(lambda: None if load.touched else watch.keep("load_weights"))
        if not text_path.is_upstream(getattr(type(pipeline), "load_weights", None)):
            load.touch()  # somebody else's loader may send any name anywhere
        return load

    def _begin_module_load(self, stack: ExitStack) -> _Load:
        load = _Load(self._watch, "load_weights of a text encoder", stack)
        load.touch()
        return load

    def hook_modules(self) -> None:
        """Hook the text-encoding modules as they are now."""
        self._unhook_modules()
        for root in self._watch.text_modules():
            for module in root.modules():
                self._handles.append(module.register_load_state_dict_post_hook(self._after_load_state_dict))
                # Only where there is one: a loader would call a method that we invented.
                if callable(getattr(module, "load_weights", None)):
                    _watched_load(module, "load_weights", self._begin_module_load)
                    self._modules.append(weakref.ref(module))

    def _after_load_state_dict(self, module: torch.nn.Module, incompatible_keys: Any) -> None:
        self._watch.invalidate("load_state_dict")

    def _unhook_modules(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for reference in self._modules:
            if (module := reference()) is not None:
                _unwatch_load(module, "load_weights")
        self._modules.clear()

    def remove(self) -> None:
        """Take every hook off again."""
        self._unhook_modules()
        if (pipeline := self._watch.pipeline) is not None:
            _unwatch_load(pipeline, "load_weights")
