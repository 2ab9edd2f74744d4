"""What has no key, the reason, and a text that says what was got. Both backends say the same."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from omni_tensor_key import UncacheableTensorError, _core, reference, tensor_key
from omni_tensor_key.host_copy import to_host

LIMIT = 64  # bytes
IDS = torch.arange(6).reshape(2, 3)
BACKENDS = [_core, reference]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(nested tensors is in prototype|Sparse CSR|quantized tensor creation)"),
    pytest.mark.parametrize("backend", BACKENDS, ids=["native", "reference"]),
]


class TokenTensor(torch.Tensor):
    pass


class TokenParameter(torch.nn.Parameter):
    pass


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.arange(6)


def quantized(count: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(count), 0.1, 0, torch.quint8)


def freed() -> torch.Tensor:
    ids = torch.arange(6)
    ids.untyped_storage().resize_(0)
    return ids


INT64 = "int64 tensor of shape (2, 3) on cpu"
CASES: dict[str, tuple[Callable[[], Any], str, list[str]]] = {
    # name: (the value, the reason, what the text must name)
    "float32": (lambda: torch.zeros(2, 3), "dtype", ["float32 tensor of shape (2, 3) on cpu"]),
    "float16": (lambda: torch.zeros(1, dtype=torch.float16), "dtype", ["float16", "(1,)"]),
    "bfloat16": (lambda: torch.zeros(1, dtype=torch.bfloat16), "dtype", ["bfloat16"]),
    "float64 parameter": (lambda: torch.nn.Parameter(torch.zeros(3).double()), "dtype", ["float64"]),
    "float8": (lambda: torch.zeros(1, dtype=torch.float8_e5m2), "dtype", ["float8_e5m2"]),
    "complex64": (lambda: torch.zeros(2, dtype=torch.complex64), "dtype", ["complex64"]),
    "conjugated": (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "dtype", ["complex64"]),
    "float over the limit": (lambda: torch.zeros(1000), "dtype", ["float32"]),
    "bits8": (lambda: torch.empty(2, dtype=torch.bits8), "unexportable", ["bits8"]),
    "meta": (lambda: IDS.to("meta"), "unexportable", ["int64", "(2, 3)", "meta"]),
    "meta without elements": (lambda: torch.empty(0, device="meta"), "unexportable", ["meta"]),
    "sparse COO": (lambda: IDS.to_sparse(), "unexportable", [INT64, "layout sparse_coo"]),
    "sparse CSR": (lambda: IDS.to_sparse_csr(), "unexportable", [INT64, "layout sparse_csr"]),
    "MKL-DNN": (lambda: torch.ones(2, 2).to_mkldnn(), "unexportable", ["float32", "layout _mkldnn"]),
    "quantized": (lambda: quantized(3), "unexportable", ["quint8", "(3,)"]),
    "quantized without elements": (lambda: quantized(0), "unexportable", ["quint8"]),
    "jagged": (
        lambda: torch.nested.nested_tensor([IDS[0], IDS[1, :2]], layout=torch.jagged),
        "subclass",
        ["NestedTensor"],
    ),
    "fake": (fake, "subclass", ["FakeTensor", "subclass of torch.Tensor"]),
    "subclass of Tensor": (lambda: IDS.as_subclass(TokenTensor), "subclass", ["TokenTensor"]),
    "subclass of Parameter": (lambda: TokenParameter(IDS, requires_grad=False), "subclass", ["TokenParameter"]),
    "uninitialized parameter": (lambda: torch.nn.UninitializedParameter(), "subclass", ["UninitializedParameter"]),
    "functional": (lambda: torch._to_functional_tensor(IDS), "storage", [INT64]),
    "zero tensor": (lambda: torch._efficientzerotensor((2, 3), dtype=torch.int64), "storage", [INT64]),
    "freed storage": (freed, "storage", ["int64 tensor of shape (6,) on cpu"]),
    "negative view": (lambda: torch._neg_view(IDS), "negated", [INT64, "resolve_neg()"]),
    "too large": (lambda: torch.zeros(9, dtype=torch.int64), "size", ["(9,)", "64 bytes", "OMNI_TENSOR_KEY_MAX_BYTES"]),
    "huge": (lambda: torch.zeros(1, dtype=torch.uint8).expand(1 << 62), "size", [f"({1 << 62},)"]),
    "numpy array": (lambda: np.arange(3), "type", ["numpy.ndarray"]),
    "list": (lambda: [1, 2], "type", ["builtins.list"]),
    "list of tensors": (lambda: [IDS], "type", ["builtins.list"]),
    "None": (lambda: None, "type", ["NoneType"]),
    "int": (lambda: 3, "type", ["builtins.int"]),
    "dtype": (lambda: torch.int64, "type", ["torch.dtype"]),
    "storage": (lambda: IDS.untyped_storage(), "type", ["UntypedStorage"]),
    "tensor class": (lambda: torch.Tensor, "type", ["not a torch.Tensor"]),
}


def refusal(backend: types.ModuleType, value: Any, limit: int = LIMIT) -> UncacheableTensorError:
    with pytest.raises(UncacheableTensorError) as caught:
        backend.tensor_keys([IDS, value], to_host, limit)
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_refused(backend: types.ModuleType, name: str) -> None:
    make, reason, parts = CASES[name]
    error = refusal(backend, make())
    assert error.reason == reason
    assert str(error).startswith("cannot key this value: ")
    assert [part for part in parts if part not in str(error)] == []


def test_nested_with_strided_layout(backend: types.ModuleType) -> None:
    nested = torch.nested.nested_tensor([IDS[0], IDS[1, :2]], dtype=torch.int64, layout=torch.strided)
    assert type(nested) is torch.Tensor
    assert refusal(backend, nested).reason == "unexportable"


@pytest.mark.parametrize("bits", range(1, 8))
def test_sub_byte_integers(backend: types.ModuleType, bits: int) -> None:
    for dtype in (getattr(torch, f"int{bits}"), getattr(torch, f"uint{bits}")):
        assert refusal(backend, torch.empty(2, dtype=dtype)).reason in ("dtype", "unexportable")


def test_more_dimensions_than_numpy_has(backend: types.ModuleType) -> None:
    assert refusal(backend, torch.zeros((1,) * 65, dtype=torch.int64)).reason == "malformed"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_the_limit_is_exact(backend: types.ModuleType, dtype: torch.dtype) -> None:
    tensor = torch.zeros(1, 24, dtype=dtype)[:, ::2]
    assert backend.tensor_keys([tensor], to_host, tensor.nbytes)[0].nbytes == tensor.nbytes
    with pytest.raises(UncacheableTensorError) as caught:
        backend.tensor_keys((tensor,), to_host, tensor.nbytes - 1)
    assert caught.value.reason == "size"
    assert f"{tensor.nbytes - 1} bytes" in str(caught.value)


def test_a_limit_of_zero_leaves_tensors_without_elements(backend: types.ModuleType) -> None:
    assert len(backend.tensor_keys([torch.empty(0), torch.empty(2, 0)], to_host, 0)) == 2
    with pytest.raises(UncacheableTensorError):
        backend.tensor_keys([torch.tensor(True)], to_host, 0)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_the_error_survives_a_copy(backend: types.ModuleType, duplicate: Callable[[Any], Any]) -> None:
    error = refusal(backend, torch.zeros(3))
    twin = duplicate(error)
    assert type(twin) is UncacheableTensorError
    assert (twin.reason, str(twin), twin.args) == (error.reason, str(error), error.args)


def test_the_error_is_a_type_error(backend: types.ModuleType) -> None:
    assert isinstance(refusal(backend, "text"), TypeError)
    with pytest.raises(UncacheableTensorError, match=r"float32 tensor of shape \(3,\) on cpu"):
        tensor_key(torch.zeros(3))


@pytest.mark.parametrize("name", ["uint1", "uint3", "uint7", "int1", "int4"])
@pytest.mark.parametrize("size", [0, 2])
def test_integers_of_less_than_a_byte(backend: Any, name: str, size: int) -> None:
    """DLPack's table describes them as if they had eight bits."""
    with pytest.raises(UncacheableTensorError):
        backend.tensor_keys([torch.empty(size, dtype=getattr(torch, name))], to_host, LIMIT)
