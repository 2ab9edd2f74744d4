"""A cache module that differs in one thing this package relies on is left alone, and one warning says what differs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from support import upstream

from .fresh_process import CACHE, FreshProcesses


class Change(NamedTuple):
    """One thing that differs from upstream's source, and words of the warning that follows; "": none, it is active."""

    name: str
    words: str
    old: str
    new: str


KEY_TENSORS = """    if isinstance(obj, torch.Tensor) and obj.dtype in (torch.int64, torch.bool):
        return ("__torch_tensor__", str(obj.dtype), tuple(obj.shape), str(obj.device), obj.numpy().tobytes())
    if isinstance(obj, dict):
        items = []"""
DICTS = "    if isinstance(obj, dict):\n        items = []"

CHANGES = [
    # What is replaced or used is not there.
    Change("hashable is gone", "no attribute '_hashable'", "def _hashable(", "def _key_of("),
    Change("no sentinel", "no attribute '_NOT_HASHABLE'", "_NOT_HASHABLE", "_REFUSED"),
    Change("no names of embeddings", "no attribute '_PRECOMPUTED", "_PRECOMPUTED_EMBED_ARGS", "_EMBED_ARGS"),
    Change("another class", "no attribute 'PromptEmbedCache'", "PromptEmbedCache", "EmbedCache"),
    Change("clear is gone", "no attribute 'clear'", "def clear(", "def reset("),
    Change("counts have other names", "'hits'", '"hits": self.hits', '"hit": self.hits'),
    Change("another cache is returned", "a probe failed", "    return cache\n", "    return object()\n"),
    # Tensors are keyed by upstream.
    Change("without their device", "keys tensors itself", DICTS, KEY_TENSORS.replace(" str(obj.device),", "")),
    Change("by their sum", "keys tensors itself", DICTS, KEY_TENSORS.replace("obj.numpy().tobytes()", "obj.sum()")),
    Change(
        "of any dtype",
        "keys an unknown Tensor",
        DICTS,
        KEY_TENSORS.replace("(torch.int64, torch.bool)", "(torch.int64, torch.bool, torch.float32)"),
    ),
    Change(
        "objects by repr",
        "keys an unknown object",
        "→ not safe.\n    return _NOT_HASHABLE",
        "\n    return _NOT_HASHABLE if isinstance(obj, torch.Tensor) else repr(obj)",
    ),
    # A replacement would not be seen, or not be asked.
    Change("build_key keeps hashable", "not 1", "    kwargs: dict,\n", "    kwargs, *, _hashable=_hashable\n"),
    Change("build_key calls another", "not 1", "_hashable(bound.arguments[name])", "FIRST(bound.arguments[name])"),
    Change("no build_key", "not 1", "_build_key(signature, tag, args, kwargs)", "(tag, _hashable(args))"),
    Change("keys are made at installation", ".put", "key = _build_key(", "key = BUILD("),
    Change("stored without put", ".put", "cache.put(key, _detach_output(out))", "cache._store[key] = out"),
    # Calls are cached otherwise.
    Change(
        "embeddings are keyed", "prompt_embeds", "bound.arguments[name] is not None", "bound.arguments[name] is ..."
    ),
    Change("bypasses are not counted", "counted", "cache.bypassed += 1", "pass"),
    # What this package needs not know.
    Change("install takes more", "", "    model_tag: str | None = None,", "    model_tag=None, shared=False,"),
    Change("put takes more", "", "def put(self, key: Any, value: Any)", "def put(self, key, value, cost=0)"),
    Change("scalars become text", "", "bytes)):\n        return obj", "bytes)):\n        return str(obj)"),
    Change("another tag of lists", "", '"__seq__"', '"__list__"'),
    Change("keys of dicts as they are", "", "items.append((repr(k), v))", "items.append((k, v))"),
    Change("another order", "", "sorted(bound.arguments.keys())", "sorted(bound.arguments)[::-1]"),
    Change("another shape", "", "return (model_tag, tuple(items))", "return (model_tag, *items)"),
    Change("no defaults", "", "    bound.apply_defaults()\n", ""),
    Change(
        "a call can ask to bypass",
        "",
        "    # Bypass when the caller",
        '    if bound.arguments.get("fresh"):\n        return None\n    # Bypass when the caller',
    ),
    Change(
        "an argument is no part of the key",
        "",
        "        h = _hashable(bound.arguments[name])",
        '        if name == "request_id":\n            continue\n        h = _hashable(bound.arguments[name])',
    ),
    Change(
        "long lists are refused",
        "",
        "    if isinstance(obj, (list, tuple)):",
        "    if isinstance(obj, list) and len(obj) > 100:\n        return _NOT_HASHABLE\n"
        "    if isinstance(obj, (list, tuple)):",
    ),
]

# Bound while the module is imported: a replacement made later would not be seen.
EARLY = """

_REAL = dict(globals())
FIRST = lambda obj: _REAL["_hashable"](obj)
BUILD = lambda *args: _REAL["_build_key"](*args)
"""

ACTIVATE = """
import inspect, sys, types
import torch
module = types.ModuleType(CACHE)
sys.modules[CACHE] = module
exec(compile(SOURCE, CACHE, "exec"), vars(module))

def attributes():
    classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == CACHE]
    return [(id(owner), name, id(value)) for owner in (module, *classes) for name, value in vars(owner).items()]

def encode(prompt, mask=None, fresh=False, request_id=0): ...
def keys():
    return [module._build_key(inspect.signature(encode), "tag", (), call) for call in CALLS]

before = attributes()
import omni_tensor_key
for _ in range(3):
    omni_tensor_key.activate()
print("ACTIVE", omni_tensor_key.is_active(), "UNTOUCHED", attributes() == before)
"""

# Keys of calls without tensors are upstream's own, whatever its rules; calls with tensors have guarded entries.
FOLLOWED = """
from omni_tensor_key.upstream.guarded_cache import has_tensors
CALLS = [{"prompt": "a"}, {"prompt": "a", "fresh": True}, {"prompt": "a", "request_id": 3}, {"prompt": ("a", {"b": 1})}]
CALLS += [{"prompt": "a" * 1000}, {"prompt": ["a" * 1000]}, {"prompt": [1] * 1000}, {"prompt": ([1] * 1000,)}]
ours = keys()
ids = torch.tensor([1, 2])
keyed = module._build_key(inspect.signature(encode), "tag", (ids,), {"mask": [ids.bool(), (ids,)]})
assert has_tensors(keyed), keyed
omni_tensor_key.deactivate()
assert ours == keys(), (ours, keys())
assert attributes() == before
"""


def source() -> str:
    return Path(upstream.__file__).read_text(encoding="utf-8")


def code(text: str) -> str:
    return f"CACHE = {CACHE!r}\nSOURCE = {text!r}\n{ACTIVATE}"


@pytest.mark.parametrize("change", [Change("none", "", "a", "a"), *CHANGES], ids=lambda change: change.name)
def test_it_stands_down_or_follows(fresh: FreshProcesses, change: Change) -> None:
    assert change.old in source(), "upstream's source is another one"
    text = source().replace(change.old, change.new) + EARLY
    if change.words:
        result = fresh.check(code(text))
        assert result.lines_with("ACTIVE") == ["ACTIVE False UNTOUCHED True"], result.output
        (line,) = result.lines_with("omni_tensor_key")
        assert line.startswith("WARNING ")
        assert "vllm-omni 0." in line
        assert change.words in line.split("stands down", 1)[1]
    else:
        result = fresh.check(code(text) + FOLLOWED)
        assert result.lines_with("ACTIVE") == ["ACTIVE True UNTOUCHED False"]
        assert not result.lines_with("WARNING")


WITH_5195 = """
def encode(ids, mask=None): ...
from omni_tensor_key.freshness.torch_state import TorchState
class Own(torch.Tensor): ...
signature = inspect.signature(encode)
ids = torch.tensor([1, 2])
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


def test_a_module_that_is_not_a_cache_at_all(fresh: FreshProcesses) -> None:
    for text in ("", "def __getattr__(name): raise OSError(name)", "_hashable = _build_key = 1"):
        result = fresh.check(code(text))
        assert result.lines_with("ACTIVE") == ["ACTIVE False UNTOUCHED True"]
        assert len(result.lines_with("stands down")) == 1
