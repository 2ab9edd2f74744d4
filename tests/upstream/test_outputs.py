"""What is stored does not change when the caller goes on to use its tensors, and is otherwise upstream's."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from omni_tensor_key import activate, deactivate

from .support import counts, identical, installed

pytestmark = pytest.mark.usefixtures("active")


class Output(NamedTuple):
    embeds: torch.Tensor
    mask: Any


class Layout(enum.Enum):
    NEW = 1


class Encoder:
    """Returns what `make` makes of the IDs, the mask and the embeddings."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.runs = 0

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        self.runs += 1
        ids = prompt_ids[0] if isinstance(prompt_ids, (list, tuple)) else prompt_ids
        embeds = ids.float().unsqueeze(-1).expand(*ids.shape, 4).contiguous()
        self.output = self.make(ids, attention_mask, embeds)
        return self.output


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for item in value for found in tensors(item)] if isinstance(value, (list, tuple)) else []


def copied(value: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors(value)]


def storages(value: Any) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors(value)]


ALIASES: dict[str, Callable[..., Any]] = {
    "the mask": lambda ids, mask, embeds: mask,
    "the mask, moved to its own device": lambda ids, mask, embeds: (embeds, mask.to("cpu")),
    "the mask, cast to its own dtype": lambda ids, mask, embeds: (embeds, mask.to(mask.dtype)),
    "the IDs": lambda ids, mask, embeds: (embeds, ids),
    "both": lambda ids, mask, embeds: (ids, mask),
    "a view": lambda ids, mask, embeds: (embeds, mask.view(mask.shape)),
    "another shape": lambda ids, mask, embeds: (embeds, mask.unsqueeze(0).expand(3, *mask.shape)),
    "a slice": lambda ids, mask, embeds: (embeds, mask[..., 1:3]),
    "the end": lambda ids, mask, embeds: (embeds, mask[..., -1:]),
    "nothing of it": lambda ids, mask, embeds: (embeds, mask[..., :0]),
    "another dtype": lambda ids, mask, embeds: (embeds, mask.view(torch.uint8)),
    "transposed": lambda ids, mask, embeds: (embeds, torch.atleast_2d(mask).t()),
    "in a list": lambda ids, mask, embeds: [embeds, [mask]],
    "in a dict": lambda ids, mask, embeds: {"embeds": embeds, "mask": {"mask": mask}},
    "in a named tuple": lambda ids, mask, embeds: Output(embeds, mask),
    "deep": lambda ids, mask, embeds: (None, [{"a": (Output(embeds, [mask]), "text")}], 3),
}

# What a caller reuses from one call to the next. The input is a part of a larger buffer in some.
BUFFERS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "1-D": lambda: (torch.arange(6), torch.ones(6, dtype=torch.int64)),
    "2-D, bool": lambda: (torch.arange(6).reshape(2, 3), torch.ones(2, 3, dtype=torch.bool)),
    "columns of a buffer": lambda: (torch.arange(24).reshape(2, 12)[:, 2:8], torch.ones(2, 12).long()[:, 2:8]),
    "one buffer": lambda: (lambda both: (both[0], both[1]))(torch.arange(12).reshape(2, 6)),
    "parameters": lambda: (torch.arange(6), torch.nn.Parameter(torch.ones(6).long(), requires_grad=False)),
}


@pytest.mark.parametrize("make", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("buffers", BUFFERS.values(), ids=BUFFERS)
def test_a_hit_returns_what_the_encoder_returned(buffers: Callable[[], Any], make: Callable[..., Any]) -> None:
    pipeline, cache = installed(Encoder(make))
    for nest in (lambda tensor: tensor, lambda tensor: [tensor]):
        ids, mask = buffers()
        miss = pipeline.encode_prompt(nest(ids), mask)
        assert miss is pipeline.output
        expected, sources = copied(miss), storages(miss)
        fresh_ids, fresh_mask = ids.clone(), mask.clone()
        ids.zero_()
        mask.zero_()
        hit = pipeline.encode_prompt(nest(fresh_ids), fresh_mask)
        assert identical(tensors(hit), expected)
        assert type(hit) in (type(miss), torch.Tensor)  # upstream stores a Parameter as a Tensor
        assert storages(miss) == sources, "the encoder's own output was changed"
    assert counts(cache) == (2, 2, 0)
    assert pipeline.runs == 2


def test_an_edit_between_the_call_and_the_next_miss() -> None:
    """One buffer for all prompts, as a rollout worker may have it."""
    pipeline, cache = installed(Encoder(ALIASES["the mask, moved to its own device"]))
    ids, mask = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    for round_ in range(2):
        for prompt in range(8):
            ids.fill_(prompt)
            mask.copy_(torch.tensor([prompt >> bit & 1 for bit in range(4)]))
            embeds, returned = pipeline.encode_prompt(ids, mask)
            assert embeds.eq(prompt).all()
            assert torch.equal(returned, mask), (round_, prompt)
    assert counts(cache) == (8, 8, 0)


NO_ALIAS: dict[str, Callable[..., Any]] = {
    "a tensor": lambda ids, mask, embeds: embeds,
    "a tuple": lambda ids, mask, embeds: (embeds, mask.clone()),
    "a dict": lambda ids, mask, embeds: {"a": [embeds], "b": Output(embeds, mask + 1)},
}


@pytest.mark.parametrize("make", NO_ALIAS.values(), ids=NO_ALIAS)
def test_other_outputs_are_stored_without_a_copy(make: Callable[..., Any]) -> None:
    pipeline, cache = installed(Encoder(make))
    mask = torch.ones(6, dtype=torch.int64)
    miss, hit = (pipeline.encode_prompt(torch.arange(6), mask) for _ in range(2))
    assert storages(hit) == storages(miss)
    assert counts(cache) == (1, 1, 0)


def test_only_the_aliasing_tensor_is_copied() -> None:
    pipeline, _ = installed(Encoder(lambda ids, mask, embeds: Output(embeds, mask)))
    miss, hit = (pipeline.encode_prompt(torch.arange(6), torch.ones(6).long()) for _ in range(2))
    assert storages(hit.embeds) == storages(miss.embeds)
    assert storages(hit.mask) != storages(miss.mask)


def quantized(embeds: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(embeds, 0.1, 0, torch.qint8)


ODD: dict[str, Callable[..., Any]] = {
    "None": lambda ids, mask, embeds: None,
    "text": lambda ids, mask, embeds: "text",
    "constants": lambda ids, mask, embeds: (1, 2.0, 1j, True, b"b", torch.int8, mask.device, mask.shape, Layout.NEW),
    "empty containers": lambda ids, mask, embeds: ([], (), {}),
    "an empty tensor": lambda ids, mask, embeds: torch.empty(0),
    "sparse": lambda ids, mask, embeds: embeds.to_sparse(),
    "sparse rows": lambda ids, mask, embeds: embeds.to_sparse_csr(),
    "meta": lambda ids, mask, embeds: embeds.to("meta"),
    "quantized": lambda ids, mask, embeds: quantized(embeds),
    "complex": lambda ids, mask, embeds: torch.complex(embeds, embeds).conj(),
    "negated": lambda ids, mask, embeds: torch.complex(embeds, embeds).conj().imag,
    "no storage": lambda ids, mask, embeds: (embeds.untyped_storage().resize_(0), embeds)[1],
    "transformers' output": lambda ids, mask, embeds: BaseModelOutput(last_hidden_state=embeds),
    "with gradient": lambda ids, mask, embeds: embeds.requires_grad_() * 2,
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_odd_outputs(make: Callable[..., Any]) -> None:
    pipeline, cache = installed(Encoder(make))
    call = (torch.arange(6), torch.ones(6, dtype=torch.int64))
    miss, hit = pipeline.encode_prompt(*call), pipeline.encode_prompt(*call)
    assert counts(cache) == (1, 1, 0)
    assert miss is pipeline.output
    assert type(hit) is (dict if isinstance(miss, dict) else type(miss))  # upstream makes dicts plain
    for one, other in zip(tensors(hit), tensors(miss), strict=True):
        assert (one.shape, one.dtype, one.layout, one.device) == (other.shape, other.dtype, other.layout, other.device)
        assert not one.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_aliases_under_autograds_modes(mode: Callable[[], Any]) -> None:
    pipeline, cache = installed(Encoder(ALIASES["the mask, moved to its own device"]))
    with mode():
        ids, mask = torch.arange(4), torch.ones(4).long()
        pipeline.encode_prompt(ids, mask)
        mask.zero_()
    _, returned = pipeline.encode_prompt(torch.arange(4), torch.ones(4).long())
    assert counts(cache) == (1, 1, 0)
    assert returned.tolist() == [1, 1, 1, 1]


def test_a_call_during_which_the_extension_is_switched_off() -> None:
    def make(ids: torch.Tensor, mask: torch.Tensor, embeds: torch.Tensor) -> Any:
        deactivate()
        return mask

    pipeline, _ = installed(Encoder(make))
    mask = torch.ones(4, dtype=torch.int64)
    pipeline.encode_prompt(torch.arange(4), mask)
    activate()
    pipeline.make = ALIASES["the mask"]
    mask.zero_()
    assert pipeline.encode_prompt(torch.arange(4), torch.ones(4).long()).tolist() == [1, 1, 1, 1]


def test_an_encoder_that_raises_stores_nothing() -> None:
    pipeline, cache = installed(Encoder(lambda ids, mask, embeds: 1 / 0))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            pipeline.encode_prompt(torch.arange(4))
    assert counts(cache) == (0, 2, 0)
    assert cache.stats()["size"] == 0
    pipeline.make = ALIASES["the IDs"]
    pipeline.encode_prompt(torch.arange(4))
    pipeline.encode_prompt(torch.arange(4))
    assert counts(cache) == (1, 3, 0)


def test_the_tensor_gets_other_storage_while_the_key_is_made(active: Any) -> None:
    """The alias is one of the storage that was read, which is not the one that was looked at first."""

    class Returning:
        def encode_prompt(self, ids: torch.Tensor, then: Any) -> torch.Tensor:
            return ids.view(-1)

    class Swaps:
        def __repr__(self) -> str:
            ids.set_(torch.tensor([4, 5, 6]))
            return "Swaps"

    class Quiet:
        def __repr__(self) -> str:
            return "Swaps"

    pipeline = Returning()
    cache = active.install_prompt_embed_cache(pipeline)
    ids = torch.tensor([1, 2, 3])
    pipeline.encode_prompt(ids, {Swaps(): 1})
    ids.fill_(99)
    assert pipeline.encode_prompt(torch.tensor([4, 5, 6]), {Quiet(): 1}).tolist() == [4, 5, 6]
    assert cache.stats()["hits"] == 1
