"""A key costs its content and at most 256 bytes, keeps no tensor alive, and every reference is given back."""

from __future__ import annotations

import gc
import os
import random
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from omni_tensor_key import TensorKey, UncacheableTensorError, _core, tensor_key, tensor_keys
from omni_tensor_key.host_copy import to_host

LIMIT = 1 << 20
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


def traced(make: Callable[[], object]) -> int:
    """How much memory is allocated at the most while `make` runs."""
    tracemalloc.start()
    try:
        make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("length", [100, 1024, 32_000])
def test_the_memory_of_a_dropped_key_is_used_again(length: int, count: int) -> None:
    tensors = [torch.arange(length + i) for i in range(count)]
    tensor_keys(tensors)
    assert traced(lambda: tensor_keys(tensors)) < tensors[0].nbytes


def test_no_more_than_a_mebibyte_of_it_is_kept() -> None:
    def make_and_drop() -> int:
        for length in range(1000, LIMIT, 10_000):
            tensor_key(torch.zeros(length, dtype=torch.bool))
        return tracemalloc.get_traced_memory()[0]

    kept = []
    traced(lambda: kept.append(make_and_drop()))
    assert kept[0] < (1 << 20) + 20_000


def test_keys_in_memory_that_is_used_again(rng: random.Random) -> None:
    tensors = [torch.tensor(rng.choices(range(2), k=length)) for length in [10, 70, 200, 200, 1000, 40_000] * 3]
    live: dict[int, tuple[TensorKey, torch.Tensor]] = {}
    for _ in range(3000):
        place, tensor = rng.randrange(6), rng.choice(tensors)
        live[place] = (tensor_key(tensor), tensor)
        if len(live) > rng.randrange(8):
            live.pop(rng.choice(list(live)))
        for key, content in live.values():
            assert key.nbytes == content.nbytes
    for key, content in live.values():
        assert key.digest == xxhash.xxh3_128_digest(content.numpy().tobytes())
        assert all((key == other) is torch.equal(content, twin) for other, twin in live.values())


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
    "sources": lambda: _core.sources(("tag", (("ids", tensor_key(IDS)), ("none", None)))),
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
    sentinel, tag = object(), ("prompt_embeds",)
    refused = torch.zeros(2)

    def hashable(value: object) -> object:
        return sentinel

    def build_key(*args: object) -> None:
        return None

    watched = [sentinel, tag, hashable, build_key, to_host, IDS, refused, TensorKey]
    before = references(watched)
    for _ in range(1000):
        builder = _core.KeyBuilder(hashable, build_key, sentinel, tag, to_host, LIMIT)
        assert builder.hashable(refused) is sentinel
        assert builder.hashable([IDS, {}]) is sentinel
        assert builder.hashable((IDS, 1)) == ("__seq__", (tensor_key(IDS), 1))
    del builder
    assert references(watched) == before


def test_a_key_builder_in_a_cycle_is_collected() -> None:
    class Holder:
        def __init__(self) -> None:
            self.builder = _core.KeyBuilder(self.hashable, self.hashable, self, (), to_host, LIMIT)

        def hashable(self, *args: object) -> None:
            return None

    holder = Holder()
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None
