"""What has no key bypasses the cache as it does without the extension, before any byte of a tensor is read."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch._subclasses import FakeTensorMode

from .fresh_process import FreshProcesses
from .support import Pipeline, counts, identical, installed, pristine

pytestmark = pytest.mark.usefixtures("active")


class Ids(torch.Tensor):
    pass


def on_meta() -> torch.Tensor:
    return torch.ones(2, dtype=torch.int64, device="meta")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(2, dtype=torch.int64)


def without_storage() -> torch.Tensor:
    tensor = torch.ones(8, dtype=torch.int64)
    tensor.untyped_storage().resize_(0)
    return tensor


def object_array(item: Any) -> Any:
    """Upstream unpacks it, and would never have got a key for what is in it."""
    array = np.empty((), dtype=object)
    array[()] = item
    return array


REFUSED: dict[str, Callable[[], Any]] = {
    "float": lambda: torch.ones(2),
    "half": lambda: torch.ones(2, dtype=torch.float16),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": on_meta,
    "fake": fake,
    "sparse": lambda: torch.ones(2, 2, dtype=torch.int64).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "subclass": lambda: torch.ones(2, dtype=torch.int64).as_subclass(Ids),
    "too large": lambda: torch.zeros((1 << 20) + 1, dtype=torch.uint8),
    "no storage": without_storage,
    "PIL image": lambda: Image.new("RGB", (2, 2)),
    "numpy array": lambda: np.arange(2),
    "object array": lambda: np.array([torch.ones(2), None], dtype=object),
    "object array of one tensor": lambda: object_array(torch.ones(2).bool()),
    "object array of one list": lambda: object_array([torch.ones(2).bool()]),
    "set": lambda: {1, 2},
    "object": object,
    "range": lambda: range(2),
    "generator": lambda: (i for i in range(2)),
}


PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "alone": lambda value: {"condition_images": value},
    "in a list": lambda value: {"condition_images": [torch.ones(1).bool(), value]},
    "deep": lambda value: {"condition_images": [{"a": (torch.ones(1).bool(), [value])}]},
}


class Counter(Pipeline):
    """Looks at nothing."""

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None, condition_images: Any = None) -> int:
        self.runs += 1
        return self.runs


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_bypasses(make: Callable[[], Any], place: Callable[[Any], dict[str, Any]]) -> None:
    pipeline, cache = installed(Counter())
    for run in (1, 2):
        assert pipeline.encode_prompt(torch.arange(3), torch.arange(3), **place(make())) == run
        assert counts(cache) == (0, 0, run)
    assert cache.stats()["size"] == 0


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_bypasses_as_the_prompt(make: Callable[[], Any]) -> None:
    pipeline, cache = installed(Counter())
    assert [pipeline.encode_prompt(make()), pipeline.encode_prompt(prompt_ids=make())] == [1, 2]
    assert counts(cache) == (0, 0, 2)


@pytest.mark.parametrize(
    "name",
    [
        "prompt_embeds",
        "negative_prompt_embeds",
        "pooled_prompt_embeds",
        "negative_pooled_prompt_embeds",
        "prompt_embeds_mask",
        "negative_prompt_embeds_mask",
    ],
)
@pytest.mark.parametrize("value", [torch.ones(1, 2, 8), torch.ones(2).bool(), torch.empty(0), 0, "x"], ids=repr)
def test_precomputed_embeddings_bypass(name: str, value: Any) -> None:
    assert name in pristine()._PRECOMPUTED_EMBED_ARGS
    namespace: dict[str, Any] = {}
    exec(f"def encode_prompt(self, prompt_ids, {name}=None): return 'text'", namespace)
    pipeline, cache = installed(type("Precomputed", (), namespace)())
    for _ in range(2):
        pipeline.encode_prompt(torch.arange(3), **{name: value})
    assert counts(cache) == (0, 0, 2)
    for _ in range(2):
        pipeline.encode_prompt(torch.arange(3), **{name: None})
    assert counts(cache) == (1, 1, 2)


@pytest.mark.parametrize("arguments", [{"unknown": 1}, {"prompt_ids": 1, "a": 2}], ids=repr)
def test_arguments_that_do_not_bind(arguments: dict[str, Any]) -> None:
    pipeline, cache = installed()
    with pytest.raises(TypeError):
        pipeline.encode_prompt(torch.arange(3), **arguments)
    assert counts(cache) == (0, 0, 1)


def test_a_disabled_cache_counts_nothing() -> None:
    pipeline, cache = installed(enabled=False)
    first, second = (pipeline.encode_prompt(torch.arange(3)) for _ in range(2))
    assert counts(cache) == (0, 0, 0)
    assert pipeline.runs == 2
    assert identical(first, second)


def test_the_cache_can_be_switched_while_it_holds_entries() -> None:
    pipeline, cache = installed()
    for enabled, expected in ((True, (0, 1, 0)), (False, (0, 1, 0)), (True, (1, 1, 0))):
        cache.enabled = enabled
        pipeline.encode_prompt(torch.arange(3))
        assert counts(cache) == expected


def test_nothing_after_an_argument_without_a_key_is_walked(active: Any) -> None:
    """As upstream, which stops there: what comes later may raise."""

    class Raises:
        def __repr__(self) -> str:
            raise ValueError("walked")

    def encode(a: Any, z: Any) -> None: ...

    signature = inspect.signature(encode)
    assert active._build_key(signature, "tag", (torch.ones(2), {Raises(): 1}), {}) is None
    with pytest.raises(ValueError, match="walked"):
        active._build_key(signature, "tag", (torch.ones(2).bool(), {Raises(): 1}), {})


# The IDs lie in a page of memory that cannot be read: whoever reads it dies.
UNREADABLE = """
import ctypes, mmap, signal, sys
import torch
from omni_tensor_key import activate
from upstream.support import installed, counts
from upstream.test_bypass import Counter, REFUSED

activate()
memory = mmap.mmap(-1, mmap.PAGESIZE)
ids = torch.frombuffer(memory, dtype=torch.int64)
address = ctypes.c_void_p(ids.data_ptr())
assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
pipeline, cache = installed(Counter())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="page protection is set with Linux's mprotect")
def test_a_call_that_bypasses_reads_no_byte_of_a_tensor(fresh: FreshProcesses) -> None:
    path = f"import sys; sys.path[:0] = {[entry for entry in sys.path if entry.endswith('tests')]!r}\n"
    bypasses = """
for make in REFUSED.values():
    pipeline.encode_prompt(ids, ids[::2], make())
    pipeline.encode_prompt(ids, condition_images=[ids, {"a": (ids, make())}])
    pipeline.encode_prompt([ids, make()])
assert counts(cache) == (0, 0, 3 * len(REFUSED))
"""
    fresh.check(path + UNREADABLE + bypasses)
    assert fresh.run(path + UNREADABLE + "pipeline.encode_prompt(ids)").status == -11
