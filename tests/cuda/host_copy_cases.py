"""What test_host_copy.py runs in a process of its own: torch copies all tensors of a device at once."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import device_backend
import pytest
import torch

from omni_tensor_key import tensor_keys
from omni_tensor_key.keys.host_copy import to_host

DTYPES = [
    torch.bool, torch.int64, torch.int8, torch.uint16, torch.int32, torch.uint8, torch.int16, torch.uint32,
    torch.uint64,
]  # fmt: skip


@pytest.fixture(autouse=True)
def otkdev() -> Iterator[types.ModuleType]:
    module = device_backend.load()
    module.reset_counters()
    yield module
    module.set_device(0)


def of_all_dtypes(device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Odd sizes and layouts in an order that would misalign them if they were packed as they come."""
    values = [torch.arange(1, 14).to(dtype).expand(3, 13).T[1:] for dtype in DTYPES]
    values += [torch.tensor(7), torch.tensor([True]), torch.arange(60).reshape(3, 4, 5)[:, 1:3, ::2]]
    return values, [value.to(device) for value in values]


def same(copies: list[torch.Tensor] | None, values: list[torch.Tensor]) -> None:
    assert copies is not None
    for copy, value in zip(copies, values, strict=True):
        assert (copy.dtype, copy.shape, copy.device) == (value.dtype, value.shape, torch.device("cpu"))
        assert copy.tolist() == value.tolist()


def test_one_copy_for_each_device(otkdev: types.ModuleType) -> None:
    values, tensors = of_all_dtypes("otkdev:0")
    others, more = of_all_dtypes("otkdev:1")
    otkdev.reset_counters()
    mixed = [tensor for pair in zip(tensors, more, strict=True) for tensor in pair]
    copies = to_host(mixed)
    assert otkdev.copies_to_host() == 2
    assert otkdev.bytes_to_host() == sum(value.nbytes for value in values + others)
    same(copies, [value for pair in zip(values, others, strict=True) for value in pair])


def test_one_tensor_is_not_packed(otkdev: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cat", None)
    ids = torch.arange(12).reshape(3, 4).T
    same(to_host([ids.to("otkdev:0")]), [ids])
    assert otkdev.copies_to_host() == 1


def test_parameters_inference_tensors_and_repeats(otkdev: types.ModuleType) -> None:
    ids = torch.arange(5)
    parameter = torch.nn.Parameter(ids.to("otkdev:0"), requires_grad=False)
    with torch.inference_mode():
        made = ids.to("otkdev:0")
        same(to_host([parameter, made, made]), [ids] * 3)
    same(to_host([parameter, made, made]), [ids] * 3)
    assert otkdev.copies_to_host() == 2


def refuse(error: type[Exception]) -> Any:
    def cat(*args: object, **kwargs: object) -> None:
        raise error("no cat on this device")

    return cat


def test_a_device_that_cannot_pack(otkdev: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    values, tensors = of_all_dtypes("otkdev:0")
    otkdev.reset_counters()
    monkeypatch.setattr(torch, "cat", refuse(NotImplementedError))
    same(to_host(tensors), values)
    assert otkdev.copies_to_host() == len(values)


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, MemoryError])
def test_another_error_comes_through(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    _, tensors = of_all_dtypes("otkdev:0")
    monkeypatch.setattr(torch, "cat", refuse(error))
    with pytest.raises(error, match="no cat"):
        to_host(tensors)


def test_capture_is_asked_of_every_device_first(otkdev: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otkdev, "is_current_stream_capturing", lambda: otkdev.current_device() == 1, raising=False)
    ids = torch.arange(5)
    assert to_host([ids.to("otkdev:0"), ids.to("otkdev:1")]) is None
    assert otkdev.copies_to_host() == 0


def test_keys(otkdev: types.ModuleType) -> None:
    values, tensors = of_all_dtypes("otkdev:0")
    otkdev.reset_counters()
    keys = tensor_keys(tensors)
    assert otkdev.copies_to_host() == 1
    assert [key.digest for key in keys] == [key.digest for key in tensor_keys(values)]
