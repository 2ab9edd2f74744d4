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


def _text_adapter(manager: Any, guard: PipelineGuard) -> object:
    """Return what is active in the guarded text encoder: equal before and after a call that has changed nothing there.

    None: no module of it has a LoRA layer. Of a manager with other attributes than today's, nothing is equal.
    """
    try:
        names = tuple(name for name in manager._lora_modules if not guard.generates(name))
        if not names or manager.pipeline is not guard.pipeline:
            return None
        active = manager._active_adapter_id
        # The adapter's own identity too: another one may have been loaded under the same id.
        model = manager._registered_adapters.get(active)
        return names, active, manager._adapter_scales.get(active), None if model is None else weakref.ref(model)
    except AttributeError:
        return object()


def _clearing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def change_adapter(manager: Any, *args: Any, **kwargs: Any) -> Any:
        told = guards()
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


class LoraPatches(Patches):
    """The public methods with "adapter" or "lora" in their names, of the classes of the LoRA manager's module.

    Where there are none, one warning says so.
    """

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module)
        classes = [cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == module.__name__]
        for cls in classes:
            for name, method in list(vars(cls).items()):
                changes = "adapter" in name or "lora" in name
                if changes and not name.startswith("_") and inspect.isfunction(method):
                    self.replace(cls, name, _clearing(method))
        if not self._replaced:
            logger.warning(
                "omni_tensor_key: %s has no LoRA manager with methods to hook: prompt-embedding caches are not emptied "
                "when it puts an adapter into a text encoder.",
                module.__name__,
            )
