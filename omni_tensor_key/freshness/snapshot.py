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


def part_names(pipeline: Any) -> frozenset[str]:
    """Return the names of attributes that are, or may become, modules that encode text."""
    generators = generator_names(pipeline)
    return frozenset(
        name
        for name, value in _attributes(pipeline).items()
        if (value is None or isinstance(value, torch.nn.Module)) and name not in generators
    )


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


def _is_gone(reference: Callable[[], Any]) -> bool:
    """Whether the part no longer exists, which a part that is None now is not."""
    return isinstance(reference, weakref.ref) and reference() is None


class PartsSnapshot:
    """Which objects the text-encoding attributes of a pipeline were: modules of these names, and all components."""

    def __init__(self, pipeline: Any, names: frozenset[str], generators: frozenset[str]) -> None:
        attributes, found = vars(pipeline), _attributes(pipeline)
        self._attributes, self._modules = list(attributes), list(attributes.get("_modules", ()))
        self._references: dict[str, Callable[[], Any]] = {}
        generating = [found.get(name) for name in generators]
        for name, value in found.items():
            if _COMPONENT.search(name) and not isinstance(value, _DATA):
                self._references[name] = _reference(value)
            elif name in names:
                is_part = isinstance(value, torch.nn.Module) and all(value is not module for module in generating)
                self._references[name] = _reference(value if is_part else None)

    def parts(self) -> list[Any]:
        """Return the parts that still exist; None for those that are absent or gone."""
        return [reference() for reference in self._references.values()]

    def holds(self, pipeline: Any) -> bool:
        """Return whether no attribute has come or gone, and every part is the object that it was."""
        attributes = vars(pipeline)
        modules = attributes.get("_modules", {})
        if list(attributes) != self._attributes or list(modules) != self._modules:
            return False
        for name, reference in self._references.items():
            part = attributes[name] if name in attributes else modules.get(name)
            if part is reference() and not (part is None and _is_gone(reference)):
                continue
            # A setting of a request, under a name that had None and may get a module.
            is_setting = reference is _nothing and not isinstance(part, torch.nn.Module)
            if not is_setting or _COMPONENT.search(name):
                return False
        return True

    def same_parts(self, other: PartsSnapshot) -> bool:
        """Return whether the parts of two snapshots are the same objects under the same names."""
        names = self._references.keys()
        return names == other._references.keys() and all(
            self._references[name]() is other._references[name]() and not _is_gone(other._references[name])
            for name in names
        )


class Contents:
    """The modules that the text-encoding modules among these parts consist of."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.modules = weakref.WeakSet(
            module for part in parts if isinstance(part, torch.nn.Module) for module in part.modules()
        )
        # Their state changes without a call that can be seen.
        peft = sys.modules.get("peft.tuners.tuners_utils")
        self.has_tuner_layers = peft is not None and any(isinstance(m, peft.BaseTunerLayer) for m in self.modules)


def child_of(module: torch.nn.Module, name: str) -> Any:
    """Return the module, parameter or buffer that is registered under this name, or None."""
    registered = (module._modules.get(name), module._parameters.get(name), module._buffers.get(name))
    return next((child for child in registered if child is not None), None)
