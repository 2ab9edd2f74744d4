"""What this package relies on in vLLM-Omni's prompt-embedding cache, and the check that it is so."""

from __future__ import annotations

import hashlib
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ContractMismatch
from ..settings import Settings

# What the native binding and walk were written after: the source of _hashable and _build_key in 0.22 to 0.30.
_KNOWN_RULES = "96b3384528fac3bbbf427f0e99b7dbb0903ddc638385d956564f1bf6ec9116dc"


def _expect(holds: bool, difference: str) -> None:
    if not holds:
        raise ContractMismatch(difference)


def follows_known_rules(module: Any) -> bool:
    """Return whether _hashable and _build_key are, to the letter, those of a known release.

    Others may follow rules that no probe asks for: they must go on doing all but the tensors.
    """
    try:
        source = inspect.getsource(module._hashable) + inspect.getsource(module._build_key)
    except (OSError, TypeError):  # there is no source
        return False
    return hashlib.sha256(source.encode()).hexdigest() == _KNOWN_RULES


def check_tensors(hashable: Callable[[Any], Any], not_hashable: object) -> None:
    """Raise ContractMismatch where upstream's _hashable keys tensors in a form that is not known.

    Known is that of the closed pull request #5195, which keys int64 and bool tensors on the CPU by their bytes.
    """
    for tensor in (torch.tensor([1, 2], device="cpu"), torch.tensor([[True]], device="cpu")):
        key, content = hashable(tensor), tensor.numpy().tobytes()
        of_5195 = ("__torch_tensor__", str(tensor.dtype), tuple(tensor.shape), str(tensor.device), content)
        _expect(key is not_hashable or key == of_5195, f"_hashable keys tensors itself, as {key!r}")
    for unknown in (torch.tensor([1.5], device="cpu"), object()):
        _expect(hashable(unknown) is not_hashable, f"_hashable keys an unknown {type(unknown).__name__}")


class _Pipeline:
    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def encode_prompt(self, prompt: Any = None, mask: Any = None, prompt_embeds: Any = None) -> torch.Tensor:
        self.outputs.append(torch.full((1,), len(self.outputs) + 1, device="cpu"))
        return self.outputs[-1]


def check_calls(module: Any, guarded: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Make calls through the patched module, and raise ContractMismatch where one is not cached as it should be.

    guarded: what makes of upstream's install_prompt_embed_cache the one of this package. It gets a copy that logs
        nothing.
    """
    install = getattr(module.install_prompt_embed_cache, "__wrapped__")  # noqa: B009
    quiet = vars(module) | {"logger": logging.Logger("omni_tensor_key.probe", logging.CRITICAL)}
    copy = types.FunctionType(install.__code__, quiet, install.__name__, install.__defaults__, install.__closure__)
    copy.__kwdefaults__ = install.__kwdefaults__
    pipeline: Any = _Pipeline()
    cache = guarded(copy)(pipeline, max_size=8, enabled=True, model_tag="tag")
    cache.settings = Settings()
    # Tensors without elements: of those, any OMNI_TENSOR_KEY_MAX_BYTES lets a key be made.
    one, other = (torch.empty(rows, 0, dtype=torch.int64, device="cpu") for rows in (1, 2))
    unknown = torch.ones(1, device="cpu")
    try:
        # The calls, and which run of the encoder each returns.
        for args, kwargs, run in (
            ((one,), {}, 1), ((), {"prompt": one.clone()}, 1), ((other,), {}, 2), ((), {"mask": one}, 3),
            (([[1]],), {}, 4), (([[1]],), {}, 4), (([[2]],), {}, 5), ((unknown,), {}, 6), ((unknown,), {}, 7),
            ((one,), {"prompt_embeds": one}, 8), ((one,), {"prompt_embeds": one}, 9),
        ):  # fmt: skip
            output = int(pipeline.encode_prompt(*args, **kwargs))
            _expect(output == run, f"encode_prompt{args} with {kwargs} returns output {output}, not {run}")
        counts = [cache.stats()[name] for name in ("hits", "misses", "bypassed")]
        _expect(counts == [2, 5, 4], f"hits, misses and bypasses are counted as {counts}, not as [2, 5, 4]")
        is_copy = pipeline.encode_prompt(one).data_ptr() != pipeline.outputs[0].data_ptr()
        _expect(is_copy and cache.nbytes() > 0, "the wrapper does not store a miss through PromptEmbedCache.put")
        cache.guard.invalidate("probe")
        _expect(cache.nbytes() == 0, "PromptEmbedCache.clear does not empty it")
    finally:
        vars(pipeline).clear()  # its wrapper refers to it
