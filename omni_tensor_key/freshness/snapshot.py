"""The parts of a pipeline that its prompt embeddings are encoded with, and whether they are still the same objects."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

# Modules that generate or decode. Everything else counts as text-encoding: a name that is not known must not keep a
# stale embedding alive.
_GENERATORS = frozenset({
    "audio_decoder", "audio_vae", "dit", "image_vae", "latent_upsampler", "sr_dit", "transformer",
    "transformer_2", "transformers_ref", "unet", "vae", "video_decoder", "video_vae", "vocoder",
})  # fmt: skip
# Encoders, tokenizers and processors, which need not be modules; these may also come after the cache is installed.
_COMPONENT = re.compile(r"(^|_)(encoder|tokenizer|processor)(_\d+)?$")
_LATER = frozenset(
    f"{name}{number}" for name in ("text_encoder", "tokenizer", "processor") for number in ("", "_2", "_3")
)
# Settings and results of a request, none of which is an encoder, tokenizer or processor.
_DATA = (str, bytes, bool, int, float, dict, list, tuple, set, frozenset, torch.Tensor)


def _attributes(pipeline: Any) -> dict[str, Any]:
    own = dict(vars(pipeline))  # in one call into C: other threads may set attributes meanwhile
    # The instance dictionary hides registered modules, as it does when Python looks an attribute up.
    return {**own.get("_modules", {}), **own}


def modules_of(pipeline: Any) -> dict[str, torch.nn.Module]:
    """Return the modules that are attributes of a pipeline, by name."""
    return {name: value for name, value in _attributes(pipeline).items() if isinstance(value, torch.nn.Module)}


def generator_names(pipeline: Any) -> frozenset[str]:
    """Return the names of the pipeline's modules that encode no text.

    From names alone: ranks of which one alone holds the encoder must decide alike.
    """
    declared = set(_GENERATORS).union(
        *(getattr(pipeline, name, None) or () for name in ("_dit_modules", "_vae_modules"))
    )
    modules = modules_of(pipeline)
    # By identity too: `current_model = transformer` is the transformer under another name.
    generators = {id(module) for name, module in modules.items() if name in declared}
    return frozenset(name for name, module in modules.items() if id(module) in generators)


def _nothing() -> None:
    """The reference to None."""


def _reference(value: Any) -> Callable[[], Any]:
    if value is None:
        return _nothing
    # Weak, for a cache must not keep weights alive; not an address, which may be used again.
    try:
        return weakref.ref(value)
    except TypeError:  # some objects cannot be referenced weakly
        return lambda: value


class PartsSnapshot:
    """Which objects the text-encoding attributes of a pipeline are: modules, and encoders, tokenizers and processors.

    The names are those of the pipeline at the beginning, also those that have None and may get a module. Other
    attributes may be set per request.
    """

    def __init__(self, pipeline: Any) -> None:
        self.generators = generator_names(pipeline)
        names = _LATER.union(
            name
            for name, value in _attributes(pipeline).items()
            if value is None or isinstance(value, torch.nn.Module) or _COMPONENT.search(name)
        )
        self._names = names - self.generators
        self._components = frozenset(filter(_COMPONENT.search, self._names))
        self.update(pipeline)

    def update(self, pipeline: Any) -> None:
        """Take the parts that the pipeline has now."""
        found = _attributes(pipeline)
        self._references = {name: _reference(self._part(found, name)) for name in self._names}
        self.update_modules()

    def update_modules(self) -> None:
        """Take the modules that the parts consist of now."""
        self.modules = weakref.WeakSet(
            module
            for part in [reference() for reference in self._references.values()]
            if isinstance(part, torch.nn.Module)
            for module in part.modules()
        )

    def _part(self, attributes: dict[str, Any], name: str) -> Any:
        value = attributes.get(name)
        if isinstance(value, torch.nn.Module):
            return None if any(value is attributes.get(generator) for generator in self.generators) else value
        return value if name in self._components and not isinstance(value, _DATA) else None

    def holds(self, pipeline: Any) -> bool:
        """Return whether every part is the object that it was."""
        own = vars(pipeline)
        modules = own.get("_modules", {})
        for name, reference in self._references.items():
            value = own[name] if name in own else modules.get(name)
            if value is reference() and (value is not None or reference is _nothing):
                continue
            # A setting of a request, under a name that had None, is no part.
            if reference is not _nothing or self._part(_attributes(pipeline), name) is not None:
                return False
        return True

    def has_tuner_layers(self) -> bool:
        """Return whether PEFT has put layers into a text encoder, whose state changes without a call to be seen."""
        peft = sys.modules.get("peft.tuners.tuners_utils")
        return peft is not None and any(isinstance(module, peft.BaseTunerLayer) for module in self.modules)
