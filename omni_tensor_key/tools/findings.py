"""What `doctor` says of one thing, and what can be known of installed packages without importing them."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

NAME = "omni_tensor_key"


class Finding(NamedTuple):
    """One thing that was examined.

    state: "ok", "note" (worth knowing) or "problem" (a call with tensors would not be cached).
    """

    name: str
    state: str
    seen: str
    advice: str = ""


def version_of(distribution: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def installed_at(module: str) -> str | None:
    """Return the folder that a top-level package would be imported from, or None."""
    spec = importlib.util.find_spec(module)
    places = spec.submodule_search_locations if spec else None
    return next(iter(places), None) if places else None


def needed(name: str, distribution: str, module: str) -> Finding:
    """Say which version of a package that must be there is, and where."""
    folder = installed_at(module)
    if folder is None:
        return Finding(name, "problem", "not installed", f"Install {distribution} in this environment.")
    return Finding(name, "ok", f"{version_of(distribution) or 'unknown version'} in {folder}")
