"""What this package relies on in vLLM-Omni's prompt-embedding cache, and the check that it is so.

The functions are probed with arguments whose keys are known. Whether a function looks another one up as a module
global at every call, which is what makes a replacement effective, is probed on a copy of the function with other
globals: nothing of the real module is touched, and nothing is logged.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ContractMismatch

# What the native binding and walk were written after: the source of _hashable and _build_key in 0.22 to 0.30.
_KNOWN_RULES = "96b3384528fac3bbbf427f0e99b7dbb0903ddc638385d956564f1bf6ec9116dc"
_PARAMETERS = {
    "_hashable": "obj",
    "_build_key": "signature model_tag args kwargs",
    "install_prompt_embed_cache": "pipeline max_size enabled model_tag",
    "PromptEmbedCache.get": "self key",
    "PromptEmbedCache.put": "self key value",
    "PromptEmbedCache.clear": "self",
}


def _expect(holds: bool, difference: str) -> None:
    if not holds:
        raise ContractMismatch(difference)


def _with_globals(function: types.FunctionType, **names: Any) -> Callable[..., Any]:
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _encode(prompt: Any, mask: Any = None, prompt_embeds: Any = None) -> None:
    """The signature of the probes."""


_SIGNATURE = inspect.signature(_encode)


def _check_names(module: types.ModuleType) -> None:
    for path, parameters in _PARAMETERS.items():
        function: Any = module
        for name in path.split("."):
            function = getattr(function, name, None)
        _expect(isinstance(function, types.FunctionType), f"{path} is not a function")
        found = " ".join(inspect.signature(function).parameters)
        _expect(found == parameters, f"{path} takes ({found}), not ({parameters})")
    precomputed = getattr(module, "_PRECOMPUTED_EMBED_ARGS", None)
    is_names = isinstance(precomputed, tuple) and all(type(name) is str for name in precomputed)
    _expect(is_names, "_PRECOMPUTED_EMBED_ARGS is no tuple of names")
    for name in ("_NOT_HASHABLE", "_CACHE_MISS"):
        _expect(hasattr(module, name), f"there is no {name}")


def _key_of_5195(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What _hashable makes of int64 and bool tensors in builds with the closed pull request #5195."""
    return ("__torch_tensor__", str(tensor.dtype), tuple(tensor.shape), str(tensor.device), tensor.numpy().tobytes())


def _check_keys(module: Any) -> None:
    hashable, build_key, sentinel = module._hashable, module._build_key, module._NOT_HASHABLE
    for tensor in (torch.tensor([1, 2]), torch.tensor([[True]])):
        key = hashable(tensor)
        _expect(key is sentinel or key == _key_of_5195(tensor), f"_hashable keys tensors itself, as {key!r}")
    for unknown in (torch.tensor([1.5]), object()):
        _expect(hashable(unknown) is sentinel, f"_hashable keys an unknown {type(unknown).__name__}")
    for scalar in (None, True, 3, 2.5, "a", b"a"):
        _expect(hashable(scalar) is scalar, f"_hashable changes {scalar!r}")
    expected: Any = ("__seq__", ("a", ("__seq__", (1, ("__seq__", (None,))))))
    _expect(hashable(["a", (1, [None])]) == expected, "_hashable makes other keys of lists")
    expected = ("__dict__", (("'a'", ("__seq__", (2,))), ("'b'", 1)))
    _expect(hashable({"b": 1, "a": [2]}) == expected, "_hashable makes other keys of dicts")
    key = build_key(_SIGNATURE, "tag", ("a",), {"mask": [1]})
    expected = ("tag", (("mask", ("__seq__", (1,))), ("prompt", "a"), ("prompt_embeds", None)))
    _expect(key == expected, f"_build_key makes {key!r}")
    key = build_key(_SIGNATURE, "tag", (), {})
    _expect(key == ("tag", (("mask", None), ("prompt_embeds", None))), f"_build_key makes {key!r} of no arguments")
    for kwargs in ({"unknown": 1}, {"prompt": "a", "prompt_embeds": 1}, {"prompt": object()}):
        _expect(build_key(_SIGNATURE, "tag", (), kwargs) is None, f"_build_key does not bypass {kwargs!r}")


def _check_calls(module: Any) -> None:
    seen: list[Any] = []
    _with_globals(module._build_key, _hashable=seen.append)(_SIGNATURE, "tag", (1,), {"mask": [2]})
    _expect(seen == [[2], 1, None], "_build_key does not call _hashable on each argument in name order")
    for container in ([1], (1,), {"a": 1}):
        seen.clear()
        _with_globals(module._hashable, _hashable=seen.append)(container)
        _expect(seen == [1], f"_hashable does not call itself on the items of a {type(container).__name__}")


def _check_cache(module: Any) -> None:
    stored: list[Any] = []

    class Cache(module.PromptEmbedCache):  # type: ignore[misc]
        def put(self, key: Any, value: Any) -> None:
            stored.append((key, value))
            super().put(key, value)

    class Pipeline:
        def encode_prompt(self, prompt: Any = None) -> Any:
            return (prompt, torch.ones(1))

    quiet = logging.Logger("omni_tensor_key.probe", logging.CRITICAL)
    names = {"_build_key": lambda *call: "key" if call[2] else None, "PromptEmbedCache": Cache, "logger": quiet}
    pipeline = Pipeline()
    install = _with_globals(module.install_prompt_embed_cache, **names)
    cache = install(pipeline, max_size=2, enabled=True, model_tag="tag")
    _expect(isinstance(cache, Cache), "install_prompt_embed_cache does not return its PromptEmbedCache")
    first, second = pipeline.encode_prompt("a"), pipeline.encode_prompt("a")
    pipeline.encode_prompt()
    _expect([key for key, _ in stored] == ["key"], "the wrapper does not store a miss through PromptEmbedCache.put")
    is_stored = second is stored[0][1] and first[1] is not second[1]
    _expect(is_stored, "the wrapper does not return the stored value on a hit")
    counts = tuple(cache.stats().get(name) for name in ("hits", "misses", "bypassed"))
    _expect(counts == (1, 1, 1), f"a hit, a miss and a bypass are counted as {counts}")
    _expect(isinstance(getattr(cache, "_store", None), OrderedDict), "PromptEmbedCache has no OrderedDict _store")
    _expect(hasattr(getattr(cache, "_lock", None), "__enter__"), "PromptEmbedCache has no _lock")


def check_contract(module: types.ModuleType) -> bool:
    """Check the module, and return whether upstream's own functions must go on doing all but the tensors in it.

    That is so where _hashable and _build_key are not, to the letter, those of a known release: they may follow rules
    that no probe asks for.

    Raises ContractMismatch where a probe finds a difference or fails.
    """
    try:
        for check in (_check_names, _check_keys, _check_calls, _check_cache):
            check(module)
    except ContractMismatch:
        raise
    except Exception as error:
        raise ContractMismatch(f"a probe failed with {type(error).__name__}: {error}") from error
    upstream: Any = module
    try:
        source = inspect.getsource(upstream._hashable) + inspect.getsource(upstream._build_key)
    except (OSError, TypeError):  # there is no source
        return True
    return hashlib.sha256(source.encode()).hexdigest() != _KNOWN_RULES
