"""The ways in which the weights that encode text can change under a cache, on the pipeline's side."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from . import text_path
from .watch import Watch

_DictItems: Any = type({}.items())


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
        if isinstance(weights, list | tuple | _DictItems):
            for item in weights:
                self._see(item)
        elif isinstance(weights, Iterator):
            return self._stream(weights)
        else:
            self.touch()  # its names cannot be seen
        return weights


def _identity(value: Any) -> Any:
    return value


class _WatchedLoad:
    """The `load_weights` of one object, put on that object: runs the object's own one under the eyes of a `_Load`."""

    def __init__(self, owner: Any, begin: Callable[[ExitStack, Any], _Load]) -> None:
        method = owner.load_weights
        with contextlib.suppress(TypeError, ValueError):  # not every callable has one
            self.__signature__ = inspect.signature(method)
        self.__doc__ = method.__doc__
        # Weak: a method in its object's own dictionary is a cycle, which keeps the weights until it is collected.
        self._owner = weakref.ref(owner)
        self._own = vars(owner).get("load_weights")
        self._begin = begin
        self._removed = False
        object.__setattr__(owner, "load_weights", self)

    def _method(self, owner: Any) -> Any:
        if self._own is not None:
            return self._own
        if hasattr(type(owner), "load_weights"):
            return functools.partial(type(owner).load_weights, owner)
        return type(owner).__getattr__(owner, "load_weights")  # another object's, handed on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method(self._owner())
        with ExitStack() as stack:
            load = self._begin(stack, method)
            if args:
                args = (load.observe(args[0]), *args[1:])
            elif "weights" in kwargs:
                kwargs["weights"] = load.observe(kwargs["weights"])
            else:
                load.touch()
            return method(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Copied or pickled with its owner, this becomes a method that loads into the copy."""
        return (_identity, (self._own,)) if self._own is not None else (getattr, (self._owner(), "load_weights"))

    def remove(self) -> None:
        """Put the object back as it was, unless somebody else has replaced its method since."""
        self._removed = True
        owner = self._owner()
        method = None if owner is None else vars(owner).get("load_weights")
        if not isinstance(method, _WatchedLoad):
            return
        while isinstance(method, _WatchedLoad) and method._removed:  # two pipelines may share a module
            method = method._own
        if method is None:
            object.__delattr__(owner, "load_weights")
        else:
            object.__setattr__(owner, "load_weights", method)


def _copied_hook(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """The hook on a copy of a watched module: nobody caches what the copy encodes."""


class _AfterLoadStateDict:
    """The hook on a text-encoding module, which stays behind when the module is copied or pickled."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, module: torch.nn.Module, incompatible_keys: Any) -> None:
        self._watch.invalidate("load_state_dict")

    def __reduce__(self) -> Any:
        return (_identity, (_copied_hook,))


_open_doors: set[WeightDoors] = set()
_handles: list[Any] = []


def _before_registration(module: torch.nn.Module, name: str, part: Any) -> None:
    for doors in tuple(_open_doors):
        doors.before_registration(module, name, part)


def _watch_registrations() -> None:
    """See parts of modules being replaced, which torch tells for all modules of the process or for none."""
    if _open_doors and not _handles:
        _handles.append(torch_modules.register_module_module_registration_hook(_before_registration))
        _handles.append(torch_modules.register_module_parameter_registration_hook(_before_registration))
    while _handles and not _open_doors:
        _handles.pop().remove()


class WeightDoors:
    """The hooks on one watched pipeline and its text-encoding modules."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._hooks: list[Any] = []
        self._loads: list[_WatchedLoad] = []
        self._text_modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        pipeline = watch.pipeline
        self._pipeline_load: _WatchedLoad | None = None
        try:
            if callable(getattr(pipeline, "load_weights", None)):
                self._pipeline_load = _WatchedLoad(pipeline, self._begin_pipeline_load)
            self.hook_modules()
        except BaseException:
            self.remove()
            raise
        _open_doors.add(self)
        _watch_registrations()

    def _begin_pipeline_load(self, stack: ExitStack, method: Any) -> _Load:
        watch = self._watch
        load = _Load(watch, "load_weights", stack)
        stack.callback(lambda: None if load.touched else watch.keep("load_weights"))
        if not text_path.is_upstream(method.func if isinstance(method, functools.partial) else method):
            load.touch()  # somebody else's loader may send any name anywhere
        return load

    def _begin_module_load(self, stack: ExitStack, method: Any) -> _Load:
        load = _Load(self._watch, "load_weights of a text encoder", stack)
        load.touch()
        return load

    def before_registration(self, module: torch.nn.Module, name: str, part: Any) -> None:
        """`module` is about to get a new child or parameter of this name."""
        known = self._text_modules.get(id(module))
        if known is not None and known() is module:
            self._watch.expect(module, name, part)

    def is_in_place(self) -> bool:
        return True

    def hook_modules(self) -> None:
        """Hook the text-encoding modules as they are now."""
        self._unhook_modules()
        for root in self._watch.text_modules():
            for module in root.modules():
                if id(module) in self._text_modules:
                    continue
                self._text_modules[id(module)] = weakref.ref(module)
                self._hooks.append(module.register_load_state_dict_post_hook(_AfterLoadStateDict(self._watch)))
                # Only where there is one: a loader would call a method that we invented.
                if callable(getattr(module, "load_weights", None)):
                    self._loads.append(_WatchedLoad(module, self._begin_module_load))

    def _unhook_modules(self) -> None:
        for hook in (*self._hooks, *self._loads):
            hook.remove()
        self._hooks.clear()
        self._loads.clear()
        self._text_modules.clear()

    def remove(self) -> None:
        """Take every hook off again."""
        self._unhook_modules()
        _open_doors.discard(self)
        _watch_registrations()
        if self._pipeline_load is not None:
            self._pipeline_load.remove()
