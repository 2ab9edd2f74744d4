"""LingBotWorld's second cache of text embeddings, below its encode_prompt(), put out of use while the first is watched.

It would bring a stale embedding back, and cannot be emptied under a call that is between two looks at it. What it
saves, the first one saves too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

_ATTRIBUTE = "_prompt_embeds_cache"
_MODULE = "vllm_omni.diffusion.models.lingbot_world.pipeline"


class _KeepsNothing(OrderedDict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def move_to_end(self, key: Any, last: bool = True) -> None:
        """Do nothing, also for a call that found something in what was there before."""


def put_out_of_use(pipeline: Any) -> None:
    """Have every lookup in the pipeline's second cache miss, if it has one."""
    is_its = any(cls.__module__ == _MODULE for cls in type(pipeline).__mro__)
    if is_its and type(vars(pipeline).get(_ATTRIBUTE)) is OrderedDict:
        object.__setattr__(pipeline, _ATTRIBUTE, _KeepsNothing())


def put_back(pipeline: Any) -> None:
    """Give the pipeline an empty second cache in place of the one out of use."""
    if type(getattr(pipeline, "__dict__", {}).get(_ATTRIBUTE)) is _KeepsNothing:
        object.__setattr__(pipeline, _ATTRIBUTE, OrderedDict())
