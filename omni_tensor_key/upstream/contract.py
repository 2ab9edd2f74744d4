"""What this package relies on in vLLM-Omni's prompt-embedding cache, and the check that it is so.

The functions are probed with arguments whose keys are known. Whether a function looks another one up as a module
global at every call, which is what makes a replacement reach caches that are already installed, is probed on a copy of
the function with other globals: nothing of the real module is touched, and nothing is logged.
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
_KNOWN_RULES = {"96b3384528fac3bbbf427f0e99b7dbb0903ddc638385d956564f1bf6ec9116dc"}


def _key_of_5195(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What _hashable makes of int64 and bool tensors in builds with the closed pull request #5195."""
    content = tensor.numpy().tobytes()
    return ("__torch_tensor__", str(tensor.dtype), tuple(tensor.shape), str(tensor.device), content)


def _expect(holds: bool, difference: str) -> None:
    if not holds:
        raise ContractMismatch(difference)


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


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
    expected = {
        "_hashable": ["obj"],
        "_build_key": ["signature", "model_tag", "args", "kwargs"],
        "_detach_output": ["value"],
        "install_prompt_embed_cache": ["pipeline", "max_size", "enabled", "model_tag"],
    }
    for name, parameters in expected.items():
        function = getattr(module, name, None)
        _expect(isinstance(function, types.FunctionType), f"{name} is not a function")
        _expect(_parameters(function) == parameters, f"{name} takes {_parameters(function)}, not {parameters}")
    precomputed = getattr(module, "_PRECOMPUTED_EMBED_ARGS", None)
    _expect(
        isinstance(precomputed, tuple) and all(type(name) is str for name in precomputed),
        "_PRECOMPUTED_EMBED_ARGS is no tuple of names",
    )
    for name in ("_NOT_HASHABLE", "_CACHE_MISS"):
        _expect(hasattr(module, name), f"there is no {name}")
    cache = getattr(module, "PromptEmbedCache", None)
    _expect(inspect.isclass(cache), "there is no class PromptEmbedCache")
    for name, parameters in {"get": ["self", "key"], "put": ["self", "key", "value"], "clear": ["self"]}.items():
        method = getattr(cache, name, None)
        _expect(isinstance(method, types.FunctionType), f"PromptEmbedCache.{name} is not a function")
        _expect(_parameters(method) == parameters, f"PromptEmbedCache.{name} takes other parameters")


def _check_keys(module: Any) -> None:
    hashable, build_key, sentinel = module._hashable, module._build_key, module._NOT_HASHABLE
    for tensor in (torch.tensor([1, 2]), torch.tensor([[True]])):
        key = hashable(tensor)
        _expect(
            key is sentinel or key == _key_of_5195(tensor), f"this release keys tensors itself, as {key!r}, not as #5195"
        )
    _expect(hashable(torch.tensor([1.5])) is sentinel, "this release keys floating-point tensors itself")
    _expect(hashable(object()) is sentinel, "_hashable keys an unknown object")
    for scalar in (None, True, 3, 2.5, "a", b"a"):
        _expect(hashable(scalar) is scalar, f"_hashable changes {scalar!r}")
    nested = hashable(["a", (1, [None])])
    _expect(
        nested == ("__seq__", ("a", ("__seq__", (1, ("__seq__", (None,)))))), f"_hashable makes {nested!r} of lists"
    )
    mapping = hashable({"b": 1, "a": [2]})
    _expect(mapping == ("__dict__", (("'a'", ("__seq__", (2,))), ("'b'", 1))), f"_hashable makes {mapping!r} of dicts")

    key = build_key(_SIGNATURE, "tag", ("a",), {"mask": [1]})
    expected = ("tag", (("mask", ("__seq__", (1,))), ("prompt", "a"), ("prompt_embeds", None)))
    _expect(key == expected, f"_build_key makes {key!r}")
    partial = build_key(_SIGNATURE, "tag", (), {})
    _expect(
        partial == ("tag", (("mask", None), ("prompt_embeds", None))), f"_build_key makes {partial!r} of no arguments"
    )
    for kwargs in ({"unknown": 1}, {"prompt": "a", "prompt_embeds": 1}, {"prompt": object()}):
        _expect(build_key(_SIGNATURE, "tag", (), kwargs) is None, f"_build_key does not bypass {kwargs!r}")


def _check_calls(module: Any) -> None:
    seen: list[Any] = []

    def record(obj: Any) -> Any:
        seen.append(obj)
        return "recorded"

    key = _with_globals(module._build_key, _hashable=record)(_SIGNATURE, "tag", (1,), {"mask": [2]})
    _expect(seen == [[2], 1, None], "_build_key does not call _hashable on each argument in name order")
    _expect(
        key == ("tag", tuple((n, "recorded") for n in sorted(_SIGNATURE.parameters))), "_build_key ignores _hashable"
    )
    for container in ([1], (1,), {"a": 1}):
        seen.clear()
        _with_globals(module._hashable, _hashable=record)(container)
        _expect(seen == [1], f"_hashable does not call itself on the items of a {type(container).__name__}")


def _check_cache(module: Any) -> None:
    built: list[Any] = []
    stored: list[Any] = []

    def build_key(*args: Any) -> Any:
        built.append(args)
        return "key" if args[2] else None

    class Cache(module.PromptEmbedCache):  # type: ignore[misc]
        def put(self, key: Any, value: Any) -> None:
            stored.append((key, value))
            super().put(key, value)

    class Pipeline:
        def encode_prompt(self, prompt: Any = None) -> Any:
            return (prompt, torch.ones(1))

    empty = module.PromptEmbedCache(max_size=1)
    _expect(isinstance(getattr(empty, "_store", None), OrderedDict), "PromptEmbedCache has no OrderedDict _store")
    _expect(hasattr(getattr(empty, "_lock", None), "__enter__"), "PromptEmbedCache has no _lock")

    quiet = logging.Logger("omni_tensor_key.probe", logging.CRITICAL)
    pipeline = Pipeline()
    install = _with_globals(
        module.install_prompt_embed_cache, _build_key=build_key, PromptEmbedCache=Cache, logger=quiet
    )
    cache = install(pipeline, max_size=2, enabled=True, model_tag="tag")
    _expect(isinstance(cache, Cache), "install_prompt_embed_cache does not return its PromptEmbedCache")
    first, second = pipeline.encode_prompt("a"), pipeline.encode_prompt("a")
    _expect(
        len(built) == 2 and built[0][1:] == ("tag", ("a",), {}), "the wrapper does not call _build_key at each call"
    )
    _expect([key for key, _ in stored] == ["key"], "the wrapper does not store a miss through PromptEmbedCache.put")
    _expect(
        second is stored[0][1] and first[1] is not second[1], "the wrapper does not return the stored value on a hit"
    )
    pipeline.encode_prompt()
    counts = cache.stats()
    found = tuple(counts.get(name) for name in ("hits", "misses", "bypassed"))
    _expect(found == (1, 1, 1), f"a miss, a hit and a bypass are counted as {found}")


def _has_known_rules(module: Any) -> bool:
    """Whether _hashable and _build_key are, to the letter, those of a known release.

    If not, they may follow rules that no probe asks for, and must go on doing all but the tensors themselves.
    """
    try:
        source = inspect.getsource(module._hashable) + inspect.getsource(module._build_key)
    except (OSError, TypeError):
        return False
    return hashlib.sha256(source.encode()).hexdigest() in _KNOWN_RULES


def check_contract(module: types.ModuleType) -> bool:
    """Return whether upstream's own functions must go on doing all but the tensors, in a module that is as expected.

    Raises ContractMismatch unless `module` is the prompt-embedding cache as this package knows it. Anything that a
    probe raises counts as a difference too.
    """
    try:
        _check_names(module)
        _check_keys(module)
        _check_calls(module)
        _check_cache(module)
    except ContractMismatch:
        raise
    except Exception as error:
        raise ContractMismatch(f"a probe failed with {type(error).__name__}: {error}") from error
    return not _has_known_rules(module)
