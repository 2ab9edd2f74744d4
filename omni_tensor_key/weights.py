"""The ways in which the weights that encode text can change under a cache, on the pipeline's side."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from . import text_path
from .load_weights import Load, WatchedLoad, identity, patching
from .watch import Watch


def _copied_hook(*_: Any) -> None:
    """The hook on a copy of a watched module: nobody caches what the copy encodes."""


class _OnLoadStateDict:
    """The hook on a text-encoding module, which stays behind when the module is copied or pickled."""

    __slots__ = ("_watch",)  # torch copies the dictionary of a hook

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, *_: Any) -> None:
        self._watch.invalidate("load_state_dict")

    def __reduce__(self) -> Any:
        return (identity, (_copied_hook,))


_open_doors: set[WeightDoors] = set()
_handles: list[Any] = []


def _before_registration(module: torch.nn.Module, name: str, part: Any) -> None:
    for doors in tuple(_open_doors):
        doors.before_registration(module, name, part)


def _watch_registrations() -> None:
    """See parts of modules being replaced, which torch tells for all modules of the process or for none."""
    with patching:
        if _open_doors and not _handles:
            _handles.append(torch_modules.register_module_module_registration_hook(_before_registration))
            _handles.append(torch_modules.register_module_parameter_registration_hook(_before_registration))
        while _handles and not _open_doors:
            _handles.pop().remove()


class WeightDoors:
    """The hooks on one watched pipeline and its text-encoding modules."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock = threading.RLock()  # a finalizer may come in while its thread is here
        self._removed = False
        self._pipeline = weakref.ref(watch.pipeline)
        self._pipeline_load: WatchedLoad | None = None
        self._expected: Any = self  # nothing that could be there yet
        self._text_modules: dict[int, tuple[weakref.ref[torch.nn.Module], ExitStack]] = {}
        try:
            _open_doors.add(self)
            _watch_registrations()
            with self._lock:
                self._hook()
        except BaseException:
            self.remove()
            raise

    def _begin_pipeline_load(self, stack: ExitStack, method: Any) -> Load:
        watch = self._watch
        load = Load(watch, "load_weights", stack)
        stack.callback(lambda: None if load.touched else watch.keep("load_weights"))
        if not text_path.is_upstream(method):
            load.touch()  # somebody else's loader may send any name anywhere
        return load

    def _begin_module_load(self, stack: ExitStack, method: Any) -> Load:
        load = Load(self._watch, "load_weights of a text encoder", stack)
        load.touch()
        return load

    def before_registration(self, module: torch.nn.Module, name: str, part: Any) -> None:
        """`module` is about to get a new child or parameter of this name."""
        known = self._text_modules.get(id(module))
        if known is not None and known[0]() is module:
            self._watch.expect(module, name, part)

    def _entry(self) -> Any:
        """What is in the place of the pipeline's `load_weights`: on itself, or else on its class."""
        pipeline = self._pipeline()
        own = getattr(pipeline, "__dict__", {}).get("load_weights")
        return type(pipeline).__dict__.get("load_weights") if own is None else own

    def is_in_place(self) -> bool:
        """Whether nobody has given the pipeline another `load_weights` since it was hooked; asked at every lookup."""
        return self._entry() is self._expected or self._removed

    def hook_modules(self) -> None:
        """Hook what encodes text now and is not hooked yet, and unhook what no longer does.

        What is new may have been used and changed before anybody watched it: the cache must be emptied afterwards.
        """
        with self._lock:
            if not self._removed:
                self._hook()

    def _hook(self) -> None:
        if not self.is_in_place():
            if self._pipeline_load is not None:
                self._pipeline_load.remove()
            pipeline = self._pipeline()
            if callable(getattr(pipeline, "load_weights", None)):
                self._pipeline_load = WatchedLoad(pipeline, self._begin_pipeline_load)
            self._expected = self._entry()
        modules = {id(module): module for root in self._watch.text_modules() for module in root.modules()}
        for key, module in modules.items():
            known = self._text_modules.get(key)
            if known is None or known[0]() is not module:
                self._text_modules[key] = (weakref.ref(module), self._hooks_on(module))
        # Only now, and nothing that stays: other threads load weights meanwhile.
        for key in self._text_modules.keys() - modules.keys():
            self._text_modules.pop(key)[1].close()

    def _hooks_on(self, module: torch.nn.Module) -> ExitStack:
        with ExitStack() as hooks:
            hook = _OnLoadStateDict(self._watch)
            # Before too: what raises half way does not come to the end. Not by the public method, whose hook raises in
            # a shallow copy when the original is gone.
            hooks.callback(module._register_load_state_dict_pre_hook(hook).remove)
            hooks.callback(module.register_load_state_dict_post_hook(hook).remove)
            # Only where there is one: a loader would call a method that we invented.
            if callable(getattr(module, "load_weights", None)):
                hooks.callback(WatchedLoad(module, self._begin_module_load).remove)
            return hooks.pop_all()

    def remove(self) -> None:
        """Take every hook off again."""
        with self._lock:
            self._removed = True
            _open_doors.discard(self)
            _watch_registrations()
            while self._text_modules:
                self._text_modules.popitem()[1][1].close()
            if self._pipeline_load is not None:
                self._pipeline_load.remove()
