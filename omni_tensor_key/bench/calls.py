"""The call that is timed, ``encode_prompt(prompt_ids=..., attention_mask=...)``, as each contender sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..settings import DEFAULT_MAX_BYTES, settings
from .timing import Contender
from .upstream import (
    OTHER_SIGNATURE,
    PLAIN_PATCHES,
    SIGNATURE,
    CannotMeasure,
    Pipeline,
    active_copy,
    load_copy,
    patched_copy,
    readers,
)

VOCABULARY = 151_936  # Qwen's
TAG = "Pipeline"

LIST_PATH = "list path"
TOLIST = "tolist() + list path"
BYPASS = "upstream's bypass"
BYTES = "bytes in the key"
OURS = "ours, tensors"
OURS_UPSTREAM_BINDING = "ours, upstream's binding"
OURS_LISTS = "ours, lists"
BARE = "no cache"

EXPLANATIONS = {
    LIST_PATH: "upstream's functions, IDs and mask as lists",
    TOLIST: "the same by a caller that has tensors",
    BYPASS: "upstream's functions, IDs and mask as tensors: the cost of deciding not to cache",
    BYTES: "a plain patch of upstream's _hashable: tensor.numpy().tobytes() beside dtype, shape and device",
    "numpy + xxhash": "the same patch with the XXH3-128 digest in place of the bytes; a hit is not exact",
    "numpy + sha256": "the same patch with hashlib's SHA-256",
    "numpy + blake3": "the same patch with the blake3 package",
    "torch.hash_tensor": "the same patch with torch.hash_tensor, which XORs the elements: not a content hash",
    OURS: "this extension: native binding, digest and content in the key",
    OURS_UPSTREAM_BINDING: "this extension for a signature without a native plan: upstream's own _build_key binds",
    OURS_LISTS: "this extension, IDs and mask as lists: upstream's own keys",
}

# A call's arguments through a module's `_build_key`, and through its wrapper.
_KEY = "build(signature, tag, (), arguments)"
_KEY_TOLIST = "build(signature, tag, (), {name: tensor.tolist() for name, tensor in arguments.items()})"
_CALL = "encode(**arguments)"
_CALL_TOLIST = "encode(**{name: tensor.tolist() for name, tensor in arguments.items()})"


@dataclass(frozen=True)
class Prompt:
    """A batch of token IDs with its mask, as tensors and as lists."""

    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def tensors(self) -> dict[str, Any]:
        """The call's arguments as verl-omni's adapters make them."""
        return {"prompt_ids": self.ids, "attention_mask": self.mask}

    @property
    def lists(self) -> dict[str, Any]:
        """The call's arguments as lists."""
        return {"prompt_ids": self.ids.tolist(), "attention_mask": self.mask.tolist()}


def make_prompt(batch: int, length: int, seed: int = 0) -> Prompt:
    """Draw IDs of shape [*batch*, *length*], int64, and a mask of ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    return Prompt(ids, torch.ones_like(ids))


class Contenders:
    """Every way to key a call, each on its own copy of upstream's module."""

    def __init__(self) -> None:
        patched = {name: patched_copy(read) for name, read in readers().items()}
        plain, active = load_copy("plain"), active_copy()
        self.plain, self.active = plain, active
        self._modules = {LIST_PATH: plain, TOLIST: plain, BYPASS: plain}
        self._modules |= {name: patched[name] for name in PLAIN_PATCHES if name in patched}
        self._modules |= {OURS_UPSTREAM_BINDING: active, OURS: active, OURS_LISTS: active}
        self.missing = [name for name in PLAIN_PATCHES if name not in patched]

    @property
    def names(self) -> list[str]:
        """All contenders but the call without a cache."""
        return list(self._modules)

    def key(self, name: str, prompt: Prompt) -> Contender:
        """Return the statement with which one contender makes a key of *prompt*."""
        names = {
            "build": self._modules[name]._build_key,
            "signature": OTHER_SIGNATURE if name == OURS_UPSTREAM_BINDING else SIGNATURE,
            "tag": TAG,
            "arguments": _arguments(name, prompt),
        }
        return Contender(_KEY_TOLIST if name == TOLIST else _KEY, names)

    def keys(self, prompt: Prompt) -> dict[str, Contender]:
        """Return, by name, the statements that make one key of *prompt*."""
        return {name: self.key(name, prompt) for name in self.names}

    def check(self) -> None:
        """Raise CannotMeasure unless all make equal keys of equal calls, and all but upstream's bypass make one."""
        if settings().max_bytes < DEFAULT_MAX_BYTES:
            raise CannotMeasure(f"OMNI_TENSOR_KEY_MAX_BYTES is under the default, {DEFAULT_MAX_BYTES}")
        for name, contender in self.keys(make_prompt(1, 16)).items():
            first, second = (eval(contender.statement, dict(contender.names)) for _ in range(2))
            if first != second or (first is None) != (name == BYPASS):
                raise CannotMeasure(f"{name!r} does not key a prompt of 16 tokens as it should")

    def hits(self, prompt: Prompt) -> dict[str, Contender]:
        """Return the wrapped calls that find *prompt* in a cache, and, to compare, those that have no cache to ask."""
        found = {}
        for name in self._wrapped:
            encode, cache = cached(self._modules.get(name), 1)
            names = {"encode": encode, "arguments": _arguments(name, prompt)}
            found[name] = Contender(_CALL_TOLIST if name == TOLIST else _CALL, names)
            for _ in range(2):
                exec(found[name].statement, dict(names))
            if cache is not None and (cache.hits, cache.misses) != ((0, 0) if name == BYPASS else (1, 1)):
                raise CannotMeasure(f"{name!r} does not hit as it should: {cache.stats()}")
        return found

    def misses(self, first: Prompt, second: Prompt) -> dict[str, Contender]:
        """Return the wrapped calls that never hit: two prompts in turn through a cache of one entry."""
        found = {}
        for name in self._wrapped:
            names = {"encode": cached(self._modules.get(name), 1)[0]}
            names |= {"arguments": _arguments(name, first), "other": _arguments(name, second)}
            call = _CALL_TOLIST if name == TOLIST else _CALL
            found[name] = Contender(f"{call}; {call.replace('arguments', 'other')}", names, parts=2)
        return found

    @property
    def _wrapped(self) -> list[str]:
        # The wrapper takes its signature from the function, so there is no second binding to compare.
        return [BARE, *(name for name in self.names if name != OURS_UPSTREAM_BINDING)]


def _arguments(name: str, prompt: Prompt) -> dict[str, Any]:
    return prompt.lists if name in (LIST_PATH, OURS_LISTS) else prompt.tensors


def cached(module: Any, entries: int, make: Callable[[], Any] = Pipeline) -> tuple[Any, Any]:
    """Return the ``encode_prompt`` of a new pipeline, and the cache of *module* it is behind; no module: no cache."""
    pipeline = make()
    cache = module and module.install_prompt_embed_cache(pipeline, max_size=entries, model_tag=TAG)
    return pipeline.encode_prompt, cache
