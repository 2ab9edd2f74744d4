"""A cache module that differs in one thing this package relies on is left alone, and one warning says what differs.

One that keys int64 and bool tensors in exactly the form of the closed pull request #5195 is none of these.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh_process import CACHE, FreshProcesses
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

SOURCE = Path(upstream.__file__).read_text(encoding="utf-8")
BEFORE_DICTS = "    if isinstance(obj, dict):\n        items = []"
FORM_5195 = """    if isinstance(obj, torch.Tensor) and obj.dtype in (torch.int64, torch.bool):
        data = obj.detach().cpu().contiguous().numpy().tobytes()
        return ("__torch_tensor__", str(obj.dtype), tuple(obj.shape), str(obj.device), data)
"""

# What differs: a word of the warning, and the text of upstream's source with what takes its place.
CHANGES = {
    # Names and parameters.
    "hashable is gone": ("_hashable", "def _hashable(", "def _key_of("),
    "hashable is no function": (
        "_hashable",
        "def _detach_output",
        "_hashable = functools.partial(_hashable)\n\n\ndef _detach_output",
    ),
    "hashable takes more": ("_hashable", "def _hashable(obj: Any)", "def _hashable(obj: Any, depth: int = 0)"),
    "build_key takes another order": ("_build_key", "    args: tuple,\n    kwargs: dict", "    kwargs, args"),
    "install takes more": ("install", "    model_tag: str | None = None,", "    model_tag=None, shared=False,"),
    "no sentinel": ("_NOT_HASHABLE", "_NOT_HASHABLE", "_REFUSED"),
    "no miss": ("_CACHE_MISS", "_CACHE_MISS", "_MISS"),
    "no names of embeddings": ("_PRECOMPUTED_EMBED_ARGS", "_PRECOMPUTED_EMBED_ARGS", "_EMBED_ARGS"),
    "another class": ("PromptEmbedCache", "PromptEmbedCache", "EmbedCache"),
    "put has another name": ("put", "put(", "insert("),
    "put takes more": ("put", "def put(self, key: Any, value: Any)", "def put(self, key, value, cost=0)"),
    "clear is gone": ("clear", "def clear(", "def reset("),
    # Keys of values.
    "tensors are keyed in another form": (
        "tensors",
        BEFORE_DICTS,
        FORM_5195.replace(" str(obj.device),", "") + BEFORE_DICTS,
    ),
    "tensors of all dtypes are keyed": (
        "keys tensor",
        BEFORE_DICTS,
        FORM_5195.replace(" and obj.dtype in (torch.int64, torch.bool)", "") + BEFORE_DICTS,
    ),
    "objects are keyed by repr": (
        "object object",
        "→ not safe.\n    return _NOT_HASHABLE",
        "\n    return _NOT_HASHABLE if isinstance(obj, torch.Tensor) else repr(obj)",
    ),
    "scalars become text": ("_hashable", "bytes)):\n        return obj", "bytes)):\n        return str(obj)"),
    "another tag of lists": ("lists", '"__seq__"', '"__list__"'),
    "another tag of dicts": ("dicts", '"__dict__"', '"__map__"'),
    "another order of dicts": ("dicts", "key=repr)", "key=repr, reverse=True)"),
    # Keys of calls.
    "the signature's order": ("_build_key", "sorted(bound.arguments.keys())", "list(bound.arguments)"),
    "another shape": ("_build_key", "return (model_tag, tuple(items))", "return (model_tag, *items)"),
    "no defaults": ("_build_key", "    bound.apply_defaults()\n", ""),
    "all arguments are wanted": ("_build_key", "signature.bind_partial(", "signature.bind("),
    "what does not bind raises": ("probe", "except TypeError:\n", "except OSError:\n"),
    "embeddings are keyed": ("_build_key", "bound.arguments[name] is not None", "bound.arguments[name] is ..."),
    # What is looked up at every call.
    "build_key keeps hashable": ("_build_key", "    kwargs: dict,\n", "    kwargs, *, _hashable=_hashable\n"),
    "build_key calls another": ("_build_key", "_hashable(bound.arguments[name])", "FIRST(bound.arguments[name])"),
    "lists call another": ("_hashable", "_hashable(item)", "FIRST(item)"),
    "dicts call another": ("_hashable", "_hashable(obj[k])", "FIRST(obj[k])"),
    # The wrapper and the cache.
    "keys are made at installation": ("put", "key = _build_key(", "key = BUILD("),
    "stored without put": ("put", "cache.put(key, _detach_output(out))", "cache._store[key] = out"),
    "stored with its gradient": ("stored", "cache.put(key, _detach_output(out))", "cache.put(key, out)"),
    "a hit is wrapped": ("hit", "            return hit\n", "            return (*hit,)[:1]\n"),
    "another cache is returned": ("PromptEmbedCache", "    return cache\n", "    return pipeline\n"),
    "bypasses are not counted": ("counted", "cache.bypassed += 1", "pass"),
    "no ordered store": ("probe", "OrderedDict()", "dict()"),
}

# Bound while the module is imported: a replacement made later would not be seen.
EARLY = """

_REAL = dict(globals())
FIRST = lambda obj: _REAL["_hashable"](obj)
BUILD = lambda *args: _REAL["_build_key"](*args)
"""
ACTIVATE = """
import linecache, sys, types
module = types.ModuleType(CACHE)
sys.modules[CACHE] = module
linecache.cache[CACHE] = (len(SOURCE), None, SOURCE.splitlines(True), CACHE)  # inspect finds the source there
exec(compile(SOURCE, CACHE, "exec"), vars(module))

def attributes():
    classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == CACHE]
    return [(id(owner), name, id(value)) for owner in (module, *classes) for name, value in vars(owner).items()]

before = attributes()
import omni_tensor_key
for _ in range(3):
    omni_tensor_key.activate()
print("ACTIVE", omni_tensor_key.is_active(), "UNTOUCHED", attributes() == before)
"""
PUT_BACK = """
omni_tensor_key.deactivate()
assert attributes() == before
"""


def code(text: str) -> str:
    return f"CACHE = {CACHE!r}\nSOURCE = {text!r}\n{ACTIVATE}"


def changed(old: str, new: str) -> str:
    assert old in SOURCE, "upstream's source is another one"
    return SOURCE.replace(old, new)


@pytest.mark.parametrize("text", [SOURCE, SOURCE + EARLY], ids=["as it is", "with more"])
def test_the_module_as_it_is(fresh: FreshProcesses, text: str) -> None:
    result = fresh.check(code(text) + PUT_BACK)
    assert result.lines_with("ACTIVE") == ["ACTIVE True UNTOUCHED False"]
    assert not result.lines_with("WARNING")


@pytest.mark.parametrize("change", CHANGES)
def test_stands_down(fresh: FreshProcesses, change: str) -> None:
    word, old, new = CHANGES[change]
    result = fresh.check(code(changed(old, new) + EARLY) + PUT_BACK)
    assert result.lines_with("ACTIVE") == ["ACTIVE False UNTOUCHED True"], result.output
    lines = result.lines_with("stands down")
    assert lines
    assert lines[0].startswith("WARNING ")
    assert "vllm-omni 0." in lines[0]
    difference = lines[0].split("stands down", 1)[1]
    assert word in difference
    assert ("probe failed" in difference) == (word == "probe"), "not the difference that was meant"


def test_a_module_that_is_not_a_cache_at_all(fresh: FreshProcesses) -> None:
    for text in ("", "def __getattr__(name): raise OSError(name)", "_hashable = _build_key = 1"):
        result = fresh.check(code(text) + PUT_BACK)
        assert result.lines_with("ACTIVE") == ["ACTIVE False UNTOUCHED True"]
        assert result.lines_with("stands down")


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
    "tensors as in #5195": (BEFORE_DICTS, FORM_5195 + BEFORE_DICTS),
}
KEYS = """
import inspect, torch
def encode(prompt, fresh=False, request_id=0): ...
calls = [{"prompt": "a"}, {"prompt": "a", "fresh": True}, {"prompt": "a", "request_id": 3}]
calls += [{"prompt": "a" * 1000}, {"prompt": ["a" * 1000]}, {"prompt": [1] * 1000}, {"prompt": ([1] * 1000,)}]
def keys():
    return [module._build_key(inspect.signature(encode), "tag", (), call) for call in calls]
with_the_extension = keys()
key = module._build_key(inspect.signature(encode), "tag", (), {"prompt": torch.arange(3)})
assert "TensorKey" in repr(key) and "__torch_tensor__" not in repr(key), key
omni_tensor_key.deactivate()
assert with_the_extension == keys(), (with_the_extension, keys())
"""


@pytest.mark.parametrize("rule", NEW_RULES)
def test_a_new_rule_that_no_probe_sees_is_followed(fresh: FreshProcesses, rule: str) -> None:
    result = fresh.check(code(changed(*NEW_RULES[rule])) + KEYS)
    assert result.lines_with("ACTIVE") == ["ACTIVE True UNTOUCHED False"], result.output


REFUSED = """
import torch
class Sub(torch.Tensor): ...
class Pipeline:
    def encode_prompt(self, prompt, mask=None):
        return torch.ones(1)
values = {
    "subclass": torch.arange(3).as_subclass(Sub), "dtype": torch.ones(2), "size": torch.zeros(1 << 18, dtype=torch.int64),
    "unexportable": torch.tensor([[1]]).to_sparse(),
}
for reason, value in values.items():
    for prompt in (value, [value], {"a": (value,)}):
        pipeline = Pipeline()
        cache = module.install_prompt_embed_cache(pipeline)
        for _ in range(2):
            pipeline.encode_prompt(prompt)
        counts = cache.stats()
        assert (counts["bypassed"], counts["size"]) == (2, 0), (reason, counts)
    found = omni_tensor_key.stats()["bypassed"]["Pipeline"]
    assert sum(reasons.get(reason, 0) for reasons in found.values()) == 6, found
pipeline = Pipeline()
cache = module.install_prompt_embed_cache(pipeline)
for kind in (torch.int64, torch.bool, torch.int32):
    for _ in range(2):
        pipeline.encode_prompt(torch.ones(2, dtype=kind))
assert (cache.hits, cache.misses) == (3, 3)
"""


@pytest.mark.parametrize("text", [SOURCE, changed(BEFORE_DICTS, FORM_5195 + BEFORE_DICTS)], ids=["release", "#5195"])
def test_a_tensor_that_is_refused_bypasses_whatever_upstream_says_of_it(fresh: FreshProcesses, text: str) -> None:
    fresh.check(code(text) + REFUSED, OMNI_TENSOR_KEY_MAX_BYTES="1024")
