"""The methods that encode_prompt() runs on its pipeline, and the attributes that they read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from .class_source import ClassSource, Function

_PROMPT_LIKE = re.compile(r"prompt|(^|_)ids?(_|$)|mask|embeds|tokens?(_|$)|pending|negative", re.IGNORECASE)
# Methods that set up a pipeline rather than serve a request.
_SETUP = re.compile(r"^(__\w+__|to|eval|train|cuda|cpu|_?(load|unload|enable|disable|setup|init|build|create)_\w+)$")


def is_static(function: Function) -> bool:
    """Whether a method gets no self."""
    return any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in function.decorator_list)


def _self_name(function: Function) -> str:
    if is_static(function):
        return ""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return arguments[0].arg if arguments else ""


def _is_self(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _read(function: Function) -> Iterator[str]:
    """Names of attributes of self that a method loads; getattr(self, "name") counts."""
    name = _self_name(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_self(node.value, name):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            match node.args:
                case [owner, ast.Constant(value), *_] if _is_self(owner, name):
                    yield str(value)


def _called(function: Function) -> Iterator[str]:
    name = _self_name(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_self(node.func.value, name):
            yield node.func.attr


def _written(function: Function) -> Iterator[str]:
    name = _self_name(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value, name):
            yield node.attr


def _super_calls(function: Function) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Name) and called.id == "super":
                yield node.attr


def _handed_over(function: Function) -> Iterator[str]:
    """Functions that get the pipeline itself as an argument."""
    name = _self_name(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and any(_is_self(argument, name) for argument in node.args):
            called = ast.unparse(node.func)
            if called not in ("getattr", "hasattr", "setattr", "super", "type", "isinstance", "id"):
                yield f"{called}()"


class EncodePath:
    """What is reached from encode_prompt() over self and super()."""

    def __init__(self, order: list[ClassSource]) -> None:
        self._order = order
        self.methods: list[tuple[ClassSource, Function]] = []
        self._seen: set[Function] = set()
        self._follow("encode_prompt", 0)
        self.unfollowed = list(dict.fromkeys(name for _, method in self.methods for name in _handed_over(method)))

    def _lookup(self, name: str, start: int) -> tuple[int, Function] | None:
        for index in range(start, len(self._order)):
            if name in self._order[index].functions:
                return index, self._order[index].functions[name]
        return None

    def _follow(self, name: str, start: int) -> None:
        found = self._lookup(name, start)
        if found is None or found[1] in self._seen:
            return
        index, function = found
        self._seen.add(function)
        self.methods.append((self._order[index], function))
        for read in list(_read(function)):
            self._follow(read, 0)
        for called in list(_super_calls(function)):
            self._follow(called, index + 1)

    def _construction(self) -> set[Function]:
        """The methods that run while the pipeline is made."""
        rest, self._seen = self._seen, set()
        methods, self.methods = self.methods, []
        for index in range(len(self._order)):
            self._follow("__init__", index)
        found, self._seen, self.methods = self._seen, rest, methods
        return found

    def attributes(self) -> dict[str, str]:
        """The attributes that are no methods, and what they look like; what begins with "state" is a danger."""
        construction = self._construction()
        set_up: set[str] = set()
        written: dict[str, list[str]] = {}  # attribute -> methods that set it while requests are served
        memos: set[str] = set()
        for part in self._order:
            for statement in part.node.body:
                set_up |= {target.id for target in _class_targets(statement)}
            for method in part.functions.values():
                for name in _written(method):
                    if method in construction or _SETUP.match(method.name):
                        set_up.add(name)
                    elif method in self._seen:
                        memos.add(name)
                    else:
                        written.setdefault(name, []).append(method.name)
        called = {name for _, method in self.methods for name in _called(method)}
        found = {}
        for name in sorted({name for _, method in self.methods for name in _read(method)}):
            if self._lookup(name, 0) is not None or name.startswith("__"):
                continue
            if name in written:
                found[name] = f"state: set by {', '.join(dict.fromkeys(written[name]))}()"
            elif name in memos:
                found[name] = "set by encode_prompt() itself"
            elif name in set_up:
                found[name] = "set up once"
            elif name in called:
                found[name] = "called, and defined where nothing was read"
            elif _PROMPT_LIKE.search(name) and "tokenizer" not in name and "template" not in name:
                found[name] = "state: its name says so, and nothing that was read sets it"
            else:
                found[name] = "set where nothing was read"
        return found


def _class_targets(statement: ast.stmt) -> list[ast.Name]:
    if isinstance(statement, ast.Assign):
        return [target for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target]
    return []
