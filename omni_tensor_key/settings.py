"""The environment variables, read once per process."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from .log import logger

DEFAULT_MAX_BYTES = 1 << 20


class Settings(NamedTuple):
    """What the environment says.

    enabled: False where `OMNI_TENSOR_KEY` is 0: then nothing is ever replaced.
    max_bytes: the largest tensor that is keyed, in bytes (`OMNI_TENSOR_KEY_MAX_BYTES`).
    backend: "native" or "reference" (`OMNI_TENSOR_KEY_BACKEND`).
    debug: True where `OMNI_TENSOR_KEY_DEBUG` is 1: every hit checks that the stored value has not been edited.
    """

    enabled: bool = True
    max_bytes: int = DEFAULT_MAX_BYTES
    backend: str = "native"
    debug: bool = False


def _warn(name: str, value: str, expected: str, default: object) -> None:
    logger.warning("omni_tensor_key: %s=%r is not %s; using %s.", name, value, expected, default)


def _switch(name: str, default: bool) -> bool:
    value = os.environ.get(name, "1" if default else "0")
    if value.strip().lower() in ("0", "false", "no", "off"):
        return False
    if value.strip().lower() in ("1", "true", "yes", "on"):
        return True
    _warn(name, value, "0 or 1", int(default))
    return default


def _max_bytes() -> int:
    value = os.environ.get("OMNI_TENSOR_KEY_MAX_BYTES")
    if value is None:
        return DEFAULT_MAX_BYTES
    # Not int() alone: it also takes "1_0", " 5" and "-1", and refuses some thousand digits with an error of its own.
    if value.isascii() and value.isdecimal() and len(value) < 20 and int(value) < 1 << 63:
        return int(value)
    _warn("OMNI_TENSOR_KEY_MAX_BYTES", value, "a number of bytes", DEFAULT_MAX_BYTES)
    return DEFAULT_MAX_BYTES


def _backend() -> str:
    value = os.environ.get("OMNI_TENSOR_KEY_BACKEND", "native")
    if value in ("native", "reference"):
        return value
    _warn("OMNI_TENSOR_KEY_BACKEND", value, "native or reference", "native")
    return "native"


@functools.cache
def settings() -> Settings:
    """The settings of this process; a bad value is warned of once and replaced by its default."""
    return Settings(
        enabled=_switch("OMNI_TENSOR_KEY", True),
        max_bytes=_max_bytes(),
        backend=_backend(),
        debug=_switch("OMNI_TENSOR_KEY_DEBUG", False),
    )
