"""The environment variables, read once per process."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

# Below "vllm_omni", so that the lines come out of vLLM's handlers, in its format and with its process prefix: a logger
# of our own name would have no handler in an engine process.
logger = logging.getLogger("vllm_omni.omni_tensor_key")

DEFAULT_MAX_BYTES = 1 << 20


class Settings(NamedTuple):
    """What the environment says.

    enabled: False where `OMNI_TENSOR_KEY` is 0: then nothing is ever replaced.
    max_bytes: the largest tensor that is keyed, in bytes (`OMNI_TENSOR_KEY_MAX_BYTES`).
    verify: the share of hits, from 0 to 1, that run the encoder again (`OMNI_TENSOR_KEY_VERIFY`).
    cache_bytes: how many bytes of tensors each cache may hold, or None (`OMNI_TENSOR_KEY_CACHE_BYTES`).
    """

    enabled: bool = True
    max_bytes: int = DEFAULT_MAX_BYTES
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
    if value.strip().lower() in ("0", "false", "no", "off"):
        return False
    if value.strip().lower() in ("1", "true", "yes", "on"):
        return True
    raise ValueError


def _bytes(value: str) -> int:
    # Not int() alone: it also takes "1_0", " 5" and "-1", and refuses some thousand digits with an error of its own.
    if value.isascii() and value.isdecimal() and len(value) < 20 and int(value) < 1 << 63:
        return int(value)
    raise ValueError


def _share(value: str) -> float:
    share = float(value) if value.isascii() else -1.0
    if 0 <= share <= 1:
        return share
    raise ValueError


_VARIABLES = {
    "enabled": ("OMNI_TENSOR_KEY", _switch, "0 or 1"),
    "max_bytes": ("OMNI_TENSOR_KEY_MAX_BYTES", _bytes, "a number of bytes"),
    "verify": ("OMNI_TENSOR_KEY_VERIFY", _share, "a share from 0 to 1"),
    "cache_bytes": ("OMNI_TENSOR_KEY_CACHE_BYTES", _bytes, "a number of bytes"),
}


def read_settings(environ: Mapping[str, str]) -> tuple[Settings, list[Problem]]:
    """Return what the variables say, with the default in place of each value that is refused, and what was refused."""
    default = Settings()
    values, problems = default._asdict(), []
    for field, (name, parse, expected) in _VARIABLES.items():
        if name in environ:
            try:
                values[field] = parse(environ[name])
            except ValueError:
                problems.append(Problem(name, environ[name], expected, values[field]))
    return Settings(**values), problems


@functools.cache
def settings() -> Settings:
    """The settings of this process; a bad value is warned of once and replaced by its default."""
    found, problems = read_settings(os.environ)
    for problem in problems:
        logger.warning("omni_tensor_key: %s", problem)
    return found
