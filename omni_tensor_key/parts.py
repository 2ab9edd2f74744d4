"""The parts of a pipeline that its cached embeddings were computed with."""

from __future__ import annotations

import weakref
from typing import Any

from . import text_path


def parts_of(pipeline: Any) -> dict[str, Any]:
    """What the output of encode_prompt() depends on, by name, with parts that are not there yet."""
    registered = getattr(pipeline, "_modules", {})  # with those that are None: they may come back
    absent = {name: None for name, value in dict(vars(pipeline)).items() if value is None and "encoder" in name}
    return {**absent, **text_path.children(pipeline), **text_path.text_tools(pipeline), **registered}


class Seen:
    """The parts of a pipeline that the entries of its cache were computed with."""

    def __init__(self, pipeline: Any, parts: dict[str, Any]) -> None:
        self._attribute_count = len(vars(pipeline))
        self._module_count = len(getattr(pipeline, "_modules", ()))
        # Weak: the cache may outlive the pipeline, and must not keep its weights alive. Not id(): it may be reused.
        self._references: list[tuple[str, weakref.ref[Any]]] = []
        self._constants: list[tuple[str, Any]] = []
        for name, part in parts.items():
            try:
                self._references.append((name, weakref.ref(part)))
            except TypeError:  # None, a number, a string
                self._constants.append((name, part))

    def matches(self, pipeline: Any) -> bool:
        """Whether the pipeline is as it was; asked at every lookup."""
        attributes = vars(pipeline)
        modules = attributes.get("_modules", ())
        if len(attributes) != self._attribute_count or len(modules) != self._module_count:
            return False
        for name, reference in self._references:
            part = modules[name] if name in modules else attributes.get(name)
            if part is None or part is not reference():  # what is gone is None too
                return False
        for name, constant in self._constants:
            if (modules[name] if name in modules else attributes.get(name)) is not constant:
                return False
        return True

    def has(self, parts: dict[str, Any]) -> bool:
        """Whether these are the parts that the pipeline had."""
        if len(parts) != len(self._references) + len(self._constants):
            return False
        found = all(parts.get(name) is not None and parts[name] is part() for name, part in self._references)
        return found and all(name in parts and parts[name] is constant for name, constant in self._constants)
