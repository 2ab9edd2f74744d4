"""Classes read from source text. Nothing is imported, so what a class needs to run need not be there."""

from __future__ import annotations

import ast
import builtins
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Bases from here define no encode_prompt() and are not followed.
_FOREIGN = frozenset({"abc", "builtins", "diffusers", "enum", "torch", "transformers", "typing"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


class SourceError(Exception):
    """A class that cannot be read; the text says why, in one sentence."""


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, with those under `if`, `try` and `with`."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _renames(statement: ast.stmt, name: str) -> str:
    """What a statement gives the name `name` to, if it is a name itself."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name | ast.Attribute)):
        return ""
    renamed = any(isinstance(target, ast.Name) and target.id == name for target in statement.targets)
    return ast.unparse(statement.value) if renamed else ""


@dataclass(frozen=True, eq=False)
class Module:
    """A module's text."""

    name: str
    path: Path

    @cached_property
    def statements(self) -> list[ast.stmt]:
        try:
            return list(_statements(ast.parse(self.path.read_text(encoding="utf-8")).body))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise SourceError(f"{self.path} cannot be read: {error}.") from None

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@dataclass(frozen=True, eq=False)
class ClassSource:
    """A class's text."""

    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name

    @cached_property
    def functions(self) -> dict[str, Function]:
        return {item.name: item for item in _statements(self.node.body) if isinstance(item, Function)}


class Sources:
    """Finds modules and classes by name."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root  # where to look before the installed packages
        self._modules: dict[str, Module | None] = {}
        self._classes: dict[tuple[Module, str], ClassSource | None] = {}

    def _find(self, name: str) -> Module | None:
        top, *rest = name.split(".")
        folders = [] if self._root is None else [self._root / top]
        try:
            spec = importlib.util.find_spec(top)  # of a top-level name: imports nothing
        except (ImportError, ValueError):
            spec = None
        if spec is not None:
            folders += [Path(location) for location in spec.submodule_search_locations or ()]
            if not rest and spec.origin and Path(spec.origin).suffix == ".py":
                return Module(name, Path(spec.origin))
        for folder in folders:
            path = folder.joinpath(*rest)
            for candidate in (path / "__init__.py", path.with_name(f"{path.name}.py")):
                if candidate.is_file():
                    return Module(name, candidate)
        return None

    def module(self, name: str) -> Module | None:
        """The module of this dotted name, or None."""
        if name not in self._modules:
            self._modules[name] = self._find(name)
        return self._modules[name]

    def find_class(self, module: Module, name: str) -> ClassSource | None:
        """The class that a module means by `name`, which may have a dot in it."""
        key = (module, name)
        if key not in self._classes:
            self._classes[key] = None  # for imports that run in a circle
            self._classes[key] = self._look(module, name)
        return self._classes[key]

    def _look(self, module: Module, name: str) -> ClassSource | None:
        first, _, rest = name.partition(".")
        for statement in module.statements:
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return ClassSource(module, statement)
            if original := _renames(statement, name):
                return self.find_class(module, original)
            if isinstance(statement, ast.Import) and rest:
                found = self._through_import(statement, name)
            elif isinstance(statement, ast.ImportFrom):
                found = self._through_import_from(module, statement, first, rest)
            else:
                continue
            if found is not None:
                return found
        return None

    def _is_foreign(self, module: Module, name: str) -> bool:
        first = name.partition(".")[0]
        for statement in module.statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name.partition(".")[0]) == first:
                        origin = statement.module if isinstance(statement, ast.ImportFrom) else alias.name
                        return (origin or "").partition(".")[0] in _FOREIGN
        return first in vars(builtins)

    def _through_import(self, statement: ast.Import, name: str) -> ClassSource | None:
        for alias in statement.names:
            prefix = (alias.asname or alias.name) + "."
            if name.startswith(prefix) and (target := self.module(alias.name)) is not None:
                return self.find_class(target, name.removeprefix(prefix))
        return None

    def _through_import_from(
        self, module: Module, statement: ast.ImportFrom, first: str, rest: str
    ) -> ClassSource | None:
        origin = statement.module or ""
        if statement.level:
            base = module.package.split(".")
            base = base[: len(base) - statement.level + 1]
            origin = ".".join([*base, origin] if origin else base)
        if origin.split(".")[0] in _FOREIGN:
            return None
        for alias in statement.names:
            if alias.name != "*" and (alias.asname or alias.name) != first:
                continue
            wanted = first if alias.name == "*" else alias.name
            submodule = self.module(f"{origin}.{wanted}") if rest else None
            if submodule is not None:
                return self.find_class(submodule, rest)
            target = self.module(origin)
            found = None if target is None or rest else self.find_class(target, wanted)
            if found is not None:
                return found
        return None

    def order(self, cls: ClassSource) -> tuple[list[ClassSource], list[str]]:
        """A class and its bases in the order in which methods are looked up, and the bases that were not found."""
        lines, missing = [], []
        bases = []
        for expression in cls.node.bases:
            name = ast.unparse(expression.value if isinstance(expression, ast.Subscript) else expression)
            base = self.find_class(cls.module, name)
            if base is None or base is cls:
                missing += [] if self._is_foreign(cls.module, name) else [name]
                continue
            bases.append(base)
            line, unknown = self.order(base)
            lines.append(line)
            missing += unknown
        return [cls, *_merge([*lines, bases])], list(dict.fromkeys(missing))


def _merge(lines: list[list[ClassSource]]) -> list[ClassSource]:
    """C3, as Python merges the orders of bases; with bases missing it may find none, then simply one after another."""
    merged: list[ClassSource] = []
    lines = [list(line) for line in lines if line]
    while lines:
        for line in lines:
            if not any(line[0] in other[1:] for other in lines):
                head = line[0]
                break
        else:
            head = lines[0][0]
        merged.append(head)
        lines = [rest for line in lines if (rest := [item for item in line if item is not head])]
    return merged


def read_class(target: str) -> tuple[Sources, ClassSource]:
    """The class that MODULE:CLASS or FILE.py:CLASS names. Raises SourceError."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise SourceError(f"{target!r} names no class: write MODULE:CLASS or FILE.py:CLASS.")
    if where.endswith(".py"):
        path = Path(where).resolve()
        root, parts = path.parent, [path.stem]
        while (root / "__init__.py").is_file():
            parts.insert(0, root.name)
            root = root.parent
        sources, module = Sources(root), Module(".".join(parts), path)
    else:
        sources = Sources()
        found = sources.module(where)
        if found is None:
            raise SourceError(f"There is no module {where} with Python source here.")
        module = found
    cls = sources.find_class(module, name)
    if cls is None:
        raise SourceError(f"{module.path} has no class {name}, and imports none.")
    return sources, cls
