"""LoRA adapters that vLLM-Omni's manager puts into a text encoder."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from ..freshness.guard import PipelineGuard
from ..freshness.module_events import guards
from ..settings import logger
from .patches import Patches

_KNOWN = frozenset({"set_active_adapter", "add_adapter", "remove_adapter"})


def _text_adapter(manager: Any, guard: PipelineGuard) -> object:
    """Return what is active in text-encoding modules: equal before and after a call that has changed nothing there."""
    names = tuple(name for name in manager._lora_modules if not guard.generates(name))
    if not names:
        return None
    active = manager._active_adapter_id
    # The adapter's own identity too: another one may have been loaded under the same id.
    model = manager._registered_adapters.get(active)
    return names, active, manager._adapter_scales.get(active), None if model is None else weakref.ref(model)


def _known_change(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def change_adapter(manager: Any, *args: Any, **kwargs: Any) -> Any:
        told = [guard for guard in guards() if guard.pipeline is manager.pipeline]
        before, failed = [_text_adapter(manager, guard) for guard in told], True
        try:
            result = method(manager, *args, **kwargs)
            failed = False
            return result
        finally:
            for guard, adapter in zip(told, before, strict=True):
                now = _text_adapter(manager, guard)
                # A call that failed may have left other weights behind, or had them there for a while.
                if now != adapter or (failed and now is not None):
                    guard.invalidate("lora")

    return change_adapter


def _unknown_change(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def change_adapter(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            for guard in guards():
                guard.invalidate("lora")

    return change_adapter


class LoraPatches(Patches):
    """The methods of the LoRA manager with which adapters of a text encoder change.

    Where the manager has other methods than today's, every public one with "adapter" or "lora" in its name empties the
    caches, and one warning says so.
    """

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__()
        manager = getattr(module, "DiffusionLoRAManager", None)
        is_known = inspect.isclass(manager) and all(inspect.isfunction(vars(manager).get(name)) for name in _KNOWN)
        classes = [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]
        for cls in [manager] if is_known else classes:
            for name, method in list(vars(cls).items()):
                changes = name in _KNOWN if is_known else "adapter" in name or "lora" in name
                if changes and not name.startswith("_") and inspect.isfunction(method):
                    self.replace(cls, name, (_known_change if is_known else _unknown_change)(method))
        if not is_known:
            logger.warning(
                "omni_tensor_key: %s has another LoRA manager than the one it knows: each call of a method with adapter "
                "or lora in its name empties the prompt-embedding caches.",
                module.__name__,
            )
