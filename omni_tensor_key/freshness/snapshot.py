"""The parts of a pipeline that its prompt embeddings are encoded with, and whether they are still the same objects."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

# Modules that generate or decode. Everything else counts as text-encoding: a name that is not known must not keep a
# stale embedding alive.
_GENERATORS = frozenset({
    "audio_decoder", "audio_vae", "dit", "image_vae", "latent_upsampler", "sr_dit", "transformer",
    "transformer_2", "transformers_ref", "unet", "vae", "video_decoder", "video_vae", "vocoder",
})  # fmt: skip
# Encoders, tokenizers and processors, which need not be modules.
_COMPONENT = re.compile(r"(^|_)(encoder|tokenizer|processor)(_\d+)?$")
# Settings and results of a request; an encoder, tokenizer or processor is none of these.
_DATA = (str, bytes, bool, int, float, dict, list, tuple, set, frozenset, torch.Tensor)


def modules_of(pipeline: Any) -> dict[str, torch.nn.Module]:
    """Return the modules that are attributes of a pipeline, by name, as Python looks attributes up."""
    attributes = dict(vars(pipeline))  # in one call into C: other threads may set attributes meanwhile
    found = {**attributes.get("_modules", {}), **attributes}
    return {name: value for name, value in found.items() if isinstance(value, torch.nn.Module)}


def generator_names(pipeline: Any) -> frozenset[str]:
    """Return the names of the pipeline's modules that encode no text, unless nothing else is there to encode it."""
    declared = set(_GENERATORS)
    for name in ("_dit_modules", "_vae_modules"):
        declared.update(getattr(pipeline, name, None) or ())
    modules = modules_of(pipeline)
    generators = {id(modules[name]) for name in modules if name in declared}
    # By identity too: `current_model = transformer` is the transformer under another name.
    names = frozenset(name for name, module in modules.items() if id(module) in generators)
    return frozenset() if len(names) == len(modules) else names


def _reference(value: Any) -> Callable[[], Any]:
    """Return a weak reference: a cache must not keep weights alive, and an address may be used again."""
    try:
        return weakref.ref(value)
    except TypeError:  # None, and objects that cannot be referenced weakly
        return lambda: value


class PartsSnapshot:
    """Which objects the text-encoding attributes of a pipeline were."""

    def __init__(self, pipeline: Any, names: frozenset[str]) -> None:
        attributes = vars(pipeline)
        self._attributes = list(attributes)
        self._modules = list(attributes.get("_modules", ()))
        # The instance dictionary hides registered modules, as it does when Python looks an attribute up.
        found = {**attributes.get("_modules", {}), **attributes}
        self._references = [
            (name, _reference(None if isinstance(value, _DATA) else value))
            for name, value in found.items()
            if name in names or _COMPONENT.search(name)
        ]

    def parts(self) -> list[Any]:
        """Return the parts that still exist; None for those that are absent or gone."""
        return [reference() for _, reference in self._references]

    def holds(self, pipeline: Any) -> bool:
        """Return whether every part is the object that it was. Looks at names, not at contents."""
        attributes = vars(pipeline)
        modules = attributes.get("_modules", {})
        if list(attributes) != self._attributes or list(modules) != self._modules:
            return False
        for name, reference in self._references:
            part = attributes[name] if name in attributes else modules.get(name)
            if part is not reference():
                return False
        return True

    def same_parts(self, other: PartsSnapshot) -> bool:
        """Return whether the parts of two snapshots are the same objects under the same names."""
        pairs = zip(self._references, other._references, strict=False)
        return len(self._references) == len(other._references) and all(
            before[0] == now[0] and before[1]() is now[1]() for before, now in pairs
        )


class ContentsSnapshot:
    """Which modules, parameters and buffers the text-encoding modules consisted of."""

    def __init__(self, parts: Iterable[Any]) -> None:
        roots = [part for part in parts if isinstance(part, torch.nn.Module)]
        modules = {id(module): module for root in roots for module in root.modules()}
        self.modules = weakref.WeakSet(modules.values())
        self._references = [
            weakref.ref(item)
            for module in modules.values()
            for item in (module, *module._parameters.values(), *module._buffers.values())
            if item is not None
        ]
        self.has_tuner_layers = any(map(_is_tuner_layer, modules.values()))

    def same_contents(self, other: ContentsSnapshot) -> bool:
        """Return whether both consist of the same objects."""
        pairs = zip(self._references, other._references, strict=False)
        return len(self._references) == len(other._references) and all(
            (item := before()) is not None and item is now() for before, now in pairs
        )


def _is_tuner_layer(module: torch.nn.Module) -> bool:
    peft = sys.modules.get("peft.tuners.tuners_utils")
    return peft is not None and isinstance(module, peft.BaseTunerLayer)
