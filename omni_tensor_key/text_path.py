"""Which parts of a pipeline the output of encode_prompt() depends on."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator
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


def _attributes(pipeline: Any) -> dict[str, Any]:
    # A copy: other threads may set attributes meanwhile. Copying a dict is one call into C, which keeps the GIL.
    return dict(vars(pipeline))


def children(pipeline: Any) -> dict[str, torch.nn.Module]:
    """The modules that the pipeline has as attributes, by name."""
    found = dict(getattr(pipeline, "_modules", {}))
    found.update((name, value) for name, value in _attributes(pipeline).items() if isinstance(value, torch.nn.Module))
    return {name: module for name, module in found.items() if module is not None}


def text_tools(pipeline: Any) -> dict[str, object]:
    """The pipeline's tokenizers and processors, by name."""
    return {name: value for name, value in _attributes(pipeline).items() if "tokenizer" in name or "processor" in name}


def _wrapped(function: types.FunctionType) -> Iterator[Any]:
    """What a decorator keeps: it is here, whether or not the decorator says so."""
    yield getattr(function, "__wrapped__", None)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def _functions(attribute: Any) -> Iterator[types.FunctionType]:
    """The functions that using a class attribute runs: through descriptors and decorators."""
    pending, seen = [attribute], set[types.FunctionType]()  # closures may refer to each other
    while pending:
        item = pending.pop()
        if isinstance(item, types.FunctionType):
            if item not in seen:
                seen.add(item)
                yield item
                pending += [
                    inner for inner in _wrapped(item) if isinstance(inner, types.FunctionType | types.MethodType)
                ]
        elif isinstance(item, property):
            pending.append(item.fget)
        elif isinstance(item, functools.cached_property):
            pending.append(item.func)
        elif isinstance(item, types.MethodType | classmethod | staticmethod):
            pending.append(item.__func__)


def _mentioned(code: types.CodeType) -> set[str]:
    """The names in a function's code, and in that of the functions and comprehensions inside it.

    Its strings too: getattr() is given one.
    """
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            names.add(constant)
        elif isinstance(constant, types.CodeType):
            names |= _mentioned(constant)
    return names


def _names_used(pipeline: Any) -> set[str] | None:
    """The names that encode_prompt(), and what it calls on self, mention in code that is not vLLM-Omni's own.

    None where that cannot be known. What is called in other ways than through self is not followed.
    """
    cls = type(pipeline)
    original = vars(pipeline).get("_prompt_embed_cache_original_fn")
    pending = list(_functions(inspect.getattr_static(cls, "encode_prompt", None) if original is None else original))
    if not pending:
        return None
    used: set[str] = set()
    followed: set[str] = set()
    seen: set[types.FunctionType] = set()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        names = _mentioned(function.__code__)
        if not is_upstream(function):
            used |= names
        for name in names - followed:
            pending.extend(_functions(inspect.getattr_static(cls, name, None)))
        followed |= names
    return used


def _contents(module: torch.nn.Module) -> set[int]:
    return {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}


def generator_names(pipeline: Any) -> frozenset[str]:
    """The names of the pipeline's children that encode_prompt() does not use.

    A known generator that shares a module or parameter with another child does not count, nor does one that an
    encode_prompt() from outside vLLM-Omni mentions, nor does any if nothing else were left to encode the text.
    """
    declared = set(GENERATORS)
    for name in ("_dit_modules", "_vae_modules"):
        declared.update(getattr(pipeline, name, None) or ())
    modules = children(pipeline)
    used = _names_used(pipeline)
    if used is None:
        return frozenset()
    known = {name for name in modules if name in declared} - used
    others = [module for name, module in modules.items() if name not in known]
    if not others:
        return frozenset()
    text = set().union(*(_contents(module) for module in others))
    return frozenset(name for name in known if not text & _contents(modules[name]))
