"""Keys of tensors on a device whose memory makes no sense to the host."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import xxhash

from omni_tensor_key import UncacheableTensorError, _core, tensor_key, tensor_keys
from omni_tensor_key.keys.host_copy import to_host

LIMIT = 1 << 20
KEYED = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip


def ids_on(device: str) -> torch.Tensor:
    return torch.arange(24, device=device).reshape(4, 6)


@pytest.mark.parametrize("dtype", KEYED, ids=str)
def test_content_dtype_and_shape_are_those_of_the_host(dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(4, 6).to(dtype)
    host, on_device = tensor_keys([values, values.to("otkdev:1")])
    assert host.digest == on_device.digest == xxhash.xxh3_128_digest(values.numpy().tobytes())
    assert (host.dtype, host.shape, host.nbytes) == (on_device.dtype, on_device.shape, on_device.nbytes)
    assert (host.device, on_device.device) == ("cpu", "privateuseone:1")
    assert host != on_device
    assert hash(host) != hash(on_device)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.T,
    "columns": lambda t: t[:, 1:4],
    "rows": lambda t: t[1:3],
    "steps": lambda t: t[::2, ::3],
    "expanded": lambda t: t[:1].expand(3, 6),
    "one element": lambda t: t[2, 3],
    "overlapping": lambda t: t.as_strided((3, 4), (2, 1), 5),
    "strided size 1": lambda t: t.as_strided((1, 3, 1), (999, 2, 777), 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    host, on_device = LAYOUTS[layout](ids_on("cpu")), LAYOUTS[layout](ids_on("otkdev:0"))
    key, expected = tensor_keys([on_device, host])
    assert (key.digest, key.shape) == (expected.digest, expected.shape)
    assert key == tensor_keys([on_device.contiguous()])[0]


def test_the_oracle_agrees() -> None:
    tensors = [ids_on("otkdev:0"), ids_on("otkdev:1").T, torch.empty(0, device="otkdev:1"), ids_on("cpu")]
    keys, expected = tensor_keys(tensors), reference.tensor_keys(tensors)
    assert list(map(repr, keys)) == list(map(repr, expected))
    assert list(map(hash, keys)) == list(map(hash, expected))


def test_device_index_counts() -> None:
    first, second, again = tensor_keys([ids_on("otkdev:0"), ids_on("otkdev:1"), ids_on("otkdev:0").clone()])
    assert first == again
    assert hash(first) == hash(again)
    assert first != second
    assert hash(first) != hash(second)
    assert len({first, second, again, tensor_key(ids_on("cpu"))}) == 3


def test_device_counts_without_elements_too() -> None:
    places = ["cpu", "otkdev:0", "otkdev:1"]
    assert len(set(tensor_keys([torch.empty(0, device=place) for place in places]))) == 3


def test_one_call_asks_once(device: types.ModuleType) -> None:
    mask = torch.ones(4, 6, dtype=torch.bool)
    tensors = [ids_on("otkdev:0"), mask, ids_on("otkdev:1").T, mask.to("otkdev:0"), torch.empty(0, device="otkdev:0")]
    device.reset_counters()
    asked: list[list[torch.Tensor]] = []

    def recording(group: list[torch.Tensor]) -> list[torch.Tensor] | None:
        asked.append(group)
        return to_host(group)

    keys = _core.tensor_keys(tensors, recording, LIMIT)
    assert len(asked) == 1
    assert [id(tensor) for tensor in asked[0]] == [id(tensors[i]) for i in (0, 2, 3)]
    assert (device.copies_to_host(), device.bytes_to_host()) == (3, 192 + 192 + 24)
    assert [key.digest for key in keys] == [tensor_key(tensor.cpu()).digest for tensor in tensors]
    assert [key.device for key in keys] == [
        "privateuseone:0", "cpu", "privateuseone:1", "privateuseone:0", "privateuseone:0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(lambda: [torch.empty(0, 3, device="otkdev:0")], id="no elements"),
        pytest.param(lambda: [ids_on("cpu"), torch.empty(0, device="otkdev:1")], id="no elements and the host"),
        pytest.param(lambda: [], id="nothing"),
    ],
)
def test_nothing_is_copied_where_nothing_is_to_be_read(
    tensors: Callable[[], list[torch.Tensor]], device: types.ModuleType
) -> None:
    made = tensors()
    assert len(_core.tensor_keys(made, lambda group: pytest.fail("asked for a copy"), LIMIT)) == len(made)
    assert device.copies_to_host() == 0


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (lambda: torch.zeros(3), "dtype"),
        (lambda: torch.zeros(3, device="otkdev:0"), "dtype"),
        (lambda: torch.zeros(LIMIT + 1, dtype=torch.uint8, device="otkdev:0"), "size"),
        (lambda: "text", "type"),
    ],
    ids=["host float", "device float", "too large", "no tensor"],
)
def test_a_refused_call_copies_nothing(refused: Callable[[], Any], reason: str, device: types.ModuleType) -> None:
    tensors = [ids_on("otkdev:0"), refused()]
    device.reset_counters()
    with pytest.raises(UncacheableTensorError) as caught:
        tensor_keys(tensors)
    assert caught.value.reason == reason
    assert device.copies_to_host() == 0


def test_an_edit_on_the_device_counts() -> None:
    ids = ids_on("otkdev:0")
    before = tensor_key(ids)
    ids[1, 2] = 99
    assert tensor_key(ids) != before


def test_a_key_keeps_no_device_tensor_alive() -> None:
    ids = ids_on("otkdev:0")
    key, gone = tensor_key(ids), weakref.ref(ids)
    del ids
    assert gone() is None
    assert key == tensor_key(ids_on("otkdev:0"))


def test_large_device_tensors() -> None:
    ids = torch.arange(LIMIT // 8, device="otkdev:1")
    keys = tensor_keys([ids, ids.flip(0), torch.nn.Parameter(ids, requires_grad=False)])
    assert [key.digest for key in keys] == [
        xxhash.xxh3_128_digest(tensor.numpy().tobytes()) for tensor in (ids.cpu(), ids.cpu().flip(0), ids.cpu())
    ]
