"""The environment variables, read once per process, and the package's logger."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

# Below "vllm_omni", so that the lines come out of vLLM's handlers, in its format and with its process prefix: a logger
# of our own name would have no handler in an engine process.
logger = logging.getLogger("vllm_omni.omni_tensor_key")


class Settings(NamedTuple):
    """What the environment says.

    enabled: False where `OMNI_TENSOR_KEY` is 0: then nothing is ever replaced.
    max_bytes: the largest tensor that is keyed, in bytes (`OMNI_TENSOR_KEY_MAX_BYTES`).
    verify: the share of hits, from 0 to 1, that run the encoder again (`OMNI_TENSOR_KEY_VERIFY`).
    cache_bytes: how many bytes of tensors each cache may hold, or None (`OMNI_TENSOR_KEY_CACHE_BYTES`).
    """

    enabled: bool = True
    max_bytes: int = 1 << 20
    verify: float = 0.0
    cache_bytes: int | None = None


class Problem(NamedTuple):
    """A variable whose value is refused, and what is used in its place."""

    name: str
    value: str
    expected: str
    default: object

    def __str__(self) -> str:
        return f"{self.name}={self.value!r} is not {self.expected}; using {self.default}."


def _switch(value: str) -> bool:
    names = {"0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True}
    return names[value.strip().lower()]


def _bytes(value: str) -> int:
    # Not int() alone: it also takes "1_0", " 5" and "-1".
    if not value.isascii() or not value.isdecimal() or int(value[:20]) >= 1 << 63:
        raise ValueError
    return int(value)


def _share(value: str) -> float:
    if not 0 <= float(value) <= 1:
        raise ValueError
    return float(value)


_VARIABLES = {
    "enabled": ("OMNI_TENSOR_KEY", _switch, "0 or 1"),
    "max_bytes": ("OMNI_TENSOR_KEY_MAX_BYTES", _bytes, "a number of bytes"),
    "verify": ("OMNI_TENSOR_KEY_VERIFY", _share, "a share from 0 to 1"),
    "cache_bytes": ("OMNI_TENSOR_KEY_CACHE_BYTES", _bytes, "a number of bytes"),
}


def read_settings(environ: Mapping[str, str]) -> tuple[Settings, list[Problem]]:
    """Return what the variables say, with the default in place of each value that is refused, and what was refused."""
    found, problems = Settings(), []
    for field, (name, parse, expected) in _VARIABLES.items():
        try:
            if name in environ:
                found = Settings(**{**found._asdict(), field: parse(environ[name])})
        except (KeyError, ValueError):
            problems.append(Problem(name, environ[name], expected, getattr(found, field)))
    return found, problems


@functools.cache
def settings() -> Settings:
    """Return the settings of this process; a bad value is warned of once and replaced by its default."""
    found, problems = read_settings(os.environ)
    for problem in problems:
        logger.warning("omni_tensor_key: %s", problem)
    return found
