"""XXH3 has contents with equal digests that anybody can write down; equal digests must never make equal keys.

For 33 to 64 bytes the specification mixes two rounds. A round takes a front chunk (p0, p1) and a back chunk (q0, q1),
of two words each, and four words of the secret:

    a += fold((p0 ^ s0) * (p1 ^ s1));  a ^= q0 + q1
    b += fold((q0 ^ s2) * (q1 ^ s3));  b ^= p0 + p1

With p0 = s0 and q0 = s2 both products are zero, whatever p1 and q1 are, and the round is a ^= q0 + q1, b ^= p0 + p1.
Flip the highest bit of q1 in both rounds: each sum changes in its highest bit alone, and in `a` the two cancel.

Over 240 bytes each 8-byte lane adds low32(x) * high32(x) with x = word ^ secret, and adds the word itself to the lane
beside it. Where the low halves of word and secret are equal the product is zero. Flip the highest bit of two such words
in one lane of one block: the sum in the lane beside it changes by 2**63 twice, which is nothing.
"""

from __future__ import annotations

import operator
import random
import struct

import pytest
import torch
import xxhash

from omni_tensor_key import TensorKey, tensor_key, tensor_keys

# The first 72 bytes of the default secret, from the specification, as little-endian words.
SECRET = struct.unpack(
    "<9Q",
    bytes.fromhex(
        "b8fe6c3923a44bbe 7c01812cf721ad1c ded46de9839097db 7240a4a4b7b3671f cb79e64eccc0e578"
        "825ad07dccff7221 b8084674f743248e e03590e6813a264c 3c2852bb91c300cb"
    ),
)
TOP = 1 << 63
Pair = tuple[torch.Tensor, torch.Tensor]


def tensor_of(words: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(words)}Q", *words)), dtype=torch.int64)


def two_rounds(rng: random.Random, flipped: tuple[int, int]) -> Pair:
    """Eight IDs and their twin: words 0, 2, 4 and 6 make the products vanish, the others are free."""
    words = [rng.getrandbits(64) for _ in range(8)]
    words[0], words[6] = SECRET[0], SECRET[2]  # the round of the outer chunks
    words[2], words[4] = SECRET[4], SECRET[6]  # the round of the inner chunks
    twin = list(words)
    for i in flipped:
        twin[i] ^= TOP
    return tensor_of(words).reshape(1, 8), tensor_of(twin).reshape(1, 8)


def stripes(rng: random.Random) -> Pair:
    """1,024 token IDs, and the same with two of them changed: lane 0 of the first two stripes."""
    ids = [rng.randrange(30_000) for _ in range(1024)]
    for stripe in (0, 1):
        ids[8 * stripe] = SECRET[stripe] & 0xFFFFFFFF | rng.randrange(30_000) << 32
    twin = list(ids)
    for stripe in (0, 1):
        twin[8 * stripe] ^= TOP
    return tensor_of(ids).reshape(1, 1024), tensor_of(twin).reshape(1, 1024)


@pytest.fixture(params=["back chunks", "front chunks", "stripes"])
def pair(request: pytest.FixtureRequest, rng: random.Random) -> Pair:
    if request.param == "stripes":
        return stripes(rng)
    return two_rounds(rng, (5, 7) if request.param == "back chunks" else (1, 3))


@pytest.fixture
def keys(pair: Pair) -> tuple[TensorKey, TensorKey]:
    first, second = tensor_keys(pair)
    return first, second


def test_the_xxhash_package_gives_one_digest_for_both(pair: Pair) -> None:
    first, second = (tensor.numpy().tobytes() for tensor in pair)
    assert first != second
    assert xxhash.xxh3_128_digest(first) == xxhash.xxh3_128_digest(second)


def test_digest_and_hash_are_equal_and_the_keys_are_not(keys: tuple[TensorKey, TensorKey]) -> None:
    first, second = keys
    assert first.digest == second.digest
    assert hash(first) == hash(second)  # so that a dictionary does compare them
    assert (operator.eq(first, second), operator.ne(first, second)) == (False, True)
    assert (operator.eq(first, first), operator.eq(second, second)) == (True, True)


def test_a_dictionary_misses(keys: tuple[TensorKey, TensorKey]) -> None:
    first, second = keys
    cache = {first: "embedding of the first"}
    assert cache.get(second) is None
    cache[second] = "embedding of the second"
    assert [cache[first], cache[second]] == ["embedding of the first", "embedding of the second"]


def test_a_key_that_holds_one_of_them_misses(pair: Pair) -> None:
    mask = tensor_key(torch.ones(1, 8, dtype=torch.bool))
    first, second = (("model", (("attention_mask", mask), ("prompt_ids", tensor_key(ids)))) for ids in pair)
    assert hash(first) == hash(second)
    assert second not in {first: None}


def test_the_same_content_made_anew_hits(pair: Pair) -> None:
    first, second = pair
    cache = dict(zip(tensor_keys(pair), "ab", strict=True))
    assert [cache[key] for key in tensor_keys([second.clone(), first.clone()])] == ["b", "a"]


def test_comparisons_in_any_order(pair: Pair, rng: random.Random) -> None:
    """Whatever was compared before, a comparison gives the same answer."""
    tensors = [rng.choice(pair) for _ in range(30)]
    keys = tensor_keys([tensor.clone() for tensor in tensors])
    for _ in range(500):
        i, j = rng.randrange(30), rng.randrange(30)
        assert (keys[i] == keys[j]) is (tensors[i] is tensors[j])
    assert [keys[0] == key for key in keys] == [tensors[0] is tensor for tensor in tensors]
