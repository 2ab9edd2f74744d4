"""Events on torch modules of which guards are told: assignment, `load_state_dict()` and `load_weights()`.

What is put in place here stays for the life of the process, and does nothing for modules that no guard knows. Nothing
is put on an instance of a module, so a pickle of it does not name this package.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import wrapt
from torch.nn.modules import module as torch_module

from .snapshot import modules_of

if TYPE_CHECKING:
    from .guard import PipelineGuard

_guards: tuple[weakref.ref[PipelineGuard], ...] = ()  # replaced as a whole: other threads iterate it
_lock = threading.Lock()


def add_guard(guard: PipelineGuard) -> None:
    """Tell this guard of events from here on."""
    global _guards
    _observe_torch()
    with _lock:
        _guards = (*(reference for reference in _guards if reference() is not None), weakref.ref(guard))


def guards() -> list[PipelineGuard]:
    """Return the guards of the pipelines that still exist."""
    found = (reference() for reference in _guards)
    return [guard for guard in found if guard is not None and guard.pipeline is not None]


def _assigned(module: torch.nn.Module, name: str, value: object) -> None:
    for reference in _guards:
        if (guard := reference()) is not None:
            guard.module_assigned(module, name, value)


@functools.cache
def _observe_torch() -> None:
    torch_module.register_module_module_registration_hook(_assigned)
    torch_module.register_module_parameter_registration_hook(_assigned)
    torch_module.register_module_buffer_registration_hook(_assigned)
    wrapt.wrap_function_wrapper(torch.nn.Module, "load_state_dict", _load_state_dict)


def _load_state_dict(method: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
    with ExitStack() as stack:
        for guard in guards():
            if any(map(guard.encodes_with, owner.modules())):
                stack.enter_context(guard.change("load_state_dict"))
        return method(*args, **kwargs)


def _modules_in(pipeline: Any) -> Iterator[Any]:
    yield pipeline
    for module in modules_of(pipeline).values():
        yield from module.modules()


def _load_weights(method: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
    with ExitStack() as stack:
        for guard in guards():
            pipeline = guard.pipeline  # held while it is looked at: a collection may end it at any time
            if pipeline is not None and any(owner is part for part in _modules_in(pipeline)):
                stack.enter_context(guard.change("load_weights"))
            del pipeline
        return method(*args, **kwargs)


def observe_load_weights(pipeline: Any) -> None:
    """Have guards told of calls of `load_weights()` of a pipeline and of the modules in it, through their classes."""
    for kind in set(map(type, _modules_in(pipeline))):
        cls = next((cls for cls in kind.__mro__ if "load_weights" in vars(cls)), None)
        if cls is not None and getattr(vars(cls)["load_weights"], "_self_wrapper", None) is not _load_weights:
            wrapt.wrap_function_wrapper(cls, "load_weights", _load_weights)
