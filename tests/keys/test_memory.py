"""A key costs its content and at most 256 bytes, keeps no tensor alive, and every reference is given back."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from omni_tensor_key import TensorKey, UncacheableTensorError, _core, tensor_key, tensor_keys
from omni_tensor_key.keys.host_copy import to_host

from .support import Active

OVERHEAD = 256  # bytes per tensor, beside the content


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def references(objects: list[Any]) -> list[int]:
    gc.collect()
    return [sys.getrefcount(value) for value in objects]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 1024), (1024, 1), (2, 3, 4, 5, 6), (1,) * 16])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_size_of_one_key(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    key = tensor_key(torch.ones(shape, dtype=dtype))
    assert key.nbytes <= sys.getsizeof(key) <= key.nbytes + OVERHEAD


@pytest.mark.parametrize("shape", [(1,), (1, 77), (1, 1024)])
def test_what_the_allocator_sees(shape: tuple[int, ...]) -> None:
    count = 2000
    tensors = [torch.full(shape, i) for i in range(count)]
    keys: list[TensorKey | None] = [None] * count
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i, tensor in enumerate(tensors):
            keys[i] = tensor_key(tensor)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    content = count * tensors[0].nbytes
    assert content <= used <= content + count * OVERHEAD + 20_000  # the interpreter's own caches


def test_a_key_keeps_neither_tensor_nor_storage_alive() -> None:
    ids = torch.arange(1000)
    view = ids[::2]
    keys = tensor_keys([ids, view])
    tensors = weakref.ref(ids), weakref.ref(view)
    storage = StorageWeakRef(ids.untyped_storage())
    del ids, view
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None]
    assert storage.expired()
    assert keys == tensor_keys([torch.arange(1000), torch.arange(0, 1000, 2)])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_keys_that_are_dropped_leave_memory_flat(strided: bool) -> None:
    ids = torch.zeros(1, 1024, 2, dtype=torch.int64)[:, :, 0] if strided else torch.zeros(1, 1024, dtype=torch.int64)
    digests = set()

    def make_and_drop(count: int, start: int) -> None:
        for i in range(start, start + count):
            ids[0, i % 1024] = i
            digests.add(hash(tensor_key(ids)))

    make_and_drop(2000, 1)
    before = resident_bytes()
    make_and_drop(20_000, 2001)  # 160 MB of content
    assert len(digests) == 22_000
    assert resident_bytes() - before < 16 << 20


def test_a_dictionary_of_keys_is_given_back() -> None:
    ids = torch.zeros(1, 1024, dtype=torch.int64)

    def fill_and_clear() -> int:
        cache = {}
        for i in range(10_000):
            ids[0, i % 1024] = i + 1
            cache[tensor_key(ids)] = i
        assert len(cache) == 10_000
        full = resident_bytes()
        cache.clear()
        return full

    ids.zero_()
    fill_and_clear()
    before = resident_bytes()
    ids.zero_()
    assert fill_and_clear() - before < 120 << 20  # 82 MB of content
    assert resident_bytes() - before < 16 << 20


def refuse(*tensors: Any) -> None:
    with pytest.raises(UncacheableTensorError):
        tensor_keys(tensors)


def refuse_parts() -> None:
    with pytest.raises(ValueError, match="parts of a TensorKey"):
        _core.restore_key(0, 64, 1, 0, (1, 3), b"short")


IDS = torch.arange(64).reshape(8, 8)
FLOATS = torch.zeros(3)
EMPTY = torch.empty(0)
SPARSE = torch.eye(3, dtype=torch.int64).to_sparse()
OPERATIONS: dict[str, Callable[[], object]] = {
    "keys": lambda: tensor_keys([IDS, IDS.T, EMPTY]),
    "attributes": lambda: (lambda k: (k.digest, k.hexdigest, k.dtype, k.shape, k.device, k.nbytes))(tensor_key(IDS)),
    "equal": lambda: tensor_key(IDS) == tensor_key(IDS),
    "unequal": lambda: tensor_key(IDS) != None,  # noqa: E711
    "hash and repr": lambda: (hash(tensor_key(IDS)), repr(tensor_key(IDS))),
    "refused dtype": lambda: refuse(FLOATS),
    "refused layout": lambda: refuse(SPARSE),
    "refused type": lambda: refuse(None),
    "refused after others": lambda: refuse(IDS, IDS.T, FLOATS),
    "pickle": lambda: pickle.loads(pickle.dumps(tensor_key(IDS))),
    "damaged pickle": lambda: refuse_parts(),
    "hash of bytes": lambda: _core.xxh3_128(b"abc", "scalar"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_references_are_balanced(name: str) -> None:
    operation = OPERATIONS[name]
    watched = [IDS, FLOATS, EMPTY, SPARSE, TensorKey, to_host, torch.int64, UncacheableTensorError]
    if sys.version_info < (3, 12):  # immortal since
        watched += [None, True, False, NotImplemented]
    operation()
    before, blocks = references(watched), sys.getallocatedblocks()
    for _ in range(1000):
        operation()
    after = references(watched)
    assert sys.getallocatedblocks() - blocks < 200
    # None is used by everything that runs here, so a few of its references may come and go.
    drift = {str(value): b - a for value, a, b in zip(watched, before, after, strict=True) if abs(b - a) > 50}
    assert not drift


def test_a_key_builder_gives_its_references_back() -> None:
    refused, state, kwargs = torch.zeros(2), object(), {"m": [IDS, {"a": (IDS, 1)}]}
    signature = inspect.signature(lambda a, m=None, n=1: None)
    exotic = inspect.signature(lambda a, m=None, n=[]: None)

    def use() -> None:
        active = Active()
        active.state = state
        for each in (signature, exotic):
            for _ in range(3):
                assert active._build_key(each, "tag", (IDS,), kwargs)[2] is state
                assert active._build_key(each, "tag", (refused,), kwargs) is None
                assert active._build_key(each, "tag", (), {"unknown": 1}) is None
            active.state = "tracing"
            assert active._build_key(each, "tag", (IDS,), kwargs) is None
            active.state = state
        assert active._hashable((IDS, 1)) == ("__seq__", (tensor_key(IDS), 1))

    use()
    watched = [IDS, refused, state, signature, exotic, kwargs["m"], TensorKey, to_host]
    before = references(watched)
    for _ in range(20):
        use()
    assert references(watched) == before


def test_a_key_builder_in_a_cycle_is_collected() -> None:
    active = Active()
    gone = weakref.ref(active)
    active._build_key(inspect.signature(lambda a: None), "tag", (IDS,), {})
    del active
    gc.collect()
    assert gone() is None
