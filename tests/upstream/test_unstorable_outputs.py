"""An output that may hide an input of its call is not stored."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers.modeling_outputs import BaseModelOutput

from .support import counts, installed
from .test_outputs import Encoder, Output

pytestmark = pytest.mark.usefixtures("active")


class Dressed(Output):
    """Has room for more than the fields."""

    def __init__(self, *fields: Any) -> None:
        self.more = fields[1]


@dataclasses.dataclass
class Record:
    mask: Any


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.untyped_storage, torch.Tensor.clone):
            raise TypeError(f"no {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


def per_channel(mask: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(6), mask.double(), mask, 0, torch.qint8)


def fake(embeds: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(embeds)


NOT_STORED: dict[str, Callable[..., Any]] = {
    "an object": lambda ids, mask, embeds: types.SimpleNamespace(mask=mask),
    "a dataclass": lambda ids, mask, embeds: (embeds, Record(mask)),
    "an array": lambda ids, mask, embeds: {"mask": mask.numpy()},
    "a deque": lambda ids, mask, embeds: collections.deque([mask]),
    "an iterator": lambda ids, mask, embeds: iter([mask]),
    "a memory view": lambda ids, mask, embeds: memoryview(mask.numpy()),
    "a storage": lambda ids, mask, embeds: [mask.untyped_storage()],
    "a key of a dict": lambda ids, mask, embeds: {(1, mask): embeds},
    "an attribute of a named tuple": lambda ids, mask, embeds: Dressed(embeds, mask),
    "a tensor in transformers' output": lambda ids, mask, embeds: BaseModelOutput(hidden_states=(Record(mask),)),
    "a subclass": lambda ids, mask, embeds: mask.as_subclass(Refusing),
    "a fake tensor": lambda ids, mask, embeds: fake(embeds),
    "nested": lambda ids, mask, embeds: torch.nested.nested_tensor([embeds[0], embeds[1]], layout=torch.jagged),
    "nested, strided": lambda ids, mask, embeds: torch.nested.nested_tensor([embeds[0], embeds[1]]),
    "quantized by channels": lambda ids, mask, embeds: per_channel(mask),
    "functional": lambda ids, mask, embeds: torch._to_functional_tensor(embeds),
}


@pytest.mark.parametrize("make", NOT_STORED.values(), ids=NOT_STORED)
def test_what_may_hide_an_alias_is_not_stored(make: Callable[..., Any]) -> None:
    pipeline, cache = installed(Encoder(make))
    for _ in range(2):
        assert pipeline.encode_prompt(torch.arange(6), torch.ones(6).long()) is pipeline.output
    assert counts(cache) == (0, 2, 0)
    assert cache.stats()["size"] == 0


@pytest.mark.parametrize("make", [NOT_STORED["an object"], NOT_STORED["a dataclass"]])
def test_calls_without_tensors_are_upstreams(make: Callable[..., Any]) -> None:
    class Listing:
        def encode_prompt(self, prompt: str) -> Any:
            return make(None, prompt, None)

    pipeline, cache = installed(Listing())
    assert pipeline.encode_prompt("a") is not None
    pipeline.encode_prompt("a")
    assert counts(cache) == (1, 1, 0)


def test_a_tensor_of_a_transform_is_not_stored() -> None:
    pipeline, cache = installed(Encoder(lambda ids, mask, embeds: pipeline.wrapped))

    def encode(wrapped: torch.Tensor) -> torch.Tensor:
        assert type(wrapped) is torch.Tensor
        pipeline.wrapped = wrapped
        pipeline.encode_prompt(ids)
        return wrapped.sum()

    ids = torch.arange(4)
    for transform in (torch.vmap, torch.func.grad, torch.func.functionalize):
        transform(encode)(torch.ones(4))
    assert counts(cache) == (0, 3, 0)
    assert cache.stats()["size"] == 0


def test_the_parts_of_a_sparse_output_are_copied() -> None:
    def make(ids: torch.Tensor, mask: torch.Tensor, embeds: torch.Tensor) -> Any:
        return torch.sparse_coo_tensor(ids, mask, (4, 1), is_coalesced=True), torch.sparse_csr_tensor(*CSR, mask)

    CSR = torch.tensor([0, 2]), torch.tensor([0, 1])
    pipeline, cache = installed(Encoder(make))
    ids, mask = torch.tensor([[0, 1], [0, 0]]), torch.tensor([5, 6])
    pipeline.encode_prompt(ids, mask)
    mask.zero_()
    coo, csr = pipeline.encode_prompt(ids, torch.tensor([5, 6]))
    assert counts(cache) == (1, 1, 0)
    assert coo.values().tolist() == csr.values().tolist() == [5, 6]
