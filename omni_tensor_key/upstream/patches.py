"""Attributes of other people's modules and classes, replaced and put back."""

from __future__ import annotations

import sys
import types
from typing import Any

_ABSENT = object()


class Patches:
    """The attributes that are replaced for one instance of a module."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Put `new` in the place of `owner.name`, which need not exist."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), new))
        setattr(owner, name, new)

    def is_of_imported_module(self) -> bool:
        """Return whether the module is still the one that is imported under its name."""
        return sys.modules.get(self._module.__name__) is self._module

    def changed_since(self) -> str | None:
        """Return the name of an attribute that somebody else has replaced since, or None."""
        changed = (
            f"{owner.__name__}.{name}" for owner, name, _, new in self._replaced if vars(owner).get(name) is not new
        )
        return next(changed, None)

    def restore(self) -> None:
        """Put the originals back, except where somebody else has replaced one of the attributes since."""
        while self._replaced:
            owner, name, original, new = self._replaced.pop()
            if vars(owner).get(name) is not new:
                continue
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
