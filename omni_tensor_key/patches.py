"""Attributes of other people's modules and classes, replaced and put back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


def _label(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", getattr(owner, "__name__", owner)))


def bound(attribute: Any, owner: Any, cls: type) -> Any:
    """What `owner.name` is where this is found on the class: a method, mostly, but anything can stand on a class."""
    bind = getattr(type(attribute), "__get__", None)
    return attribute if bind is None else bind(attribute, owner, cls)


class Patches:
    """A set of replaced attributes: all in place or, after `abandon()`, none."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Put `new` in the place of `owner.name`, which the owner itself must have."""
        self._replaced.append((owner, name, vars(owner)[name], new))
        setattr(owner, name, new)

    def add(self, owner: Any, name: str, new: Any) -> None:
        """Give `owner` an attribute that it does not have."""
        self._replaced.append((owner, name, _ABSENT, new))
        setattr(owner, name, new)

    def in_place(self) -> bool:
        """Whether every attribute is still the one put there."""
        return all(vars(owner).get(name) is new for owner, name, _, new in self._replaced)

    def check_restorable(self) -> None:
        """Raise RuntimeError where somebody else has replaced one of the attributes since."""
        for owner, name, _, new in self._replaced:
            if vars(owner).get(name) is not new:
                raise RuntimeError(
                    f"{_label(owner)}.{name} was replaced by other code after omni_tensor_key was activated; undo that "
                    "first"
                )

    def abandon(self) -> None:
        """Put the originals back, except where somebody else has replaced one of the attributes since."""
        for owner, name, original, new in reversed(self._replaced):
            if vars(owner).get(name) is not new:
                continue
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._replaced.clear()
