"""Which parts of a pipeline the output of encode_prompt() depends on."""

from __future__ import annotations

import types
from typing import Any

import torch

# Children that generate or decode. Everything else counts as text-encoding: a name that is not known must not keep a
# stale embedding alive.
GENERATORS = frozenset({
    "audio_decoder", "audio_vae", "dit", "image_vae", "latent_upsampler", "sr_dit", "transformer",
    "transformer_2", "transformers_ref", "unet", "vae", "video_decoder", "video_vae", "vocoder",
})  # fmt: skip


def is_upstream(function: Any) -> bool:
    """Whether a function or class was written by vLLM-Omni itself, whose names and signatures are known."""
    return str(getattr(function, "__module__", "")).split(".", 1)[0] == "vllm_omni"


def children(pipeline: Any) -> dict[str, torch.nn.Module]:
    """The modules that the pipeline has as attributes, by name."""
    found = dict(getattr(pipeline, "_modules", {}))
    found.update((name, value) for name, value in vars(pipeline).items() if isinstance(value, torch.nn.Module))
    return {name: module for name, module in found.items() if module is not None}


def text_tools(pipeline: Any) -> dict[str, object]:
    """The pipeline's tokenizers and processors, by name."""
    return {name: value for name, value in vars(pipeline).items() if "tokenizer" in name or "processor" in name}


def _names_used(cls: type, method: str) -> set[str]:
    """The names that `method`, and what it calls on self, mention; upstream's own methods are not followed."""
    names: set[str] = set()
    pending = [method]
    while pending:
        function = getattr(cls, pending.pop(), None)
        if isinstance(function, types.FunctionType) and not is_upstream(function):
            new = set(function.__code__.co_names) - names
            names |= new
            pending.extend(new)
    return names


def _contents(module: torch.nn.Module) -> set[int]:
    return {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}


def generator_names(pipeline: Any) -> frozenset[str]:
    """The names of the pipeline's children that encode_prompt() does not use.

    A known generator that shares a module or parameter with another child does not count, nor does one that an
    encode_prompt() from outside vLLM-Omni mentions, nor does any if nothing else were left to encode the text.
    """
    declared = {*GENERATORS, *getattr(pipeline, "_dit_modules", ()), *getattr(pipeline, "_vae_modules", ())}
    modules = children(pipeline)
    known = {name for name in modules if name in declared} - _names_used(type(pipeline), "encode_prompt")
    others = [module for name, module in modules.items() if name not in known]
    if not others:
        return frozenset()
    text = set().union(*(_contents(module) for module in others))
    return frozenset(name for name in known if not text & _contents(modules[name]))
