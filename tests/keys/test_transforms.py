"""Tensors that a transform or a subclass wraps have no key; plain tensors have theirs wherever the call is made."""

from __future__ import annotations

import subprocess
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from omni_tensor_key import UncacheableTensorError, _core, reference, tensor_key
from omni_tensor_key.host_copy import to_host

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use

IDS = torch.arange(6).reshape(2, 3)
COLUMNS = IDS.T
TRANSFORMS = ["vmap", "grad", "jvp", "functionalize"]


def outcome(backend: types.ModuleType, tensor: torch.Tensor) -> str:
    """The repr of the tensor's key, or the reason why it has none."""
    try:
        return repr(backend.tensor_keys([tensor], to_host, 1 << 20)[0])
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
@pytest.mark.parametrize("backend", [_core, reference], ids=["native", "reference"])
def test_what_a_transform_wraps_is_refused(backend: types.ModuleType, transform: str) -> None:
    assert inside(transform, lambda wrapped: outcome(backend, wrapped)) in ("storage", "unexportable")


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_backends_agree_on_what_a_transform_wraps(transform: str, count: int) -> None:
    assert inside(transform, lambda wrapped: outcome(_core, wrapped) == outcome(reference, wrapped), count)


@pytest.mark.parametrize("transform", [transform for transform in TRANSFORMS if transform != "functionalize"])
def test_what_a_transform_wraps_is_refused_without_elements_too(transform: str) -> None:
    assert inside(transform, lambda wrapped: outcome(_core, wrapped), 0) in ("storage", "unexportable")


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_plain_tensor_inside_a_transform_has_its_key(transform: str) -> None:
    """Natively: the reference calls torch's operators, which transforms intercept."""
    expected = outcome(_core, IDS)
    assert inside(transform, lambda _: outcome(_core, IDS)) == expected


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "fake tensors": FakeTensorMode,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", [_core, reference], ids=["native", "reference"])
def test_a_plain_tensor_inside_a_mode_has_its_key(backend: types.ModuleType, mode: str) -> None:
    if backend is reference and mode == "fake tensors":
        pytest.skip("the reference calls torch's operators, which this mode intercepts")
    expected = outcome(_core, IDS), outcome(_core, COLUMNS)
    with MODES[mode]():
        inside_mode = outcome(backend, IDS), outcome(backend, COLUMNS)
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
from omni_tensor_key import UncacheableTensorError, _core, reference

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = DTensor.from_local(torch.arange(6), init_device_mesh("cpu", (1,)))
for backend in (_core, reference):
    try:
        backend.tensor_keys([tensor], None, 1 << 20)
    except UncacheableTensorError as error:
        print(error.reason, error)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo to make a DTensor with")
def test_dtensor(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = run_python(DTENSOR, GLOO_SOCKET_IFNAME="lo")
    assert result.returncode == 0, result.stderr[-2000:]
    native, expected = result.stdout.splitlines()
    assert native == expected
    assert native.startswith("subclass cannot key this value: a torch.distributed.tensor.DTensor is a subclass")
