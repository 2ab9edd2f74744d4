"""A cache module that differs in one thing this package relies on is left alone, and one warning says what differs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from support import upstream

from .fresh_process import CACHE, FreshProcesses


class Change(NamedTuple):
    """One thing that differs from upstream's source, and a word of the warning that follows."""

    name: str
    word: str
    old: str
    new: str


KEY_TENSORS = """    if isinstance(obj, torch.Tensor) and obj.dtype in (torch.int64, torch.bool):
        return ("__torch_tensor__", str(obj.dtype), tuple(obj.shape), str(obj.device), obj.numpy().tobytes())
    if isinstance(obj, dict):
        items = []"""

CHANGES = [
    # Names and parameters.
    Change("hashable is gone", "_hashable", "def _hashable(", "def _key_of("),
    Change("hashable names it otherwise", "_hashable", "def _hashable(obj: Any)", "def _hashable(value: Any)"),
    Change("build_key takes another order", "_build_key", "    args: tuple,\n    kwargs: dict", "    kwargs, args"),
    Change("install takes more", "install", "    model_tag: str | None = None,", "    model_tag=None, shared=False,"),
    Change("no sentinel", "_NOT_HASHABLE", "_NOT_HASHABLE", "_REFUSED"),
    Change("no names of embeddings", "_PRECOMPUTED_EMBED_ARGS", "_PRECOMPUTED_EMBED_ARGS", "_EMBED_ARGS"),
    Change(
        "names of embeddings in a list",
        "_PRECOMPUTED_EMBED_ARGS",
        "def _hashable",
        "_PRECOMPUTED_EMBED_ARGS = list(_PRECOMPUTED_EMBED_ARGS)\n\n\ndef _hashable",
    ),
    Change("another class", "PromptEmbedCache", "PromptEmbedCache", "EmbedCache"),
    Change("put takes more", "put", "def put(self, key: Any, value: Any)", "def put(self, key, value, cost=0)"),
    Change("clear is gone", "clear", "def clear(", "def reset("),
    # Keys of values.
    Change(
        "tensors are keyed without their device",
        "keys tensors itself",
        "    if isinstance(obj, dict):\n        items = []",
        KEY_TENSORS.replace(" str(obj.device),", ""),
    ),
    Change(
        "tensors are keyed by their sum",
        "keys tensors itself",
        "    if isinstance(obj, dict):\n        items = []",
        KEY_TENSORS.replace("obj.numpy().tobytes()", "obj.sum().item()"),
    ),
    Change(
        "floating-point tensors are keyed",
        "keys an unknown Tensor",
        "    if isinstance(obj, dict):\n        items = []",
        KEY_TENSORS.replace("(torch.int64, torch.bool)", "(torch.int64, torch.bool, torch.float32)"),
    ),
    Change(
        "objects are keyed by repr",
        "unknown object",
        "→ not safe.\n    return _NOT_HASHABLE",
        "\n    return _NOT_HASHABLE if isinstance(obj, torch.Tensor) else repr(obj)",
    ),
    Change("scalars become text", "_hashable", "bytes)):\n        return obj", "bytes)):\n        return str(obj)"),
    Change("another tag of lists", "lists", '"__seq__"', '"__list__"'),
    Change("lists stay lists", "lists", '("__seq__", tuple(out))', '("__seq__", out)'),
    Change("keys of dicts as they are", "dicts", "items.append((repr(k), v))", "items.append((k, v))"),
    # Keys of calls.
    Change("another order", "_build_key", "sorted(bound.arguments.keys())", "sorted(bound.arguments)[::-1]"),
    Change("another shape", "_build_key", "return (model_tag, tuple(items))", "return (model_tag, *items)"),
    Change("no defaults", "_build_key", "    bound.apply_defaults()\n", ""),
    Change("what does not bind raises", "probe", "except TypeError:\n", "except OSError:\n"),
    Change("embeddings are keyed", "_build_key", "bound.arguments[name] is not None", "bound.arguments[name] is ..."),
    # What is looked up at every call.
    Change("build_key keeps hashable", "_build_key", "    kwargs: dict,\n", "    kwargs, *, _hashable=_hashable\n"),
    Change("build_key calls another", "_build_key", "_hashable(bound.arguments[name])", "FIRST(bound.arguments[name])"),
    Change("lists call another", "_hashable", "_hashable(item)", "FIRST(item)"),
    Change("dicts call another", "_hashable", "_hashable(obj[k])", "FIRST(obj[k])"),
    # The wrapper and the cache.
    Change("keys are made at installation", "PromptEmbedCache.put", "key = _build_key(", "key = BUILD("),
    Change(
        "no build_key", "PromptEmbedCache.put", "_build_key(signature, tag, args, kwargs)", "(tag, _hashable(args))"
    ),
    Change("stored without put", "put", "cache.put(key, _detach_output(out))", "cache._store[key] = out"),
    Change("a hit is wrapped", "hit", "            return hit\n", "            return (*hit,)[:1]\n"),
    Change("another cache is returned", "PromptEmbedCache", "    return cache\n", "    return pipeline\n"),
    Change("bypasses are not counted", "counted", "cache.bypassed += 1", "pass"),
    Change("counts have other names", "counted", '"hits": self.hits', '"hit": self.hits'),
]

# Bound while the module is imported: a replacement made later would not be seen.
EARLY = """

_REAL = dict(globals())
FIRST = lambda obj: _REAL["_hashable"](obj)
BUILD = lambda *args: _REAL["_build_key"](*args)
"""

ACTIVATE = """
import sys, types
module = types.ModuleType(CACHE)
sys.modules[CACHE] = module
exec(compile(SOURCE, CACHE, "exec"), vars(module))

def attributes():
    classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == CACHE]
    return [(id(owner), name, id(value)) for owner in (module, *classes) for name, value in vars(owner).items()]

before = attributes()
import omni_tensor_key
for _ in range(3):
    omni_tensor_key.activate()
print("ACTIVE", omni_tensor_key.is_active(), "UNTOUCHED", attributes() == before)
omni_tensor_key.deactivate()
assert attributes() == before
"""


def source() -> str:
    return Path(upstream.__file__).read_text(encoding="utf-8")


def code(text: str) -> str:
    return f"CACHE = {CACHE!r}\nSOURCE = {text!r}\n{ACTIVATE}"


def test_the_module_as_it_is(fresh: FreshProcesses) -> None:
    for text in (source(), source() + EARLY):
        result = fresh.check(code(text))
        assert result.lines_with("ACTIVE") == ["ACTIVE True UNTOUCHED False"]
        assert not result.lines_with("WARNING")


WITH_5195 = """
import torch
def encode(ids, mask=None): ...
import inspect
from omni_tensor_key.freshness.torch_state import TorchState
class Own(torch.Tensor): ...
signature = inspect.signature(encode)
ids = torch.tensor([1, 2])
omni_tensor_key.activate()
assert omni_tensor_key.is_active()
tag, items, state = module._build_key(signature, "tag", (ids,), {"mask": [ids.bool(), (ids,)]})
key = omni_tensor_key.tensor_key
assert items == (("ids", key(ids)), ("mask", ("__seq__", (key(ids.bool()), ("__seq__", (key(ids),)))))), items
assert type(state) is TorchState and tag == "tag"
for refused in (ids.as_subclass(Own), ids.float(), torch.ones(2, dtype=torch.int64, device="meta"), object()):
    assert module._build_key(signature, "tag", (refused,), {}) is None, refused
    assert module._build_key(signature, "tag", (ids,), {"mask": [refused]}) is None, refused
text = module._build_key(signature, "tag", ("a",), {"mask": [1]})
omni_tensor_key.deactivate()
assert text == module._build_key(signature, "tag", ("a",), {"mask": [1]})
assert module._build_key(signature, "tag", (ids.as_subclass(Own),), {}) is not None  # which is why we refuse it
"""


def test_a_build_with_5195_is_active(fresh: FreshProcesses) -> None:
    text = source().replace("    if isinstance(obj, dict):\n        items = []", KEY_TENSORS)
    assert text != source()
    result = fresh.check(code(text) + WITH_5195)
    assert result.lines_with("ACTIVE") == ["ACTIVE True UNTOUCHED False"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_stands_down(fresh: FreshProcesses, change: Change) -> None:
    assert change.old in source(), "upstream's source is another one"
    result = fresh.check(code(source().replace(change.old, change.new) + EARLY))
    assert result.lines_with("ACTIVE") == ["ACTIVE False UNTOUCHED True"], result.output
    (line,) = result.lines_with("omni_tensor_key")
    assert line.startswith("WARNING ")
    assert "vllm-omni 0." in line
    difference = line.split("stands down", 1)[1]
    assert change.word in difference
    assert ("probe failed" in difference) == (change.word == "probe"), "not the difference that was meant"


def test_a_module_that_is_not_a_cache_at_all(fresh: FreshProcesses) -> None:
    for text in ("", "def __getattr__(name): raise OSError(name)", "_hashable = _build_key = 1"):
        result = fresh.check(code(text))
        assert result.lines_with("ACTIVE") == ["ACTIVE False UNTOUCHED True"]
        assert len(result.lines_with("stands down")) == 1


# Upstream bypasses or keys a call in a new way that no probe runs into.
NEW_RULES = {
    "a call can ask to bypass": (
        "    # Bypass when the caller",
        '    if bound.arguments.get("fresh"):\n        return None\n    # Bypass when the caller',
    ),
    "an argument is no part of the key": (
        "        h = _hashable(bound.arguments[name])",
        '        if name == "request_id":\n            continue\n        h = _hashable(bound.arguments[name])',
    ),
    "long text is refused": (
        "    if obj is None or isinstance(obj",
        "    if isinstance(obj, str) and len(obj) > 100:\n        return _NOT_HASHABLE\n"
        "    if obj is None or isinstance(obj",
    ),
    "long lists are refused": (
        "    if isinstance(obj, (list, tuple)):",
        "    if isinstance(obj, list) and len(obj) > 100:\n        return _NOT_HASHABLE\n"
        "    if isinstance(obj, (list, tuple)):",
    ),
}

KEYS = """
import inspect
def encode(prompt, fresh=False, request_id=0): ...
calls = [{"prompt": "a"}, {"prompt": "a", "fresh": True}, {"prompt": "a", "request_id": 3}]
calls += [{"prompt": "a" * 1000}, {"prompt": ["a" * 1000]}, {"prompt": [1] * 1000}, {"prompt": ([1] * 1000,)}]
def keys():
    return [module._build_key(inspect.signature(encode), "tag", (), call) for call in calls]
omni_tensor_key.activate()
with_the_extension = keys()
omni_tensor_key.deactivate()
assert with_the_extension == keys(), (with_the_extension, keys())
"""


@pytest.mark.parametrize(("old", "new"), NEW_RULES.values(), ids=NEW_RULES)
def test_a_new_rule_that_no_probe_sees_is_followed(fresh: FreshProcesses, old: str, new: str) -> None:
    assert old in source(), "upstream's source is another one"
    fresh.check(code(source().replace(old, new)) + KEYS)
