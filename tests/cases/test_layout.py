"""How elements lie in memory, and tensors that are no plain ones: cases 10 to 17."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from omni_tensor_key import tensor_key

from .support import IDS, all_agree, all_bypass, all_differ

pytestmark = pytest.mark.usefixtures("active")

GRID = torch.arange(48).reshape(6, 8)
VIEWS = {
    "transposed": GRID.T,
    "column slice": GRID[:, 2:5],
    "row slice": GRID[2:4],
    "row slice with an offset": GRID[3:, 1:],
    "every other": GRID[::2, ::3],
    "expanded": GRID[:1].expand(5, -1),
    "expanded twice": torch.tensor(7).expand(3, 4),
    "flipped": GRID.flip(1),
    "as_strided": GRID.as_strided((3, 3), (1, 2), 4),
    "windows": GRID[0].unfold(0, 3, 1),
    "diagonal": GRID.diagonal(),
    "more dimensions": GRID[:, None, :, None].expand(-1, 2, -1, 1),
    "size 1 with odd strides": GRID.as_strided((1, 4, 1), (1 << 61, 3, 1 << 61)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int32, torch.int64], ids=str)
def test_case_10_a_view_has_the_key_of_its_contiguous_clone(name: str, dtype: torch.dtype) -> None:
    view = VIEWS[name].to(dtype) if dtype != torch.int64 else VIEWS[name]
    view = view.as_strided(view.shape, view.stride(), view.storage_offset())
    assert all_agree(view, view.contiguous().clone(), torch.tensor(view.tolist(), dtype=dtype))


def test_case_11_c_and_fortran_order_are_one_key() -> None:
    c_order = torch.from_numpy(np.arange(24).reshape(2, 3, 4))
    fortran_order = torch.from_numpy(np.asfortranarray(c_order.numpy()))
    assert fortran_order.stride() != c_order.stride()
    assert all_agree(c_order, fortran_order)
    assert all_differ(c_order, torch.from_numpy(np.arange(24).reshape(2, 3, 4, order="F")))


def test_case_12_tensors_without_elements() -> None:
    assert all_differ(*[torch.empty(shape, dtype=torch.int64) for shape in [(0,), (2, 0), (0, 2), (1, 0, 1)]])
    assert all_differ(torch.tensor([]), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool), [])
    assert all_agree(
        torch.empty(2, 0, dtype=torch.int64),
        torch.empty(0, 2, dtype=torch.int64).T,
        torch.arange(6).reshape(2, 3)[:, 3:],
        torch.arange(6).as_strided((2, 0), (9, 4)),
    )


@pytest.mark.cuda
def test_case_12_no_launch_for_cuda_tensors_without_elements() -> None:
    empty = torch.empty(2, 0, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # any launch or wait would break the capture
        key = tensor_key(empty)
    assert (key.shape, key.nbytes) == ((2, 0), 0)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_case_13_unsigned_dtypes_are_keyed_by_their_bytes(dtype: torch.dtype) -> None:
    values = torch.arange(12).reshape(3, 4).to(dtype)
    signed = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    assert tensor_key(values.T).digest == tensor_key(signed.T).digest
    assert all_differ(values, values.T, signed, torch.zeros_like(values))
    assert all_agree(values[:, 1:], values[:, 1:].clone())


NO_NUMPY = {
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "complex conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative view": lambda: torch._neg_view(IDS),
    "sparse": lambda: IDS.to_sparse(),
    "meta": lambda: IDS.to("meta"),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", NO_NUMPY)
def test_case_14_where_numpy_raises_the_call_bypasses(name: str) -> None:
    tensor = NO_NUMPY[name]()
    with pytest.raises((RuntimeError, TypeError)):
        tensor.numpy()
    assert all_bypass(tensor, [IDS, tensor])


@pytest.mark.cuda
def test_case_14_a_cuda_tensor_is_keyed() -> None:
    tensor = IDS.cuda()
    with pytest.raises(TypeError):
        tensor.numpy()
    assert all_agree(tensor, tensor.clone())
    assert all_differ(tensor, IDS)


def test_case_15_fake_tensors_bypass() -> None:
    with FakeTensorMode() as mode:
        made = torch.zeros(3, dtype=torch.int64)
    converted = mode.from_tensor(IDS.clone())
    assert all_bypass(made, converted, [made])


def test_case_16_subclasses_bypass() -> None:
    class TokenIds(torch.Tensor):
        placement = 0

    class Frozen(torch.nn.Parameter):
        pass

    assert all_bypass(IDS.as_subclass(TokenIds), Frozen(IDS, requires_grad=False), [IDS, IDS.as_subclass(TokenIds)])
    assert all_agree(IDS, torch.nn.Parameter(IDS, requires_grad=False))


DTENSOR = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, init_device_mesh
from omni_tensor_key import explain
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(explain(DTensor.from_local(torch.arange(6), init_device_mesh("cpu", (1,)))))
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo to make a DTensor with")
def test_case_16_a_dtensor_bypasses(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = run_python(DTENSOR, GLOO_SOCKET_IFNAME="lo")
    assert "DTensor is a subclass of torch.Tensor" in result.stdout, result.stderr


def test_case_17_numpy_arrays_bypass_and_numpy_scalars_are_upstreams(active: Any) -> None:
    arrays = [np.arange(3), np.arange(3, dtype=">i8"), np.array([1, [2]], dtype=object), np.zeros((2, 2))]
    assert all_bypass(*arrays, *[[IDS, array] for array in arrays])
    assert active._hashable(np.int64(3)) == 3
    assert all_agree(3, np.int64(3), np.array(3, dtype=">i8"))
