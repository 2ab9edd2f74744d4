"""The content hash is XXH3-128, bit for bit, on every instruction set of this CPU."""

from __future__ import annotations

import platform
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from vectors import make

from omni_tensor_key import _core, tensor_key
from omni_tensor_key.keys.host_copy import to_host

LIMIT = 8 << 20

# From xxHash's own sanity tests (cli/xsum_sanity_check.c, seed 0), which use the content of the vector file: high, low.
PUBLISHED = {
    0: (0x99AA06D3014798D8, 0x6001C324468D497F),
    1: (0xA6CD5E9392000F6A, 0xC44BDFF4074EECDB),
    6: (0x082AFE0B8162D12A, 0x3E7039BDDA43CFC6),
    12: (0x6E3EFD8FC7802B18, 0x061A192713F69AD9),
    24: (0x0CE966E4678D3761, 0x1E7044D28B1B901D),
    48: (0xA002AC4E5478227E, 0xF942219AED80F67B),
    81: (0x4952F58181AB0042, 0x5E8BAFB9F95FB803),
    222: (0x337E09641B948717, 0xF1AEBD597CEC6B3A),
    403: (0x1B6DE21E332DD73D, 0xCDEB804D65C6DEA4),
    512: (0x18D2D110DCC9BCA1, 0x617E49599013CB6B),
    2048: (0xF736557FD47073A5, 0xDD59E2C3A5F038E0),
    2240: (0xCCB134FBFA7CE49D, 0x6E73A90539CF2948),
    2367: (0xE89C0F6FF369B427, 0xCB37AEB9E5D361ED),
}


@pytest.fixture(scope="module")
def vectors() -> list[tuple[bytes, str]]:
    """(content, digest) of each line of the vector file."""
    digests = make.load()
    whole = make.content(max(digests))
    return [(whole[:length], digest) for length, digest in digests.items()]


def at_offset(data: bytes, offset: int, length: int) -> np.ndarray:
    """Part of `data` without a copy, so that the hash reads it at that address."""
    return np.frombuffer(data, np.uint8)[offset : offset + length]


def test_the_vector_file_is_what_the_script_writes() -> None:
    assert make.load() == make.digests()


def test_the_vector_file_agrees_with_the_published_digests() -> None:
    digests = make.load()
    assert {n: digests[n] for n in PUBLISHED} == {n: f"{high:016x}{low:016x}" for n, (high, low) in PUBLISHED.items()}


def test_no_word_of_the_vectors_content_comes_twice() -> None:
    words = np.frombuffer(make.content(max(make.load()) & -8), np.uint64)
    assert len(np.unique(words)) == len(words)


@pytest.mark.parametrize("path", _core.SIMD_PATHS)
def test_vectors_on_each_path(path: str, vectors: list[tuple[bytes, str]]) -> None:
    for content, digest in vectors:
        assert _core.xxh3_128(content, path).hex() == digest, f"{len(content)} bytes"


def test_vectors_through_tensor_keys(vectors: list[tuple[bytes, str]]) -> None:
    for content, digest in vectors:
        tensor = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        key = _core.tensor_keys([tensor], to_host, LIMIT)[0]
        assert (key.hexdigest, key.digest.hex()) == (digest, digest), f"{len(content)} bytes"


@pytest.mark.parametrize("path", _core.SIMD_PATHS)
def test_every_length_to_4096(path: str, rng: random.Random) -> None:
    data = rng.randbytes(4096 + 64)
    for length in range(4096 + 1):
        part = at_offset(data, rng.randrange(64), length)
        assert _core.xxh3_128(part, path) == xxhash.xxh3_128_digest(part), f"{length} bytes"


@pytest.mark.parametrize("path", _core.SIMD_PATHS)
def test_every_alignment(path: str, rng: random.Random) -> None:
    data = rng.randbytes(4096)
    for length in (3, 7, 16, 100, 200, 241, 1024, 1025, 3000):
        for offset in range(65):
            part = at_offset(data, offset, length)
            assert _core.xxh3_128(part, path) == xxhash.xxh3_128_digest(part), f"{length} bytes at {offset}"


@pytest.mark.parametrize("path", _core.SIMD_PATHS)
def test_lengths_to_4_mib(path: str, rng: random.Random) -> None:
    data = rng.randbytes((4 << 20) + 64)
    edges = [(1 << bits) + step for bits in range(13, 23) for step in (-1, 0, 1) if (1 << bits) + step <= 4 << 20]
    for length in edges + [rng.randrange(4097, 4 << 20) for _ in range(20)]:
        part = at_offset(data, rng.randrange(64), length)
        assert _core.xxh3_128(part, path) == xxhash.xxh3_128_digest(part), f"{length} bytes"


@pytest.mark.parametrize("fill", [b"\x00", b"\xff", b"\x80\x00\x00\x00", b"\xff\xff\xff\xff\x00\x00\x00\x00"])
def test_content_that_makes_carries(fill: bytes) -> None:
    for length in (5, 16, 17, 128, 240, 256, 1024, 5000, 100_000):
        content = (fill * length)[:length]
        for path in _core.SIMD_PATHS:
            assert _core.xxh3_128(content, path) == xxhash.xxh3_128_digest(content), f"{length} bytes, {path}"


def test_tensor_keys_where_the_content_is_large(rng: random.Random) -> None:
    for length in (1 << 20, (4 << 20) - 8):
        data = bytearray(rng.randbytes(length))
        key = _core.tensor_keys([torch.frombuffer(data, dtype=torch.int64)], to_host, LIMIT)[0]
        assert key.digest == xxhash.xxh3_128_digest(data)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
def test_the_paths_are_what_this_cpu_can_run() -> None:
    cpu = Path("/proc/cpuinfo").read_text()
    flags = set(next(line for line in cpu.splitlines() if line.startswith("flags")).split())
    expected = [name for name, flag in (("avx512", "avx512f"), ("avx2", "avx2"), ("sse2", "sse2")) if flag in flags]
    assert list(_core.SIMD_PATHS) == [*expected, "scalar"]


@pytest.mark.parametrize("name", ["", "avx", "AVX2", "neon9", "scalar "])
def test_an_unknown_path_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'"):
        _core.xxh3_128(b"123", name)


def test_the_public_digest_is_the_one_of_the_xxhash_package() -> None:
    ids = [101, 2023, 2003, 102]
    content = b"".join(token.to_bytes(8, "little") for token in ids)
    assert tensor_key(torch.tensor(ids)).hexdigest == xxhash.xxh3_128_hexdigest(content)
