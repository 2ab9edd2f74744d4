"""A CPU platform for the diffusion engine of vLLM-Omni 0.30, which has none of its own.

vLLM-Omni loads it through its platform plugins wherever the folder above this one is on PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any


def plugin() -> str:
    """Name the platform's class, and let what vLLM-Omni imports but never calls here be absent."""
    _stand_in_for("torchvision", "torchaudio")
    return "omni_cpu.platform.CpuOmniPlatform"


def _stand_in_for(*packages: str) -> None:
    import transformers.utils

    # transformers remembers the answer, and must not take a placeholder for the package.
    transformers.utils.is_torchvision_available()
    missing = tuple(name for name in packages if importlib.util.find_spec(name) is None)
    if missing:
        sys.meta_path.append(_Placeholders(missing))


class _Placeholder(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules of the packages that are missing, so that annotations with their names can be read."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""
