"""vLLM-Omni's prompt-embedding cache as released, with plain patches, and with this package; side by side."""

from __future__ import annotations

import enum
import hashlib
import importlib
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import torch
import xxhash

import omni_tensor_key

CACHE = "vllm_omni.diffusion.cache.prompt_embed_cache"


class CannotMeasure(Exception):
    """Figures would be missing or wrong; the text says why."""


def load_copy(name: str) -> Any:
    """Execute the source of the cache module once more, as a module of its own that nobody patches."""
    spec = importlib.util.find_spec("vllm_omni")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place, "diffusion", "cache", "prompt_embed_cache.py")
        if path.is_file():
            own = importlib.util.spec_from_file_location(f"prompt_embed_cache_{name}", path)
            assert own is not None
            assert own.loader is not None
            module: Any = importlib.util.module_from_spec(own)
            own.loader.exec_module(module)
            module.logger = logging.Logger(name, logging.WARNING)
            return module
    raise CannotMeasure(f"no {CACHE} is installed; vllm-omni 0.22 is the first release with one")


def activated() -> Any:
    """Return the real module, with this package's functions in place."""
    module = importlib.import_module(CACHE)
    omni_tensor_key.activate()
    if not omni_tensor_key.is_active():
        raise CannotMeasure("omni_tensor_key does not become active here; `omni-tensor-key doctor` says why")
    return module


# How a plain patch reads a tensor, after the fields that make its key exact. Only what must be there is: no detach(),
# contiguous() or cpu(), which a patch for real callers needs on top.
READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bytes in the key": lambda tensor: tensor.numpy().tobytes(),
    "numpy + xxhash": lambda tensor: xxhash.xxh3_128_digest(tensor.numpy()),
    "numpy + sha256": lambda tensor: hashlib.sha256(tensor.numpy()).digest(),
    "numpy + blake3": lambda tensor: blake3.blake3(memoryview(tensor.numpy()).cast("B")).digest(),
    "torch.hash_tensor": lambda tensor: torch.hash_tensor(tensor).item(),
}


def patched_copy(read: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy whose `_hashable` also takes tensors, by dtype, shape, device and what `read` makes of them."""
    module = load_copy("patched")
    upstreams = module._hashable

    def hashable(obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return (obj.dtype, obj.shape, obj.device, read(obj))
        return upstreams(obj)

    module._hashable = hashable
    return module


class Pipeline(torch.nn.Module):
    """A pipeline with the parts and the `encode_prompt` of verl-omni's adapters, whose encoder costs nothing."""

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
    ) -> Any:
        """Return the same two tensors for every prompt."""
        return self.output


class OneParameterPipeline(Pipeline):
    """One whose `encode_prompt` has a single parameter, which upstream's own function binds fastest."""

    def encode_prompt(self, prompt_ids: Any) -> Any:  # type: ignore[override]
        """Return the same two tensors for every prompt."""
        return self.output


class Mode(enum.IntEnum):
    """What a parameter's default may be: an object that upstream turns into a key."""

    FAST = 1


class ObjectDefaultPipeline(Pipeline):
    """One whose `encode_prompt` has an object as a default, and takes any arguments."""

    def encode_prompt(self, prompt_ids: Any, *args: Any, mode: Mode = Mode.FAST, **kwargs: Any) -> Any:
        """Return the same two tensors for every prompt."""
        return self.output


def cached(module: Any, entries: int, make: Callable[[], Any] = Pipeline) -> tuple[Any, Any]:
    """Return the `encode_prompt` of a new pipeline and the cache of `module` before it; no module: no cache."""
    pipeline = make()
    cache = module and module.install_prompt_embed_cache(pipeline, max_size=entries, model_tag="Pipeline")
    return pipeline.encode_prompt, cache
