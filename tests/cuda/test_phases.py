"""The kernel's algorithm gives XXH3-128 of the row-major bytes, for any layout, number and order of threads."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, note, settings
from hypothesis import strategies as st
from vectors import make

from omni_tensor_key import reference
from omni_tensor_key.host_copy import to_host

FORWARD, REVERSE, RANDOM = range(3)
TILE = 32 * 1024
# Around everything that turns the algorithm: length classes, stripes, blocks, tiles, and the last tile's spill of 63.
EDGES = (1, 3, 4, 8, 9, 16, 17, 32, 64, 128, 129, 240, 241, 256, 512, 1024, 1088, 2048, 8192, 31 * 1024, TILE - 1024)
LENGTHS = sorted(
    {length + step for length in EDGES for step in (-1, 0, 1) if length + step > 0}
    | {TILE * tiles + step for tiles in (1, 2, 3) for step in (-1, 0, 1, 2, 62, 63, 64, 65, 127, 128, 1023, 1024, 1025)}
)  # fmt: skip


def random_bytes(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def misaligned(content: np.ndarray, offset: int) -> np.ndarray:
    """A copy that begins `offset` bytes after a multiple of 16."""
    room = np.zeros(content.size + 32, np.uint8)
    start = -room.ctypes.data % 16 + offset
    room[start : start + content.size] = content
    return room[start : start + content.size]


def check(read: tuple[bytes, str] | None, array: np.ndarray) -> None:
    content = np.ascontiguousarray(array).tobytes()
    assert read is not None
    assert read[0] == content
    assert read[1] == xxhash.xxh3_128_hexdigest(content)


def test_vectors(host_run: Any) -> None:
    digests = make.load()
    whole = np.frombuffer(make.content(max(digests)), np.uint8)
    for length, digest in digests.items():
        if length > 0:
            read = host_run(whole[:length])
            assert read == (whole[:length].tobytes(), digest), length


@pytest.mark.parametrize("threads", [32, 64, 96, 128, 256, 512, 1024])
def test_lengths(host_run: Any, threads: int) -> None:
    content = random_bytes(max(LENGTHS))
    for length in LENGTHS:
        for order in (FORWARD, REVERSE, RANDOM):
            check(host_run(content[:length], threads, order, seed=length), content[:length])


def test_every_short_length(host_run: Any) -> None:
    content = random_bytes(3000)
    for length in range(1, content.size):
        check(host_run(content[:length]), content[:length])


@pytest.mark.parametrize("offset", range(16))
def test_misaligned_content(host_run: Any, offset: int) -> None:
    for length in (1, 7, 15, 16, 17, 240, 241, 1024, 8192, 8191, TILE + 63, TILE + 77):
        array = misaligned(random_bytes(length), offset)
        check(host_run(array, order=RANDOM, seed=offset), array)
        assert host_run.plan(array) == (16 if offset == 0 else offset & -offset, 1)


def test_the_widest_load_that_fits(host_run: Any) -> None:
    ids = misaligned(random_bytes(8 * 64 * 64), 0).view(np.int64).reshape(64, 64)
    assert host_run.plan(ids) == (16, 1)
    assert host_run.plan(ids[:, :32]) == (16, 2)  # a column slice whose rows begin at multiples of 16
    assert host_run.plan(ids[:, :33]) == (8, 2)
    assert host_run.plan(ids[:, 1:33]) == (8, 2)
    assert host_run.plan(ids[:, ::2]) == (8, 1)  # one stride walks all of it
    assert host_run.plan(ids.T) == (8, 2)
    assert host_run.plan(ids[:1, :1]) == (16, 1)


def test_a_misaligned_strided_tensor_is_read_by_narrower_loads(host_run: Any) -> None:
    for offset in (1, 2, 4):
        array = misaligned(random_bytes(8 * 600), offset).view(np.int64).reshape(20, 30)[::2, ::3]
        assert host_run.plan(array) == (offset, 3)
        check(host_run(array), array)


def test_too_many_dimensions_are_refused(host_run: Any) -> None:
    base = np.arange(3**8, dtype=np.int32).reshape([3] * 8)
    eight = base[tuple(slice(0, 3, 2) for _ in range(8))]
    check(host_run(eight), eight)
    # The bytes of a misaligned item are one dimension more.
    moved = misaligned(base.reshape(-1).view(np.uint8), 2).view(np.int32).reshape(base.shape)
    assert host_run(moved[(slice(0, 3, 2),) * 8]) is None


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("count", [240, 1024, 5000, 40_000])
def test_strides(host_run: Any, dtype: type, count: int) -> None:
    base = random_bytes(count * np.dtype(dtype).itemsize * 3).view(dtype)
    for array in (base[::3], base[::-3], base[: count - count % 8].reshape(-1, 8)[:, ::-1].T):
        for threads, order in ((32, REVERSE), (512, RANDOM)):
            check(host_run(array, threads, order, seed=count), array)


DTYPES = [torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 9), max_size=5))
    strides = [draw(st.integers(0, 40)) for _ in shape]
    offset = draw(st.integers(0, 17))
    reach = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    content = random_bytes(reach * dtype.itemsize, draw(st.integers(0, 2**32 - 1)))
    if dtype == torch.bool:
        content &= 1
    tensor = torch.from_numpy(content).view(dtype).as_strided(shape, strides, offset)
    return tensor.permute(draw(st.permutations(range(tensor.ndim))))


@settings(max_examples=300, deadline=None, database=None, print_blob=True)
@given(tensor=strided(), threads=st.sampled_from([32, 128, 512]), order=st.integers(0, 2), seed=st.integers(0, 2**32))
def test_random_layouts_agree_with_the_reference(
    host_run: Any, tensor: torch.Tensor, threads: int, order: int, seed: int
) -> None:
    note(f"{tensor.shape} {tensor.stride()} {tensor.storage_offset()} {tensor.dtype}")
    key = reference.tensor_keys([tensor], to_host, 1 << 20)[0]
    assert host_run(tensor.numpy(), threads, order, seed) == (key.content, key.hexdigest)


def test_random_lengths_and_orders(host_run: Any, rng: random.Random) -> None:
    content = random_bytes(1 << 18, rng.randrange(1 << 32))
    for _ in range(60):
        start = rng.randrange(64)
        part = content[start : start + rng.randrange(1, content.size - start)]
        check(host_run(part, rng.choice([32, 256, 512]), RANDOM, rng.randrange(1 << 32)), part)


def run(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)


def sanitized(build: Callable[..., Path], *flags: str) -> subprocess.CompletedProcess[str]:
    try:
        program = build(*flags)
    except AssertionError as error:
        if "cannot find" in str(error):
            pytest.skip("the compiler has no sanitizer runtime")
        raise
    return run(program)


def test_threads_share_nothing_between_two_barriers(race_check: Callable[..., Path]) -> None:
    done = sanitized(race_check, "-fsanitize=thread")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_a_missing_barrier_would_be_found(race_check: Callable[..., Path]) -> None:
    done = sanitized(race_check, "-fsanitize=thread", "-DWITHOUT_BARRIER")
    assert done.returncode != 0
    assert "data race" in done.stderr


def test_no_byte_outside_of_the_tensor_or_the_shared_memory(race_check: Callable[..., Path]) -> None:
    done = sanitized(race_check, "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-static-libasan")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
