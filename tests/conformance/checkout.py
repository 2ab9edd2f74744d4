"""A checkout of verl-omni: which rollout adapters it has, and how to import them beside the installed vllm-omni.

verl-omni's packages import verl, Ray and its trainer in their `__init__`. The adapters themselves need none of that to
encode a prompt, so the packages are imported as bare folders, and what an adapter imports for training or for
annotations only is a placeholder where it is not installed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "verl_omni"
PIPELINES, STAGES = "VllmOmniPipelineBase", "OmniRolloutPipelineBase"  # the two registries of rollout adapters
_OPTIONAL = ("tensordict", "torchvision", "verl")
_TRAINING = (f"{PACKAGE}.workers",)


@dataclass(frozen=True)
class Adapter:
    """A class that registers itself as a rollout adapter."""

    name: str
    registry: str  # PIPELINES, STAGES, or "" for an adapter file in which neither is used
    keys: tuple[str, ...]  # what it registers under: an architecture and an algorithm
    module: str

    @property
    def architecture(self) -> str:
        return self.keys[0] if self.keys else ""

    @property
    def title(self) -> str:
        return f"{self.name} ({', '.join(self.keys)})" if self.keys else self.name


class _Placeholder(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, placeholders: tuple[str, ...]) -> None:
        self._root = root
        self._placeholders = placeholders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == top or name.startswith(f"{top}.") for top in self._placeholders):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        folder = self._root.joinpath(*name.split("."))
        if name.split(".")[0] != PACKAGE or not folder.is_dir() or _has_no_adapter(folder, name):
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _has_no_adapter(folder: Path, package: str) -> bool:
    """Whether the __init__ of this package can be run: it holds helpers, below the packages that import verl."""
    return package.count(".") >= 2 and not list(folder.glob("*adapter*.py"))


class Checkout:
    """A folder with verl-omni in it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not (self.root / PACKAGE / "pipelines").is_dir():
            raise FileNotFoundError(f"{root} is no checkout of verl-omni: it has no {PACKAGE}/pipelines")

    def adapters(self) -> list[Adapter]:
        """Every rollout adapter in the tree, found by reading the files."""
        found = []
        for path in sorted((self.root / PACKAGE).rglob("*.py")):
            module = ".".join(path.relative_to(self.root).with_suffix("").parts)
            source = path.read_text(encoding="utf-8")
            is_adapter = path.match("*rollout_adapter.py")
            if is_adapter or ".register(" in source:
                here = list(_registrations(ast.parse(source), module))
                found += here
                if is_adapter and not here:
                    found.append(Adapter(path.stem, "", (), module))
        return found

    @contextmanager
    def _importable(self) -> Iterator[None]:
        import transformers.utils

        transformers.utils.is_torchvision_available()  # remembers the answer: a placeholder must not change it
        missing = tuple(name for name in _OPTIONAL if importlib.util.find_spec(name) is None)
        finder = _Finder(self.root, missing + _TRAINING)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for name in [name for name, module in sys.modules.items() if isinstance(module, _Placeholder)]:
                del sys.modules[name]  # nobody else shall take it for the real one

    def load(self, adapter: Adapter) -> type:
        """Import an adapter's class."""
        if adapter.module not in sys.modules:
            with self._importable():
                importlib.import_module(adapter.module)
        cls = getattr(sys.modules[adapter.module], adapter.name)
        assert isinstance(cls, type)
        return cls


def own_entry_points(cls: type) -> list[str]:
    """The entry points that verl-omni wrote. One that is inherited from vLLM-Omni encodes text, not token IDs."""
    names = ("forward", "prepare_encode")
    return [name for name in names if getattr(getattr(cls, name, None), "__module__", "").startswith(PACKAGE)]


def takes_batches(cls: type) -> bool:
    """Whether vLLM-Omni may send several requests at once."""
    return bool(getattr(cls, "supports_request_batch", False))


def _registrations(tree: ast.Module, module: str) -> Iterator[Adapter]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for call in node.decorator_list:
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            owner = call.func.value if call.func.attr == "register" else None
            if isinstance(owner, ast.Name) and owner.id in (PIPELINES, STAGES):
                values = [*call.args, *(keyword.value for keyword in call.keywords)]
                keys = tuple(str(value.value) for value in values if isinstance(value, ast.Constant))
                yield Adapter(node.name, owner.id, keys, module)
