"""A key depends on the elements in row-major order and on nothing else of the layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
import xxhash
from hypothesis import given, note, settings
from hypothesis import strategies as st

from omni_tensor_key import tensor_key

KEYED = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip
thorough = settings(max_examples=1000, deadline=None, database=None, print_blob=True)


def random_elements(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """`count` elements with random bits, in a storage of their own."""
    content = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8)
    if dtype == torch.bool:
        content &= 1
    return torch.from_numpy(content).view(dtype) if count else torch.empty(0, dtype=dtype)


def row_major_bytes(tensor: torch.Tensor) -> bytes:
    """The content, read by numpy one element at a time through the tensor's own strides."""
    array = tensor.numpy()
    return b"".join(array[index].tobytes() for index in np.ndindex(array.shape))


dtypes = st.sampled_from(KEYED)
seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4]), max_size=5).map(tuple)


@st.composite
def as_strided(draw: st.DrawFn) -> torch.Tensor:
    """Any shape with any strides, overlapping ones too, that ends with its storage."""
    dtype, shape, offset = draw(dtypes), draw(shapes), draw(st.integers(0, 5))
    # The strides of sizes 0 and 1 are never walked, so they may be anything.
    strides = [draw(st.integers(0, 9) if size > 1 else st.sampled_from([0, 1, 3, 1 << 20, 1 << 50])) for size in shape]
    reach = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return random_elements(offset + reach, dtype, draw(seeds)).as_strided(shape, strides, offset)


def transposed(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    return t.permute(draw(st.permutations(range(t.ndim))))


def sliced(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, t.ndim - 1))
    part = slice(draw(st.integers(0, t.shape[dim])), draw(st.integers(0, t.shape[dim])), draw(st.integers(1, 3)))
    return t[(slice(None),) * dim + (part,)]


def narrowed(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, t.ndim - 1))
    start = draw(st.integers(0, t.shape[dim]))
    return t.narrow(dim, start, draw(st.integers(0, t.shape[dim] - start)))


def selected(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, t.ndim - 1))
    return t.select(dim, draw(st.integers(0, t.shape[dim] - 1))) if t.shape[dim] else t


def expanded(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    sizes = [draw(st.integers(0, 3)) if size == 1 else size for size in t.shape]
    return t.expand(draw(st.integers(1, 2)), *sizes)


def flip(t: torch.Tensor, dim: int) -> torch.Tensor:
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(t.dtype, t.dtype)
    return t.view(signed).flip(dim).view(t.dtype)  # torch flips no unsigned integers but uint8


def flipped(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    return flip(t, draw(st.integers(0, t.ndim - 1)))


def windows(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    dim = draw(st.integers(0, t.ndim - 1))
    return t.unfold(dim, draw(st.integers(0, t.shape[dim])), draw(st.integers(1, 2)))


def diagonal(draw: st.DrawFn, t: torch.Tensor) -> torch.Tensor:
    return t.diagonal(draw(st.integers(-1, 1))) if t.ndim >= 2 else t


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """What up to four view operations make of a contiguous tensor."""
    shape = draw(shapes)
    tensor = random_elements(math.prod(shape), draw(dtypes), draw(seeds)).reshape(shape)
    steps = [transposed, sliced, narrowed, selected, expanded, flipped, windows, diagonal]
    for step in draw(st.lists(st.sampled_from(steps), max_size=4)):
        if tensor.ndim > 0 and tensor.numel() < 2000:
            tensor = step(draw, tensor)
    return tensor


tensors = st.one_of(as_strided(), views())


@thorough
@given(tensors)
def test_layout_does_not_count(tensor: torch.Tensor) -> None:
    note(f"{tensor.dtype} shape={tuple(tensor.shape)} strides={tensor.stride()} offset={tensor.storage_offset()}")
    key = tensor_key(tensor)
    copied = tensor_key(tensor.clone(memory_format=torch.contiguous_format))
    expected = reference.TensorKey(tensor)
    assert key == copied
    assert hash(key) == hash(copied) == hash(expected)
    assert key.digest == expected.digest == xxhash.xxh3_128_digest(row_major_bytes(tensor))
    assert (key.shape, key.dtype, key.device, key.nbytes) == (
        tuple(tensor.shape), str(tensor.dtype)[6:], "cpu", tensor.numel() * tensor.element_size(),
    )  # fmt: skip
    assert repr(key) == repr(expected)


@settings(thorough, max_examples=150)
@given(tensors.filter(lambda tensor: 0 < tensor.numel() <= 300))
def test_every_element_counts(tensor: torch.Tensor) -> None:
    """Change one element at a time, in both memory orders: each time it is another key."""
    keys = {tensor_key(tensor)}
    elements = tensor.clone(memory_format=torch.contiguous_format).numpy()
    for index in np.ndindex(elements.shape):
        changed = elements.copy()
        changed[index] ^= elements.dtype.type(1)
        row_major, column_major = torch.from_numpy(changed), torch.from_numpy(np.array(changed, order="F"))
        assert tensor_key(row_major) == tensor_key(column_major)
        keys.add(tensor_key(row_major))
    assert len(keys) == 1 + tensor.numel()


@settings(thorough, max_examples=300)
@given(as_strided(), seeds)
def test_only_the_tensors_own_elements_count(tensor: torch.Tensor, seed: int) -> None:
    """Overwrite the whole storage, then put the elements back: the bytes between them are no part of the key."""
    before = tensor_key(tensor)
    elements = tensor.clone().numpy()
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    storage.copy_(random_elements(storage.numel(), tensor.dtype, seed))
    tensor.numpy()[...] = elements
    assert tensor_key(tensor) == before


def test_the_stride_of_a_dimension_of_size_1_may_be_anything() -> None:
    stride = 1 << 62
    tensor = torch.tensor([1, 2]).as_strided((1, 2, 1), (stride, 0, stride))
    assert tensor_key(tensor) == tensor_key(torch.tensor([[[1], [1]]]))


@pytest.mark.parametrize("dtype", KEYED, ids=str)
def test_layouts_that_the_adapters_make(dtype: torch.dtype) -> None:
    ids = random_elements(4 * 64, dtype, 1).reshape(4, 64)
    for view, elements in [
        (ids[:, :10], [row[:10] for row in ids]),  # a column slice of a padded batch
        (ids[1:2, 5:], [ids[1, 5:]]),  # one row
        (ids[2], [ids[2]]),
        (ids[:1].expand(3, -1), [ids[0]] * 3),  # one mask for a whole batch
        (ids.T, list(ids.T)),
        (flip(ids, 1), [flip(row, 0) for row in ids]),
        (ids[:, None, None, :], list(ids)),
        (ids[::2, ::7], [row[::7] for row in ids[::2]]),
    ]:
        content = b"".join(element.contiguous().numpy().tobytes() for element in elements)
        key = tensor_key(view)
        assert (key.digest, key.shape) == (xxhash.xxh3_128_digest(content), tuple(view.shape))


def test_row_and_column_order_of_the_same_values_have_one_key() -> None:
    rows = torch.arange(12).reshape(3, 4)
    columns = torch.arange(12).reshape(3, 4).T.contiguous().T
    assert rows.stride() != columns.stride()
    assert tensor_key(rows) == tensor_key(columns)


def test_channels_last_is_only_a_layout() -> None:
    values = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    assert tensor_key(values.to(memory_format=torch.channels_last)) == tensor_key(values)
