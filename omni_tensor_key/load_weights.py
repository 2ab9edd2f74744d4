"""`load_weights` of pipelines and modules, run under the eyes of a watch."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from .patches import bound
from .watch import Watch

_DictItems: Any = type({}.items())
_ABSENT: Any = object()
patching = threading.RLock()  # a finalizer may come in while its thread is here


class Load:
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


def identity(value: Any) -> Any:
    """What copies and pickles of hooks are made with."""
    return value


class _ClassLoad:
    """The `load_weights` of a class with watched instances: those get their `WatchedLoad`, others what was there.

    Not in the dictionary of the instance: a shallow copy has the same entries, and would load into the original.
    """

    def __init__(self, cls: Any, own: Any) -> None:
        self._cls = cls
        self._own = own
        self._loads: dict[int, WatchedLoad] = {}

    @staticmethod
    def on(cls: Any) -> _ClassLoad:
        """The one of a class, which is put there if need be."""
        found = vars(cls).get("load_weights", _ABSENT)
        if not isinstance(found, _ClassLoad):
            found = cls.load_weights = _ClassLoad(cls, found)
        return found

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        load = self._loads.get(id(owner))
        return load if load is not None and load.owner() is owner else self.original(owner, cls)

    def original(self, owner: Any, cls: Any) -> Any:
        """What there would be without this."""
        if self._own is not _ABSENT:
            return bound(self._own, owner, cls)
        inherited: Any = super(self._cls, cls if owner is None else owner)
        try:
            return inherited.load_weights
        except AttributeError:
            if owner is None:
                raise
            return cls.__getattr__(owner, "load_weights")  # another object's, handed on

    def top(self, load: WatchedLoad) -> WatchedLoad | None:
        """The last one that was put on the object of `load`."""
        found = self._loads.get(load.key)
        # Not by the object, which may be gone, nor by its address alone, which may be another's by now.
        return found if found is not None and found.owner is load.owner else None

    def put(self, key: int, load: WatchedLoad | None) -> None:
        """Give an object a `load_weights`, or the class its own one back when no object has one any more."""
        if load is not None:
            self._loads[key] = load
            return
        self._loads.pop(key, None)
        if not self._loads and vars(self._cls).get("load_weights") is self:
            if self._own is _ABSENT:
                del self._cls.load_weights
            else:
                self._cls.load_weights = self._own

    def __reduce__(self) -> Any:
        return (_ClassLoad, (self._cls, self._own))


class WatchedLoad:
    """The `load_weights` of one watched object: runs the object's own one under the eyes of a `Load`."""

    def __init__(self, owner: Any, begin: Callable[[ExitStack, Any], Load]) -> None:
        method = owner.load_weights
        with contextlib.suppress(TypeError, ValueError):  # not every callable has one
            self.__signature__ = inspect.signature(method)
        self.__doc__ = method.__doc__
        # Weak: the object refers to this, which must not keep the weights until a cycle is collected.
        self.owner = weakref.ref(owner)
        self.key = id(owner)
        self._begin = begin
        self._removed = False
        self._class: _ClassLoad | None = None
        with patching:
            self._own = vars(owner).get("load_weights")
            if self._own is None:
                self._class = _ClassLoad.on(type(owner))
                self._own = self._class.top(self)
                self._class.put(self.key, self)
            else:  # it hides that of the class
                object.__setattr__(owner, "load_weights", self)

    def _method(self) -> Any:
        if self._own is not None or self._class is None:
            return self._own
        if (owner := self.owner()) is None:
            raise ReferenceError("the object that load_weights() belongs to is gone")
        return self._class.original(owner, type(owner))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
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
        """Copied or pickled with its owner, this becomes the owner's own, or a method that loads into the copy."""
        return (identity, (self._own,)) if self._own is not None else (getattr, (self.owner(), "load_weights"))

    def remove(self) -> None:
        """Put things back as they were, unless somebody else has replaced the object's method since."""
        with patching:
            self._removed = True
            owner = self.owner()
            if self._class is not None:
                method: Any = self._class.top(self)
            else:
                method = None if owner is None else vars(owner).get("load_weights")
            if not isinstance(method, WatchedLoad):
                return
            while isinstance(method, WatchedLoad) and method._removed:  # two pipelines may share a module
                method = method._own
            if self._class is not None:
                self._class.put(self.key, method)
            else:
                object.__setattr__(owner, "load_weights", method)
