"""What several tests here use: a key builder on upstream's own functions, and exact comparison with these."""

from __future__ import annotations

import importlib.util
import os
import random
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import hypothesis
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

from omni_tensor_key.keys import TensorKey, make_key_builder

SEED = int(os.environ.get("OMNI_TENSOR_KEY_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
LIMIT = 1 << 20
STATE = ("the state of torch",)


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Decorator: run a hypothesis test on this many examples, drawn from SEED."""
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,  # the machine may be busy
        database=None,  # the seed says it all
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda test: hypothesis.seed(SEED)(settings(test))


def load_upstream(name: str) -> types.ModuleType:
    """Upstream's module, loaded once more under another name."""
    spec = importlib.util.spec_from_file_location(name, upstream.__file__)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def pristine() -> types.ModuleType:
    """Upstream's module, of which nobody replaces a function."""
    return load_upstream("pristine_prompt_embed_cache")


class Active:
    """An instance of upstream's module whose two functions a KeyBuilder stands in for, and what it was told."""

    def __init__(self, tensors_only: bool = False, module: Any = None) -> None:
        self.module: Any = module or load_upstream("active_prompt_embed_cache")
        self.bypasses: list[tuple[str, str, str]] = []
        self.state: Any = STATE
        self.states = 0
        self.builder = make_key_builder(
            hashable=self.module._hashable,
            build_key=self.module._build_key,
            not_hashable=self.module._NOT_HASHABLE,
            precomputed=self.module._PRECOMPUTED_EMBED_ARGS,
            call_state=self._call_state,
            on_bypass=lambda *told: self.bypasses.append(told),
            max_bytes=LIMIT,
            tensors_only=tensors_only,
        )
        self._NOT_HASHABLE = self.module._NOT_HASHABLE
        self._hashable = self.module._hashable = self.builder.hashable
        self._build_key = self.module._build_key = self.builder.build_key

    def _call_state(self) -> Any:
        self.states += 1
        return self.state() if callable(self.state) else self.state


def same(a: Any, b: Any) -> bool:
    """Whether two keys are equal down to the exact type of every item, the sign of zero and NaN."""
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(same, a, b))
    if a is b:
        return True
    return repr(a) == repr(b) and (bool(a == b) or (a != a and b != b))


def outcome(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """What a call comes to: a value, a refusal or the type of an exception."""
    try:
        value = function(*args)
    except Exception as error:
        return "raises", type(error)
    is_refused = type(value) is object  # each instance of the module has a sentinel of its own
    return ("refuses", None) if is_refused else ("returns", value)


def agree(active: Any, signature: Any, args: Any, kwargs: Any, tag: Any = "tag") -> None:
    expected = outcome(pristine()._build_key, signature, tag, args, kwargs)
    for _ in range(2):  # a signature's plan is made at its first call
        got = outcome(active._build_key, signature, tag, args, kwargs)
        assert same(got, expected), f"{signature} called with {args} {kwargs}: {got!r}, but upstream: {expected!r}"


def tensor_keys_in(key: Any) -> list[TensorKey]:
    """The tensor keys in a key, in order."""
    if type(key) is tuple:
        return [found for item in key for found in tensor_keys_in(item)]
    return [key] if type(key) is TensorKey else []
