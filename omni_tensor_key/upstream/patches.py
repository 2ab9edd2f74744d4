"""Attributes of other people's modules and classes, replaced and put back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """A set of replaced attributes."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Put `new` in the place of `owner.name`, which need not exist."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT), new))
        setattr(owner, name, new)

    def in_place(self) -> bool:
        """Return whether every attribute is still the one put there."""
        return all(vars(owner).get(name) is new for owner, name, _, new in self._replaced)

    def check_restorable(self) -> None:
        """Raise RuntimeError where somebody else has replaced one of the attributes since."""
        for owner, name, _, new in self._replaced:
            if vars(owner).get(name) is not new:
                raise RuntimeError(
                    f"{owner.__name__}.{name} was replaced by other code after omni_tensor_key was activated; undo "
                    "that first"
                )

    def restore(self) -> None:
        """Put the originals back, except where somebody else has replaced one of the attributes since."""
        for owner, name, original, new in reversed(self._replaced):
            if vars(owner).get(name) is new:
                if original is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
        self._replaced.clear()
