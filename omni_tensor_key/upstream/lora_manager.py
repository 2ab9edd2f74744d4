"""LoRA adapters that vLLM-Omni's manager puts into a text encoder."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from ..freshness import PipelineGuard, guards
from ..settings import logger
from .patches import Patches

_KNOWN = frozenset({"set_active_adapter", "add_adapter", "remove_adapter"})
_CAUSE = "a LoRA adapter of a text encoder changed"


def _text_adapter(manager: Any, guard: PipelineGuard) -> object:
    """Return what is active in text-encoding modules: equal before and after a call that has changed nothing there."""
    try:
        names = tuple(name for name in manager._lora_modules if not guard.generates(name))
        if not names:
            return None
        active = manager._active_adapter_id
        # The adapter's own identity too: another one may have been loaded under the same id.
        model = manager._registered_adapters.get(active)
        return (names, active, manager._adapter_scales.get(active), None if model is None else weakref.ref(model))
    except (AttributeError, TypeError):
        return object()  # another kind of manager: equal to nothing


def _observed(method: Callable[..., Any], is_known: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def change_adapter(manager: Any, *args: Any, **kwargs: Any) -> Any:
        pipeline = getattr(manager, "pipeline", None)
        # A manager of another shape may be of any pipeline.
        told = [guard for guard in guards() if pipeline is None or guard.pipeline is pipeline]
        before = [_text_adapter(manager, guard) if is_known else None for guard in told]
        failed = True
        try:
            result = method(manager, *args, **kwargs)
            failed = False
            return result
        finally:
            for guard, adapter in zip(told, before, strict=True):
                now = _text_adapter(manager, guard) if is_known else object()
                # A call that failed may have left other weights behind, or had them there for a while.
                if now != adapter or (failed and now is not None):
                    guard.invalidate(_CAUSE)

    return change_adapter


class LoraPatches(Patches):
    """The methods of the LoRA manager with which adapters of a text encoder change.

    Where the manager has other methods than today's, every public one with "adapter" or "lora" in its name empties the
    caches, and one warning says so.
    """

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__()
        manager = getattr(module, "DiffusionLoRAManager", None)
        classes = [manager] if inspect.isclass(manager) else []
        classes = classes or [cls for _, cls in inspect.getmembers(module, inspect.isclass) if "LoRA" in cls.__name__]
        is_known = len(classes) == 1 and all(inspect.isfunction(vars(classes[0]).get(name)) for name in _KNOWN)
        for cls in classes:
            for name, method in list(vars(cls).items()):
                changes = name in _KNOWN if is_known else "adapter" in name or "lora" in name
                if changes and not name.startswith("_") and inspect.isfunction(method):
                    self.replace(cls, name, _observed(method, is_known))
        if not is_known:
            logger.warning(
                "omni_tensor_key: %s has another LoRA manager than the one it knows; each call that changes adapters "
                "empties the prompt-embedding caches.",
                module.__name__,
            )
