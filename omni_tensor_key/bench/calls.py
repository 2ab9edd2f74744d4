"""The calls that are timed: verl-omni's ``encode_prompt(prompt_ids=..., attention_mask=...)``, as each contender sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..settings import settings
from .timing import Contender
from .upstream import (
    OTHER_SIGNATURE,
    PLAIN_PATCHES,
    SIGNATURE,
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
    "torch.hash_tensor": "the same patch with torch.hash_tensor, a sum of 64 bits: not a content hash",
    OURS: "this extension: native binding, digest and content in the key",
    OURS_UPSTREAM_BINDING: "this extension for a signature without a native plan: upstream's own _build_key binds",
    OURS_LISTS: "this extension, IDs and mask as lists: upstream's own keys",
}

# A call's arguments through a module's `_build_key`, and through its wrapper.
_KEY = "build(signature, tag, (), arguments)"
_KEY_TOLIST = "build(signature, tag, (), {name: tensor.tolist() for name, tensor in arguments.items()})"
_CALL = "encode(**arguments)"
_CALL_TOLIST = "encode(prompt_ids=ids.tolist(), attention_mask=mask.tolist())"


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

    @property
    def nbytes(self) -> int:
        """Bytes of content in both tensors."""
        return self.ids.nbytes + self.mask.nbytes


def make_prompt(batch: int, length: int, seed: int = 0) -> Prompt:
    """Draw IDs of shape [*batch*, *length*], int64, and a mask of ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    return Prompt(ids, torch.ones_like(ids))


class Contenders:
    """Every way to key a call, each on its own copy of upstream's module."""

    def __init__(self) -> None:
        self.plain = load_copy("plain")
        self.active = active_copy()
        self.patched = {name: patched_copy(read) for name, read in readers().items()}

    @property
    def missing(self) -> list[str]:
        """The plain patches that cannot be measured here."""
        return [name for name in PLAIN_PATCHES if name not in self.patched]

    def keys(self, prompt: Prompt) -> dict[str, Contender]:
        """Return, by name, the statements that make one key of *prompt*."""
        plain, active = self.plain._build_key, self.active._build_key
        tensors, lists = prompt.tensors, prompt.lists
        return {
            LIST_PATH: _key(_KEY, plain, lists),
            TOLIST: _key(_KEY_TOLIST, plain, tensors),
            BYPASS: _key(_KEY, plain, tensors),
            **{name: _key(_KEY, module._build_key, tensors) for name, module in self._patches()},
            OURS_UPSTREAM_BINDING: _key(_KEY, active, tensors, OTHER_SIGNATURE),
            OURS: _key(_KEY, active, tensors),
            OURS_LISTS: _key(_KEY, active, lists),
        }

    def _patches(self) -> list[tuple[str, Any]]:
        return [(name, self.patched[name]) for name in PLAIN_PATCHES if name in self.patched]

    def check(self) -> None:
        """Raise RuntimeError unless all make equal keys of equal calls, and all but upstream's bypass make one."""
        for name, contender in self.keys(make_prompt(1, 16)).items():
            first, second = (eval(contender.statement, dict(contender.names)) for _ in range(2))
            if first != second or (first is None) != (name == BYPASS):
                raise RuntimeError(f"{name!r} makes no key of a prompt of 16 tokens; {settings()}")

    def hits(self, prompt: Prompt) -> dict[str, Contender]:
        """Return the wrapped calls that find *prompt* in a cache, and, to compare, those that have no cache to ask."""
        found = {}
        for name, statement, module, arguments in self._wrapped(prompt):
            encode, cache = cached(module, 1)
            found[name] = Contender(
                statement, {"encode": encode, "arguments": arguments, "ids": prompt.ids, "mask": prompt.mask}
            )
            for _ in range(2):
                exec(statement, dict(found[name].names))
            if cache is not None and (cache.hits, cache.misses) != ((0, 0) if name == BYPASS else (1, 1)):
                raise RuntimeError(f"{name!r} does not hit: {cache.stats()}; {settings()}")
        return found

    def misses(self, first: Prompt, second: Prompt) -> dict[str, Contender]:
        """Return the wrapped calls that never hit: two prompts in turn through a cache of one entry."""
        found = {}
        others = self._wrapped(second)
        for (name, statement, module, arguments), (_, _, _, other) in zip(self._wrapped(first), others, strict=True):
            if name == TOLIST:  # a key of lists once they are made; see the table of keys for what making them costs
                continue
            names = {"encode": cached(module, 1)[0], "arguments": arguments, "other": other}
            found[name] = Contender(f"{statement}; encode(**other)", names, parts=2)
        return found

    def _wrapped(self, prompt: Prompt) -> list[tuple[str, str, Any, dict[str, Any]]]:
        """Return (name, statement, module, arguments) for each contender; no module stands for no cache."""
        tensors, lists = prompt.tensors, prompt.lists
        return [
            (BARE, _CALL, None, tensors),
            (LIST_PATH, _CALL, self.plain, lists),
            (TOLIST, _CALL_TOLIST, self.plain, tensors),
            (BYPASS, _CALL, self.plain, tensors),
            *((name, _CALL, module, tensors) for name, module in self._patches()),
            (OURS, _CALL, self.active, tensors),
            (OURS_LISTS, _CALL, self.active, lists),
        ]


def cached(module: Any, entries: int) -> tuple[Any, Any]:
    """Return the ``encode_prompt`` of a new pipeline, and the cache of *module* it is behind; no module: no cache."""
    pipeline = Pipeline()
    cache = module and module.install_prompt_embed_cache(pipeline, max_size=entries, model_tag=TAG)
    return pipeline.encode_prompt, cache


def _key(statement: str, build: Any, arguments: dict[str, Any], signature: Any = SIGNATURE) -> Contender:
    return Contender(statement, {"build": build, "signature": signature, "tag": TAG, "arguments": arguments})
