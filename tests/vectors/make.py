"""Write xxh3_128.json: XXH3-128 (seed 0) of one byte sequence, cut at every length where the algorithm turns.

    python tests/vectors/make.py

The digests come from the `xxhash` package, that is from the C library, and from nothing of this project. The content
is not stored. Byte i of it is the top byte of

    2654435761 * 11400714785074694797**i  modulo 2**64

which is how xxHash's own sanity tests fill their buffer. No 8-byte word of it comes twice, so that an implementation
which swaps, skips or repeats words cannot give the right digest.
"""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

FILE = Path(__file__).with_name("xxh3_128.json")
FORMULA = "byte i is (2654435761 * 11400714785074694797**i mod 2**64) >> 56"

# Where the algorithm changes: its length classes, its rounds of 32 bytes, stripes of 64 and blocks of 1,024.
EDGES = (16, 32, 64, 96, 128, 160, 192, 224, 240, 256, 512, *range(1024, 8192 + 1, 1024), 65536, 262144, 1 << 20)
# The lengths whose digests xxHash publishes for the same content, and two without any structure.
OTHERS = (24, 48, 81, 222, 403, 2240, 2367, 10_000, 99_999)


def content(length: int) -> bytes:
    """The first `length` bytes of the sequence."""
    out = bytearray(length)
    word = 2654435761
    for i in range(length):
        out[i] = word >> 56
        word = word * 11400714785074694797 & 0xFFFFFFFFFFFFFFFF
    return bytes(out)


def lengths() -> list[int]:
    """The lengths in the file: 0 to 17, each edge and its two neighbours, and the others."""
    return sorted({*range(18), *(edge + step for edge in EDGES for step in (-1, 0, 1)), *OTHERS})


def digests() -> dict[int, str]:
    """The digest of each length, in canonical (big-endian) hexadecimal."""
    whole = content(max(lengths()))
    return {length: xxhash.xxh3_128_hexdigest(whole[:length]) for length in lengths()}


def load() -> dict[int, str]:
    """The committed digests by length."""
    return {int(length): digest for length, digest in json.loads(FILE.read_text())["digests"].items()}


def main() -> None:
    lines = ",\n".join(f'    "{length}": "{digest}"' for length, digest in digests().items())
    FILE.write_text(f'{{\n  "content": "{FORMULA}",\n  "digests": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    main()
