"""What a TensorKey is: its attributes, when two are equal, and what it does not depend on."""

from __future__ import annotations

import copy
import operator
import pickle
import struct
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import xxhash

from omni_tensor_key import TensorKey, _core, tensor_key, tensor_keys
from omni_tensor_key.keys.host_copy import to_host

# struct's letter for each dtype that is keyed, with values at its limits.
VALUES = {
    torch.bool: ("?", [True, False, True]),
    torch.int8: ("b", [-128, 0, 127]),
    torch.uint8: ("B", [0, 1, 255]),
    torch.int16: ("h", [-(1 << 15), 1, (1 << 15) - 1]),
    torch.uint16: ("H", [0, 1, (1 << 16) - 1]),
    torch.int32: ("i", [-(1 << 31), 1, (1 << 31) - 1]),
    torch.uint32: ("I", [0, 1, (1 << 32) - 1]),
    torch.int64: ("q", [-(1 << 63), 1, (1 << 63) - 1]),
    torch.uint64: ("Q", [0, 1, (1 << 64) - 1]),
}
INEXACT = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
EMPTY_SHAPES = [(0,), (2, 0), (0, 2), (1, 0), (0, 0), (3, 0, 5)]


def reference_key(tensor: torch.Tensor) -> reference.TensorKey:
    return reference.TensorKey(tensor)


def assert_like_reference(tensor: torch.Tensor) -> None:
    key, expected = tensor_key(tensor), reference_key(tensor)
    for name in ("digest", "hexdigest", "dtype", "shape", "device", "nbytes"):
        assert getattr(key, name) == getattr(expected, name), name
    assert hash(key) == hash(expected)
    assert repr(key) == repr(expected)


@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_attributes(dtype: torch.dtype) -> None:
    letter, values = VALUES[dtype]
    content = struct.pack(f"<3{letter}", *values)
    key = tensor_key(torch.tensor([values], dtype=dtype))
    assert key.digest == xxhash.xxh3_128_digest(content)
    assert key.hexdigest == xxhash.xxh3_128_hexdigest(content)
    assert (key.dtype, key.shape, key.device, key.nbytes) == (str(dtype)[6:], (1, 3), "cpu", len(content))


def test_repr() -> None:
    digest = xxhash.xxh3_128_hexdigest(struct.pack("<3q", 1, 2, 3))
    assert repr(tensor_key(torch.tensor([[1, 2, 3]]))) == f"TensorKey({digest}, int64, (1, 3), cpu)"
    assert repr(tensor_key(torch.tensor([1, 2, 3]))) == f"TensorKey({digest}, int64, (3,), cpu)"


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 7), (7, 1), (2, 3), (2, 3, 4), (1,) * 5, (2,) * 12, (1,) * 64])
@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_reference_agrees(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_like_reference(torch.randint(0, 2, shape).to(dtype))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
@pytest.mark.parametrize("dtype", [*VALUES, *INEXACT], ids=str)
def test_tensors_without_elements_have_keys(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    key = tensor_key(torch.empty(shape, dtype=dtype))
    assert (key.digest, key.nbytes) == (xxhash.xxh3_128_digest(b""), 0)
    assert (key.dtype, key.shape) == (str(dtype)[6:], shape)
    assert_like_reference(torch.empty(shape, dtype=dtype))


def test_no_two_dtypes_or_shapes_without_elements_share_a_key() -> None:
    tensors = [torch.empty(shape, dtype=dtype) for shape in EMPTY_SHAPES for dtype in [*VALUES, *INEXACT]]
    assert len(set(tensor_keys(tensors))) == len(tensors)


def test_the_empty_prompt_has_a_key() -> None:
    assert tensor_key(torch.tensor([])).dtype == "float32"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(torch.tensor([1, 2]), torch.tensor([1, 3]), id="content"),
        pytest.param(torch.tensor([1, 2]), torch.tensor([2, 1]), id="order"),
        pytest.param(torch.tensor([1, 2]), torch.tensor([1, 2, 0]), id="length"),
        pytest.param(torch.arange(16), torch.arange(16).reshape(4, 4), id="(16,) and (4, 4)"),
        pytest.param(torch.arange(5), torch.arange(5).reshape(1, 5), id="(L,) and (1, L)"),
        pytest.param(torch.arange(5), torch.arange(5).reshape(5, 1), id="(L,) and (L, 1)"),
        pytest.param(torch.arange(5).reshape(1, 5), torch.arange(5).reshape(5, 1), id="(1, L) and (L, 1)"),
        pytest.param(torch.arange(6).reshape(2, 3), torch.arange(6).reshape(3, 2), id="(2, 3) and (3, 2)"),
        pytest.param(torch.tensor(7), torch.tensor([7]), id="() and (1,)"),
        pytest.param(torch.tensor([7]), torch.tensor([[7]]), id="(1,) and (1, 1)"),
        pytest.param(torch.tensor([1, 0]), torch.tensor([1, 0]).view(torch.uint64), id="int64 and uint64"),
        pytest.param(torch.tensor([1, 2]), torch.tensor([1, 0, 2, 0], dtype=torch.int32), id="int64 and int32"),
        pytest.param(torch.tensor([True, False]), torch.tensor([1, 0], dtype=torch.uint8), id="bool and uint8"),
        pytest.param(torch.tensor([1], dtype=torch.int8), torch.tensor([1], dtype=torch.uint8), id="int8 and uint8"),
        pytest.param(torch.tensor([True]), torch.tensor([1], dtype=torch.int8), id="bool and int8"),
    ],
)
def test_what_differs_is_not_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    key, other = tensor_key(a), tensor_key(b)
    assert (operator.eq(key, other), operator.ne(key, other)) == (False, True)
    assert hash(key) != hash(other)
    assert reference_key(a) != reference_key(b)
    assert {key: "a"}.get(other) is None


def test_where_tensors_are_cut_counts() -> None:
    assert tensor_keys([torch.tensor([1, 2]), torch.tensor([3, 4, 5])]) != tensor_keys(
        [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    )


def test_every_single_flip_of_a_mask_counts() -> None:
    mask = torch.ones(1, 1024, dtype=torch.bool)
    keys = {tensor_key(mask)}
    for i in range(1024):
        flipped = mask.clone()
        flipped[0, i] = False
        keys.add(tensor_key(flipped))
    assert len(keys) == 1025


def test_equal_tensors_have_equal_keys_wherever_they_live() -> None:
    ids = torch.arange(1000).reshape(1, -1)
    key = tensor_key(ids)
    for same in (ids.clone(), torch.nn.Parameter(ids, requires_grad=False), torch.inference_mode()(ids.clone)()):
        other = tensor_key(same)
        assert (operator.eq(key, other), operator.ne(key, other)) == (True, False)
        assert hash(key) == hash(other)
        assert {key: "value"}[other] == "value"


def test_a_parameter_without_elements_has_the_key_of_its_tensor() -> None:
    assert tensor_key(torch.nn.Parameter(torch.empty(0))) == tensor_key(torch.empty(0))


@pytest.mark.parametrize(
    "other",
    [None, 0, b"", (), [1, 2, 3], ("__seq__", (1, 2, 3)), torch.tensor([1, 2, 3]).untyped_storage(), object()],
    ids=lambda other: type(other).__name__,
)
def test_a_key_equals_nothing_but_a_key(other: object) -> None:
    key = tensor_key(torch.tensor([1, 2, 3]))
    for lookalike in (other, key.digest, key.hexdigest, hash(key), reference_key(torch.tensor([1, 2, 3]))):
        assert (operator.eq(key, lookalike), operator.ne(key, lookalike)) == (False, True)
        assert (operator.eq(lookalike, key), operator.ne(lookalike, key)) == (False, True)


def test_content_decides_after_an_edit_in_place() -> None:
    ids = torch.tensor([[1, 2, 3]])
    before = tensor_key(ids)
    ids[0, 1] = 9
    edited = tensor_key(ids)
    assert edited != before
    assert before.digest == xxhash.xxh3_128_digest(struct.pack("<3q", 1, 2, 3))
    ids[0, 1] = 2
    assert tensor_key(ids) == before


def test_an_edit_that_autograd_does_not_see_counts() -> None:
    with torch.inference_mode():
        ids = torch.tensor([1, 2, 3])
        before = tensor_key(ids)
        ids[0] = 5
        assert tensor_key(ids) != before


@pytest.mark.parametrize("name", ["digest", "hexdigest", "dtype", "shape", "device", "nbytes", "anything"])
def test_keys_are_immutable(name: str) -> None:
    key = tensor_key(torch.tensor([1]))
    with pytest.raises(AttributeError):
        setattr(key, name, 1)
    with pytest.raises(AttributeError):
        delattr(key, name)
    with pytest.raises(TypeError):
        setattr(TensorKey, name, 1)


@pytest.mark.parametrize(
    "make",
    [
        TensorKey,
        lambda: TensorKey.__new__(TensorKey),
        lambda: object.__new__(TensorKey),
        lambda: type("K", (TensorKey,), {}),
    ],
    ids=["call", "__new__", "object.__new__", "subclass"],
)
def test_only_the_api_makes_keys(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        make()


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {n}": lambda key, n=n: pickle.loads(pickle.dumps(key, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (1, 7), (1, 50_000), (1,) * 64])
@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_a_copy_is_equal(dtype: torch.dtype, shape: tuple[int, ...], duplicate: Callable[[Any], Any]) -> None:
    key = tensor_key(torch.randint(0, 2, shape).to(dtype))
    twin = duplicate({key: "value"})
    assert list(twin) == [key]
    (other,) = twin
    assert hash(other) == hash(key)
    assert (other.digest, repr(other), other.nbytes) == (key.digest, repr(key), key.nbytes)


DAMAGED = {
    "code": [-1, 2, 256, 1 << 40, "0", None],
    "bits": [-8, 0, 4, 7, 12, 320, 1 << 70, 8.0],
    "device type": [1 << 31, "cpu"],
    "device index": [-(1 << 40), 1.5],
    "shape": [
        (),
        (2,),
        (1, 3),
        (-1, -2),
        (1, 2, 0),
        (1 << 62, 1 << 62),
        (1,) * 65,
        (1, 1 << 70),
        (1.0, 2.0),
        [1, 2],
        2,
    ],
    "content": [b"", b"1234567", bytes(17), bytearray(16), "text", None],
}


def test_damaged_parts_are_refused() -> None:
    restore, parts = tensor_key(torch.tensor([[1, 2]])).__reduce__()
    assert restore is _core.restore_key
    assert hash(restore(*parts)) == hash(tensor_key(torch.tensor([[1, 2]])))
    for place, values in enumerate(DAMAGED.values()):
        for value in values:
            damaged = [*parts[:place], value, *parts[place + 1 :]]
            if damaged == [*parts[:4], (2,), parts[5]]:
                continue  # another shape of as many elements
            with pytest.raises(ValueError, match="not the parts of a TensorKey"):
                restore(*damaged)
    for wrong in ((), parts[:5], (*parts, 1), (None,) * 6):
        with pytest.raises(ValueError, match="not the parts of a TensorKey"):
            restore(*wrong)


def test_keys_have_no_order() -> None:
    with pytest.raises(TypeError, match="not supported"):
        tensor_key(torch.tensor([1])) < tensor_key(torch.tensor([2]))  # noqa: B015


def test_tensor_keys_takes_any_iterable_and_keeps_its_order() -> None:
    tensors = [torch.tensor([i]) for i in range(20)]
    keys = tensor_keys(tensors)
    assert type(keys) is list
    assert keys == [tensor_key(tensor) for tensor in tensors]
    assert tensor_keys(iter(tensors)) == tensor_keys(tuple(tensors)) == keys
    assert tensor_keys([]) == []
    assert tensor_keys([tensors[0]] * 3) == [keys[0]] * 3


def test_an_iterable_that_fails_fails_with_its_own_error() -> None:
    def tensors() -> Any:
        yield torch.tensor([1])
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tensor_keys(tensors())
    with pytest.raises(TypeError):
        _core.tensor_keys(3, to_host, 1 << 20)
