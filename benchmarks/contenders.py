"""The call that is timed, `encode_prompt(prompt_ids=..., attention_mask=...)`, as each contender sees it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from timing import Contender
from upstream import READERS, CannotMeasure, Pipeline, activated, cached, load_copy, patched_copy

VOCABULARY = 151_936  # Qwen's
SIGNATURE = inspect.signature(Pipeline().encode_prompt)

LIST_PATH = "upstream, lists"
TOLIST = "upstream, tolist() first"
BYPASS = "upstream's bypass"
DECISION = "upstream's bypass decision"
BYTES = "bytes in the key"
OURS = "this package, tensors"
OURS_LISTS = "this package, lists"
BARE = "no cache"

EXPLANATIONS = {
    LIST_PATH: "upstream's functions, IDs and mask as lists",
    TOLIST: "the same by a caller that has tensors",
    BYPASS: "upstream's functions, IDs and mask as tensors: the cost of not caching",
    DECISION: "of such a call, upstream's `_build_key` alone",
    BYTES: "a plain patch of upstream's `_hashable`: tensor.numpy().tobytes() beside dtype, shape and device",
    "numpy + xxhash": "the same patch with the XXH3-128 digest in place of the bytes; a hit is not exact",
    "numpy + sha256": "the same patch with hashlib's SHA-256",
    "numpy + blake3": "the same patch with the blake3 package",
    "torch.hash_tensor": "the same patch with torch.hash_tensor, which XORs the elements: not a content hash",
    OURS: "this package, activated: digest, content and the state of torch in the key",
    OURS_LISTS: "this package, IDs and mask as lists: upstream's own keys",
    BARE: "the call without a cache",
}

_TOLIST = "{name: tensor.tolist() for name, tensor in arguments.items()}"


@dataclass(frozen=True)
class Prompt:
    """Token IDs and a mask of ones, both int64 of shape [1, length]."""

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


def make_prompt(length: int, seed: int = 0) -> Prompt:
    """Draw IDs of shape [1, length]."""
    ids = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    return Prompt(ids, torch.ones_like(ids))


def _arguments(name: str, prompt: Prompt) -> dict[str, Any]:
    return prompt.lists if name in (LIST_PATH, OURS_LISTS) else prompt.tensors


class Contenders:
    """Every way to key a call, each on its own copy of upstream's module."""

    def __init__(self) -> None:
        self.plain, self.active = load_copy("plain"), activated()
        self._modules = {LIST_PATH: self.plain, TOLIST: self.plain, BYPASS: self.plain}
        self._modules |= {name: patched_copy(read) for name, read in READERS.items()}
        self._modules |= {OURS: self.active, OURS_LISTS: self.active}
        for name, contender in self.keys(make_prompt(16)).items():
            first, second = (eval(contender.statement, dict(contender.names)) for _ in range(2))
            if first != second or (first is None) != (name == BYPASS):
                raise CannotMeasure(f"{name!r} does not key a prompt of 16 tokens as it should")

    def key(self, name: str, prompt: Prompt) -> Contender:
        """Return the statement with which one contender makes a key of `prompt`."""
        arguments = _TOLIST if name == TOLIST else "arguments"
        build = self._modules[name]._build_key
        names = {"build": build, "signature": SIGNATURE, "arguments": _arguments(name, prompt)}
        return Contender(f"build(signature, 'Pipeline', (), {arguments})", names)

    def keys(self, prompt: Prompt) -> dict[str, Contender]:
        """Return, by name, the statements that make one key of `prompt`."""
        return {name: self.key(name, prompt) for name in self._modules}

    def hits(self, prompt: Prompt) -> dict[str, Contender]:
        """Return the wrapped calls that find `prompt` in a cache, and, to compare, those that ask none."""
        found = {DECISION: self.key(BYPASS, prompt)}
        for name in (BARE, *self._modules):
            encode, cache = cached(self._modules.get(name), 1)
            names = {"encode": encode, "arguments": _arguments(name, prompt)}
            found[name] = Contender(f"encode(**{_TOLIST if name == TOLIST else 'arguments'})", names)
            for _ in range(2):
                exec(found[name].statement, dict(names))
            if cache is not None and (cache.hits, cache.misses) != ((0, 0) if name == BYPASS else (1, 1)):
                raise CannotMeasure(f"{name!r} does not hit as it should: {cache.stats()}")
        return found

    def misses(self, first: Prompt, second: Prompt) -> dict[str, Contender]:
        """Return the wrapped calls that never hit: two prompts in turn through a cache of one entry."""
        found = {}
        for name in (BARE, *self._modules):
            names = {"encode": cached(self._modules.get(name), 1)[0]}
            names |= {"arguments": _arguments(name, first), "other": _arguments(name, second)}
            call = f"encode(**{_TOLIST if name == TOLIST else 'arguments'})"
            found[name] = Contender(f"{call}; {call.replace('arguments', 'other')}", names, parts=2)
        return found
