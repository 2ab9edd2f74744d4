"""Tensors that a transform or a subclass wraps have no key; plain tensors have theirs wherever the call is made."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from omni_tensor_key import UncacheableTensorError, tensor_key

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use

IDS = torch.arange(6).reshape(2, 3)
COLUMNS = IDS.T
TRANSFORMS = ["vmap", "grad", "jvp", "functionalize"]


def outcome(tensor: torch.Tensor) -> str:
    """The repr of the tensor's key, or the reason why it has none."""
    try:
        return repr(tensor_key(tensor))
    except UncacheableTensorError as error:
        return error.reason


def inside(transform: str, seen: Callable[[torch.Tensor], Any], count: int = 3) -> list[Any]:
    """What `seen` returns for a tensor of integers or bools, with `count` elements, that the transform wraps."""
    results = []

    def differentiated(x: torch.Tensor) -> torch.Tensor:
        results.append(seen(x > 0))
        return x.sum()

    def mapped(x: torch.Tensor) -> torch.Tensor:
        results.append(seen(x))
        return x

    if transform == "vmap":
        torch.vmap(mapped)(torch.arange(2 * count).reshape(2, count))
    elif transform == "grad":
        torch.func.grad(differentiated)(torch.ones(count))
    elif transform == "jvp":
        torch.func.jvp(differentiated, (torch.ones(count),), (torch.ones(count),))
    else:
        torch.func.functionalize(mapped)(torch.arange(count))
    assert len(results) == 1
    return results[0]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_a_transform_wraps_is_refused(transform: str) -> None:
    assert inside(transform, lambda wrapped: outcome(wrapped)) in ("storage", "unexportable")


@pytest.mark.parametrize("transform", [transform for transform in TRANSFORMS if transform != "functionalize"])
def test_what_a_transform_wraps_is_refused_without_elements_too(transform: str) -> None:
    assert inside(transform, lambda wrapped: outcome(wrapped), 0) in ("storage", "unexportable")


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_plain_tensor_inside_a_transform_has_its_key(transform: str) -> None:
    expected = outcome(IDS)
    assert inside(transform, lambda _: outcome(IDS)) == expected


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "fake tensors": FakeTensorMode,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_tensor_inside_a_mode_has_its_key(mode: str) -> None:
    expected = outcome(IDS), outcome(COLUMNS)
    with MODES[mode]():
        inside_mode = outcome(IDS), outcome(COLUMNS)
    assert inside_mode == expected


def test_an_inference_tensor_has_the_key_of_an_ordinary_one() -> None:
    with torch.inference_mode():
        ids = torch.arange(6).reshape(2, 3)
        inside_mode = tensor_key(ids)
    assert ids.is_inference()
    assert inside_mode == tensor_key(ids) == tensor_key(IDS)


DTENSOR = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, init_device_mesh
from omni_tensor_key import UncacheableTensorError, tensor_key

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = DTensor.from_local(torch.arange(6), init_device_mesh("cpu", (1,)))
try:
    tensor_key(tensor)
except UncacheableTensorError as error:
    print(error.reason, error)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo to make a DTensor with")
def test_dtensor(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = run_python(DTENSOR, GLOO_SOCKET_IFNAME="lo")
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith("subclass cannot key this value: a torch.distributed.tensor.DTensor is a subclass")
