"""What is stored of an output, and what a hit returns, for calls with tensors; calls without them stay upstream's."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import identical, installed
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import omni_tensor_key

pytestmark = pytest.mark.usefixtures("active")

Pair = namedtuple("Pair", "embeds mask")
IDS = torch.tensor([[3, 1, 2]])


class Level(enum.Enum):
    ONE = 1


class AttributeDict(dict[str, Any]):
    __getattr__ = dict.__getitem__


class OwnList(list[Any]):
    pass


class OwnTensor(torch.Tensor):
    pass


class Made:
    """A pipeline whose output a function makes of the token IDs."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        self.make, self.runs = make, 0

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        self.runs += 1
        return self.make(torch.as_tensor(prompt_ids))


STORED: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda ids: ids * 2.5,
    "bfloat16": lambda ids: (ids * 2.5).bfloat16(),
    "scalar": lambda ids: ids.sum(),
    "no elements": lambda ids: torch.empty(0, 4),
    "parameter": lambda ids: nn.Parameter(ids * 2.5, requires_grad=False),
    "tuple": lambda ids: (ids * 2.5, None, 3, "a", 1.5, b"b", True, torch.float32, torch.device("cpu"), ids.shape),
    "list": lambda ids: [ids, [ids + 1]],
    "dict": lambda ids: {"embeds": ids, 1: (ids, {"deep": ids})},
    "named tuple": lambda ids: Pair(ids, [ids]),
    "enum": lambda ids: (Level.ONE, ids),
    "none": lambda ids: None,
    "the caller's tensor": lambda ids: ids,
    "a view of it": lambda ids: (ids.t(), ids[:, 1:]),
    "another dtype of it": lambda ids: ids.view(torch.int32),
    "expanded": lambda ids: ids.expand(4, 3),
    "not contiguous": lambda ids: torch.stack([ids, ids + 1])[:, :, ::2],
    "conjugate": lambda ids: (ids + 1j).conj(),
}
NOT_STORED: dict[str, Callable[[torch.Tensor], Any]] = {
    "ModelOutput": lambda ids: BaseModelOutput(last_hidden_state=ids * 1.5),
    "return_types": lambda ids: ids.max(-1),
    "own dict": lambda ids: AttributeDict(embeds=ids),
    "ordered dict": lambda ids: OrderedDict(embeds=ids),
    "own list": lambda ids: OwnList([ids]),
    "object": lambda ids: (ids, object()),
    "array": lambda ids: (ids, np.ones(2)),
    "set": lambda ids: {1, 2},
    "tensor subclass": lambda ids: ids.as_subclass(OwnTensor),
    "sparse": lambda ids: ids.to_sparse(),
    "nested": lambda ids: torch.nested.nested_tensor([ids[0].float()], layout=torch.strided),
    "quantized": lambda ids: torch.quantize_per_tensor(ids.float(), 0.1, 0, torch.quint8),
    "meta": lambda ids: torch.empty(2, device="meta"),
    "mutable key of a dict": lambda ids: {(1, 2): ids},
}


def scribble(value: Any) -> None:
    """Write into every tensor of an output, as a caller may do with what its miss returned."""
    if isinstance(value, torch.Tensor) and value.numel() and not value.is_conj():
        value.data.as_strided((1,), (1,)).fill_(-7)
    elif isinstance(value, tuple | list):
        for item in value:
            scribble(item)
    elif isinstance(value, dict):
        scribble(list(value.values()))


@pytest.mark.parametrize("make", STORED.values(), ids=STORED)
def test_a_hit_returns_what_was_encoded_whatever_is_written_afterwards(make: Callable[..., Any]) -> None:
    pipeline, cache = installed(Made(make))
    ids = IDS.clone()
    scribble(pipeline.encode_prompt(ids))
    ids.fill_(9)  # a buffer of the caller that is used again
    hit = pipeline.encode_prompt(IDS.clone())
    assert cache.stats()["hits"] == 1
    expected = make(IDS)
    assert identical(hit, expected.detach() if isinstance(expected, nn.Parameter) else expected)


@pytest.mark.parametrize("make", NOT_STORED.values(), ids=NOT_STORED)
def test_what_has_no_private_copy_is_returned_and_not_stored(make: Callable[..., Any]) -> None:
    pipeline, cache = installed(Made(make))
    kind = type(make(IDS))
    assert {type(pipeline.encode_prompt(IDS)) for _ in range(3)} == {kind}
    assert (pipeline.runs, cache.stats()["size"]) == (3, 0)
    assert cache.guard.counts == {("not_stored", "output_type"): 3}
    assert omni_tensor_key.stats()["not_stored"]["Made"]["output_type"] >= 3


@pytest.mark.parametrize(
    "make", [*STORED.values(), *list(NOT_STORED.values())[:4]], ids=[*STORED, *list(NOT_STORED)[:4]]
)
def test_entries_of_list_keys_are_upstreams(make: Callable[..., Any]) -> None:
    from vllm_omni.diffusion.cache.prompt_embed_cache import _detach_output

    pipeline, cache = installed(Made(make))
    pipeline.encode_prompt(IDS.tolist())
    hit = pipeline.encode_prompt(IDS.tolist())
    assert cache.stats()["hits"] == 1
    expected = _detach_output(make(IDS))
    assert type(hit) is type(expected)


def test_a_buffer_that_the_encoder_writes_again() -> None:
    class Static(Made):
        """As an encoder in a CUDA graph."""

        def __init__(self) -> None:
            super().__init__(lambda ids: None)
            self.buffer = torch.zeros(1, 3)

        def encode_prompt(self, prompt_ids: Any) -> Any:
            return self.buffer.copy_(prompt_ids)

    pipeline, cache = installed(Static())
    pipeline.encode_prompt(IDS)
    pipeline.encode_prompt(IDS + 1)
    assert torch.equal(pipeline.encode_prompt(IDS.clone()), IDS.float())
    assert cache.stats()["hits"] == 1


def test_a_view_does_not_keep_its_batch_alive() -> None:
    pipeline, cache = installed(Made(lambda ids: torch.zeros(1000, 4)[:1]))
    pipeline.encode_prompt(IDS)
    assert cache.nbytes() == 16
    pipeline.encode_prompt(IDS.tolist())
    assert cache.nbytes() == 16 + 16000  # upstream's entry does


class Gradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = nn.Embedding(16, 4)

    def encode_prompt(self, prompt_ids: Any) -> Any:
        return self.text_encoder(prompt_ids), prompt_ids


def test_an_output_that_requires_a_gradient_is_not_stored() -> None:
    pipeline, cache = installed(Gradient())
    for _ in range(2):
        pipeline.encode_prompt(IDS)[0].sum().backward()
    assert cache.stats()["size"] == 0
    torch.optim.SGD(pipeline.parameters(), 0.1).step()
    with torch.no_grad():
        assert torch.equal(pipeline.encode_prompt(IDS)[0], pipeline.text_encoder(IDS))
        pipeline.encode_prompt(IDS)
    assert cache.stats()["hits"] == 1
    assert pipeline.encode_prompt(IDS)[0].requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gets_its_gradient(reentrant: bool) -> None:
    pipeline, _ = installed(Gradient())
    factor = torch.ones(1, requires_grad=True)

    def run(factor: torch.Tensor) -> torch.Tensor:
        return (pipeline.encode_prompt(IDS)[0] * factor).sum()

    torch.utils.checkpoint.checkpoint(run, factor, use_reentrant=reentrant).backward()
    assert pipeline.text_encoder.weight.grad is not None


STATES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
}


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = nn.Linear(3, 2).requires_grad_(False)

    def encode_prompt(self, prompt_ids: Any) -> Any:
        return self.text_encoder(torch.as_tensor(prompt_ids).float()) * torch.ones(1)


def test_torchs_state_is_part_of_the_lookup_of_calls_with_tensors() -> None:
    pipeline, cache = installed(Matrix())
    for number, state in enumerate(STATES.values()):
        with state():
            pipeline.encode_prompt(IDS)
            assert cache.stats()["misses"] == number + 1
            hit = pipeline.encode_prompt(IDS)
            assert identical(hit, Matrix.encode_prompt(pipeline, IDS))
            assert hit.is_inference() == torch.is_inference_mode_enabled()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            assert pipeline.encode_prompt(IDS).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    misses = cache.stats()["misses"]
    for state in STATES.values():  # and not of others: these are upstream's
        with state():
            pipeline.encode_prompt(IDS.tolist())
    assert cache.stats()["misses"] == misses + 1


def test_tracing_and_dispatch_modes_bypass() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    pipeline, cache = installed(Matrix())
    pipeline.encode_prompt(IDS)
    with Counting():
        pipeline.encode_prompt(IDS)
    traced = torch.jit.trace(lambda ids: pipeline.encode_prompt(ids), (IDS,), check_trace=False)
    other = torch.tensor([[7, 8, 9]])
    assert torch.equal(traced(other), Matrix.encode_prompt(pipeline, other))
    assert cache.stats()["bypassed"] == 2
    reasons = omni_tensor_key.stats()["bypassed"]["Matrix"]["prompt_ids"]
    assert reasons == {"dispatch_mode": 1, "tracing": 1}
    with torch.device("cpu"):  # a function mode, which hides nothing
        pipeline.encode_prompt(IDS)
    assert cache.stats()["hits"] == 1


def test_a_call_in_a_call() -> None:
    """An encode_prompt() that calls itself through the cache: both results are stored, each under its own key."""

    class Nested(Made):
        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            inner = self.encode_prompt(prompt_ids[:, :1]) if prompt_ids.shape[1] > 1 else 0  # type: ignore[attr-defined]
            return super().encode_prompt(prompt_ids) + inner

    pipeline, cache = installed(Nested(lambda ids: ids * 2))
    for _ in range(2):
        assert pipeline.encode_prompt(IDS).tolist() == [[12, 8, 10]]
        assert pipeline.encode_prompt(IDS[:, :1]).tolist() == [[6]]
    assert (pipeline.runs, cache.stats()["size"], cache.stats()["hits"]) == (2, 2, 3)


def test_a_call_that_raises_stores_nothing_and_leaves_nothing_for_the_next() -> None:
    class Failing(Made):
        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            found = super().encode_prompt(prompt_ids)
            if self.runs == 1:
                raise RuntimeError("mine")
            return found

    pipeline, cache = installed(Failing(lambda ids: ids * 2))
    with pytest.raises(RuntimeError, match="mine"):
        pipeline.encode_prompt(IDS)
    assert torch.equal(pipeline.encode_prompt(IDS + 1, torch.ones(1)), IDS * 2 + 2)  # bypasses
    assert cache.stats()["size"] == 0
    assert torch.equal(pipeline.encode_prompt(IDS), IDS * 2)
    assert torch.equal(pipeline.encode_prompt(IDS), IDS * 2)
    assert cache.stats()["hits"] == 1
