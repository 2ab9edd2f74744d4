"""Why calls bypass the cache, in numbers and words."""

from __future__ import annotations

import re
from typing import Any

from .errors import UncacheableTensorError
from .key import tensor_keys
from .log import logger

_PROMPT_STATE = re.compile(r"(ids|mask|tokens?)$")


def on_bypass(model_tag: str, argument: str, reason: str, count: int) -> None:
    """Log, for the 16th, 256th, 4096th, ... call of a kind, that an argument like token IDs or a mask causes it."""
    if _PROMPT_STATE.search(argument) and reason not in ("precomputed", "binding"):
        logger.info(
            "omni_tensor_key: %d calls of %s.encode_prompt() have bypassed the cache because of their argument %s "
            "(reason: %s).",
            count,
            model_tag,
            argument,
            reason,
        )


def explain(obj: Any) -> str | None:
    """Say in one sentence why a tensor cannot be a part of a key, or return None if it can."""
    try:
        tensor_keys([obj])
    except UncacheableTensorError as error:
        return str(error)
    return None
