"""The host copies behind the keys of device tensors: how many, when none, and what happens where they fail."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash

from omni_tensor_key import UncacheableTensorError, _core, tensor_keys
from omni_tensor_key.keys.host_copy import to_host

LIMIT = 1 << 20
KEYED = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip


def ids_on(device: str) -> torch.Tensor:
    return torch.arange(24, device=device).reshape(4, 6)


def test_tensors_of_all_dtypes_in_one_copy(rng: random.Random, device: types.ModuleType) -> None:
    """Packed behind one another, with odd numbers of bytes before and after the wide ones."""
    host = [torch.tensor([rng.randrange(2) for _ in range(rng.randrange(2, 8))]).to(dtype) for dtype in KEYED * 4]
    rng.shuffle(host)
    placed = [tensor.to(rng.choice(["otkdev:0", "otkdev:1"])) for tensor in host]
    strided = [torch.stack([tensor, tensor], dim=1)[:, 0] for tensor in placed]
    device.reset_counters()
    keys = tensor_keys([*placed, *strided])
    digests = [xxhash.xxh3_128_digest(tensor.numpy().tobytes()) for tensor in host]
    assert [key.digest for key in keys] == digests * 2
    assert [key.dtype for key in keys] == [str(tensor.dtype)[6:] for tensor in host] * 2


def test_one_strided_element_in_one_copy_with_others() -> None:
    """One token out of a column, beside another tensor of the device."""
    ids = ids_on("otkdev:0")
    key, _ = tensor_keys([ids[:1, 2].as_strided((1,), (6,), 2), ids])
    assert key.digest == xxhash.xxh3_128_digest((2).to_bytes(8, "little"))


def test_a_stream_under_graph_capture_is_not_synchronized(
    device: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [ids_on("otkdev:1")]
    device.set_device(0)
    asked_on = []
    monkeypatch.setattr(
        device, "is_current_stream_capturing", lambda: asked_on.append(device.current_device()) or True, raising=False
    )
    device.reset_counters()
    with pytest.raises(UncacheableTensorError, match="captured into a graph") as caught:
        tensor_keys(tensors)
    assert caught.value.reason == "graph_capture"
    assert device.copies_to_host() == 0
    assert asked_on == [1]
    assert device.current_device() == 0


def test_an_error_of_the_copy_comes_through() -> None:
    def failing(group: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("the device reports an error")

    with pytest.raises(RuntimeError, match="the device reports an error"):
        _core.tensor_keys([ids_on("cpu"), ids_on("otkdev:0")], failing, LIMIT)


class Marked(torch.Tensor):
    pass


WRONG_COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "another shape": lambda t: t.cpu().reshape(-1),
    "another dtype": lambda t: t.cpu().int(),
    "another dtype of the same size": lambda t: t.cpu().view(torch.uint64),
    "floats": lambda t: t.cpu().double(),
    "more elements": lambda t: t.cpu().repeat(1000, 1000),
    "still on the device": lambda t: t,
    "without content": lambda t: t.to("meta"),
    "sparse": lambda t: t.cpu().to_sparse(),
    "a subclass": lambda t: t.cpu().as_subclass(Marked),
    "no tensor": lambda t: t.cpu().numpy(),
    "None": lambda t: None,
}


@pytest.mark.parametrize("copy", WRONG_COPIES)
def test_a_wrong_copy_is_refused(copy: str) -> None:
    keys = _core.tensor_keys([ids_on("otkdev:0")], lambda group: [WRONG_COPIES[copy](t) for t in group], LIMIT)
    assert isinstance(keys, tuple)
    assert keys[0] == 0


TOO_FEW: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "none": lambda group: [],
    "one": lambda group: to_host(group[:1]),
    "a number": lambda group: 3,
    "an iterator": lambda group: iter(group),
}


@pytest.mark.parametrize("copies", TOO_FEW)
def test_too_few_copies_are_refused(copies: str) -> None:
    with pytest.raises((UncacheableTensorError, IndexError, TypeError, ValueError, RuntimeError)):
        _core.tensor_keys([ids_on("otkdev:0"), ids_on("otkdev:1")], TOO_FEW[copies], LIMIT)
