"""Threads that make keys at the same time get right ones, also while the interpreter lock is released for hashing."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import xxhash

from omni_tensor_key import _core, tensor_keys

THREADS = 8
# Bytes: below and above the size from which the lock is released.
SIZES = [0, 8, 1024, 8192, 256 * 1024 - 8, 256 * 1024, 300_000, 1 << 20]


@pytest.fixture(autouse=True)
def eager_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_threads(work: Callable[[int], None]) -> None:
    """Run work(0) to work(7) at once, and raise what any of them raised."""
    barrier, errors = threading.Barrier(THREADS), []

    def run(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def tensor_and_digest(rng: random.Random, size: int) -> tuple[torch.Tensor, bytes]:
    content = rng.randbytes(size)
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy()), xxhash.xxh3_128_digest(content)


def test_shared_tensors(rng: random.Random) -> None:
    shared = [tensor_and_digest(rng, size) for size in SIZES]
    tensors, digests = [tensor for tensor, _ in shared], [digest for _, digest in shared]
    strided = [torch.stack([tensor, tensor], dim=1)[:, 1] for tensor in tensors]

    def work(index: int) -> None:
        for _ in range(40):
            assert [key.digest for key in tensor_keys(tensors)] == digests
            assert [key.digest for key in tensor_keys(strided)] == digests

    in_threads(work)


def test_tensors_of_their_own(rng: random.Random) -> None:
    seeds = [rng.randrange(1 << 32) for _ in range(THREADS)]

    def work(index: int) -> None:
        own = random.Random(seeds[index])
        for size in SIZES * 5:
            tensor, digest = tensor_and_digest(own, size)
            [key] = tensor_keys([tensor])
            tensor.zero_()
            assert key.digest == digest

    in_threads(work)


def test_keys_in_a_shared_dictionary(rng: random.Random) -> None:
    tensors = [torch.tensor([[rng.randrange(100) for _ in range(64)] for _ in range(4)]) for _ in range(50)]
    cache: dict[object, int] = {}

    def work(index: int) -> None:
        for turn in range(20):
            for i, key in enumerate(tensor_keys(tensors[turn:] + tensors[:turn])):
                assert cache.setdefault(key, (i + turn) % 50) == (i + turn) % 50

    in_threads(work)
    assert len(cache) == 50


def test_each_simd_path(rng: random.Random) -> None:
    data = rng.randbytes(50_000)
    digest = xxhash.xxh3_128_digest(data)

    def work(index: int) -> None:
        for _ in range(200):
            assert _core.xxh3_128(data, _core.SIMD_PATHS[index % len(_core.SIMD_PATHS)]) == digest

    in_threads(work)


def test_a_key_never_mixes_two_states_that_python_code_wrote(rng: random.Random) -> None:
    """The content is copied under the interpreter's lock, and so is a slice of a bytearray assigned."""
    states = [rng.randbytes(1 << 20) for _ in range(2)]
    digests = {xxhash.xxh3_128_digest(state) for state in states}
    buffer, done = bytearray(states[0]), threading.Event()
    tensor = torch.frombuffer(buffer, dtype=torch.int64)

    def edit() -> None:
        while not done.is_set():
            for state in states:
                buffer[:] = state

    editor = threading.Thread(target=edit)
    editor.start()
    try:
        seen = {tensor_keys([tensor])[0].digest for _ in range(300)}
    finally:
        done.set()
        editor.join()
    assert seen <= digests
