"""Private copies of vLLM-Omni's prompt-embedding cache, patched or not, that live side by side in one process."""

from __future__ import annotations

import enum
import hashlib
import importlib.util
import inspect
import logging
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import modules
from ..errors import ContractMismatch
from ..upstream import CacheDoor


class CannotMeasure(Exception):
    """Figures would be missing or wrong; the text says why."""


def load_copy(name: str) -> Any:
    """Execute the cache module's source once more, as a module of its own.

    Nothing that this process has imported or activated is touched, and the diffusion stack is not imported.
    """
    spec = importlib.util.find_spec("vllm_omni")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place, "diffusion", "cache", "prompt_embed_cache.py")
        if path.is_file():
            return _execute(f"omni_tensor_key_bench_{name}", path)
    raise CannotMeasure(f"no {modules.CACHE} is installed; vllm-omni 0.22 is the first release with one")


def _execute(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.logger = logging.Logger(name, logging.WARNING)  # type: ignore[attr-defined]
    return module


class Pipeline(torch.nn.Module):  # type: ignore[misc]
    """A pipeline with the parts and the ``encode_prompt`` of verl-omni's adapters, whose encoder costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        for part in ("text_encoder", "transformer", "vae"):
            self.add_module(part, torch.nn.Linear(1, 1))
        self.tokenizer, self.scheduler = object(), object()
        self.output = (torch.zeros(1, 8, 16), torch.ones(1, 8, dtype=torch.int64))

    def encode_prompt(
        self,
        prompt_ids: Any,
        attention_mask: Any = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: Any = None,
        prompt_embeds_mask: Any = None,
        max_sequence_length: int = 1024,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same two tensors for every prompt."""
        return self.output


class OneParameterPipeline(Pipeline):
    """One whose ``encode_prompt`` has a single parameter, which upstream's own function binds quickest."""

    def encode_prompt(self, prompt_ids: Any) -> Any:  # type: ignore[override]
        """Return the same two tensors for every prompt."""
        return self.output


class Mode(enum.IntEnum):
    """What a parameter's default may be: an object, which upstream turns into a key."""

    FAST = 1


class ObjectDefaultPipeline(Pipeline):
    """One whose ``encode_prompt`` has an object as a default: its binding plan is compiled at each call."""

    def encode_prompt(self, prompt_ids: Any, *args: Any, mode: Mode = Mode.FAST, **kwargs: Any) -> Any:
        """Return the same two tensors for every prompt."""
        return self.output


class _OtherSignature(inspect.Signature):
    """Binds as its base does. Being another type, it has no native binding plan: upstream's own function binds."""


SIGNATURE = inspect.signature(Pipeline().encode_prompt)
OTHER_SIGNATURE = _OtherSignature.from_callable(Pipeline().encode_prompt)

# How a plain patch reads a tensor, after the fields that make its key exact. Only what must be there is: no detach(),
# contiguous() or cpu(), which a patch for real callers needs on top.
Reader = Callable[[torch.Tensor], Any]


def _numpy_readers() -> dict[str, Reader]:
    readers: dict[str, Reader] = {
        "bytes in the key": lambda tensor: tensor.numpy().tobytes(),
        "numpy + sha256": lambda tensor: hashlib.sha256(tensor.numpy()).digest(),
    }
    try:
        import xxhash

        readers["numpy + xxhash"] = lambda tensor: xxhash.xxh3_128_digest(tensor.numpy())
    except ImportError:
        pass
    try:
        import blake3

        readers["numpy + blake3"] = lambda tensor: blake3.blake3(memoryview(tensor.numpy()).cast("B")).digest()
    except ImportError:
        pass
    return readers


def readers() -> dict[str, Reader]:
    """The plain patches whose packages are installed, by name."""
    found: dict[str, Reader] = {}
    if importlib.util.find_spec("numpy") is not None:
        found.update(_numpy_readers())
    if hasattr(torch, "hash_tensor"):
        found["torch.hash_tensor"] = lambda tensor: torch.hash_tensor(tensor).item()
    return found


PLAIN_PATCHES = ("bytes in the key", "numpy + xxhash", "numpy + sha256", "numpy + blake3", "torch.hash_tensor")


def patched_copy(read: Reader) -> Any:
    """Return a copy whose `_hashable` also takes tensors, by dtype, shape, device and what *read* makes of them."""
    module = load_copy("patched")
    upstreams = module._hashable

    def hashable(obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return (obj.dtype, obj.shape, obj.device, read(obj))
        return upstreams(obj)

    module._hashable = hashable
    return module


def active_copy() -> Any:
    """Return a copy with this package's replacements in place."""
    module = load_copy("active")
    try:
        CacheDoor(module)
    except ContractMismatch as mismatch:
        raise CannotMeasure(f"this package does not know this vllm-omni: {mismatch}") from mismatch
    return module
