"""What has no key, the reason, and a text that says what was got."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch._subclasses import FakeTensorMode

from omni_tensor_key import TensorKey, UncacheableTensorError, _core, explain, tensor_key
from omni_tensor_key.errors import uncacheable
from omni_tensor_key.keys.host_copy import to_host

LIMIT = 64  # bytes
IDS = torch.arange(6).reshape(2, 3)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(nested tensors is in prototype|Sparse CSR|quantized tensor creation)"
)


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


def refusal(value: Any, limit: int = LIMIT) -> UncacheableTensorError:
    with pytest.raises(UncacheableTensorError) as caught:
        limited_keys([IDS, value], limit)
    return caught.value


def limited_keys(tensors: list[Any], limit: int) -> list[TensorKey]:
    """tensor_keys() with another limit than that of this process."""
    keys = _core.tensor_keys(tensors, to_host, limit)
    if isinstance(keys, list):
        return keys
    raise uncacheable(tensors[keys[0]], keys[1], limit)


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    make, reason, parts = CASES[name]
    error = refusal(make())
    assert error.reason == reason
    assert str(error).startswith("cannot key this value: ")
    assert [part for part in parts if part not in str(error)] == []


def test_nested_with_strided_layout() -> None:
    nested = torch.nested.nested_tensor([IDS[0], IDS[1, :2]], dtype=torch.int64, layout=torch.strided)
    assert type(nested) is torch.Tensor
    assert refusal(nested).reason == "unexportable"


@pytest.mark.parametrize("bits", range(1, 8))
def test_sub_byte_integers(bits: int) -> None:
    for dtype in (getattr(torch, f"int{bits}"), getattr(torch, f"uint{bits}")):
        for size in (0, 2):  # DLPack's table describes them as if they had eight bits
            assert refusal(torch.empty(size, dtype=dtype)).reason == "dtype"


def test_more_dimensions_than_numpy_has() -> None:
    assert refusal(torch.zeros((1,) * 65, dtype=torch.int64)).reason == "malformed"


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_the_limit_is_exact(dtype: torch.dtype) -> None:
    tensor = torch.zeros(1, 24, dtype=dtype)[:, ::2]
    assert limited_keys([tensor], tensor.nbytes)[0].nbytes == tensor.nbytes
    with pytest.raises(UncacheableTensorError) as caught:
        limited_keys([tensor], tensor.nbytes - 1)
    assert caught.value.reason == "size"
    assert f"{tensor.nbytes - 1} bytes" in str(caught.value)


def test_a_limit_of_zero_leaves_tensors_without_elements() -> None:
    assert len(limited_keys([torch.empty(0), torch.empty(2, 0)], 0)) == 2
    with pytest.raises(UncacheableTensorError):
        limited_keys([torch.tensor(True)], 0)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_the_error_survives_a_copy(duplicate: Callable[[Any], Any]) -> None:
    error = refusal(torch.zeros(3))
    twin = duplicate(error)
    assert type(twin) is UncacheableTensorError
    assert (twin.reason, str(twin), twin.args) == (error.reason, str(error), error.args)


def test_the_error_is_a_type_error() -> None:
    assert isinstance(refusal("text"), TypeError)
    with pytest.raises(UncacheableTensorError, match=r"float32 tensor of shape \(3,\) on cpu"):
        tensor_key(torch.zeros(3))


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_has_the_same_reason(name: str) -> None:
    make, reason, _ = CASES[name]
    assert reference.reason_against(make(), LIMIT) == reason


KEYED = [None, 1, True, 2.5, "text", b"raw", torch.float32, torch.device("cuda"), np.int64(3), np.float32(1), IDS]


def test_explain_has_nothing_to_say_of_what_is_keyed() -> None:
    for value in KEYED:
        assert explain(value) is None
    assert explain(KEYED) is explain({"a": [KEYED, (IDS,)], 2: {}}) is None


@pytest.mark.parametrize(
    ("value", "start"),
    [
        (torch.zeros(2), "cannot key this value: a float32 tensor of shape (2,) on cpu"),
        ([1, torch.zeros(2), object()], "[1]: cannot key this value: a float32 tensor"),
        ({"ids": (IDS, [torch.zeros(2)])}, "['ids'][1][0]: cannot key this value: a float32 tensor"),
        ({"b": object(), "a": {1: torch.zeros(2)}}, "['a'][1]: cannot key this value: a float32 tensor"),
        ([IDS.as_subclass(TokenTensor)], "[0]: cannot key this value: a "),
        (object(), "cannot key this value: a builtins.object is not a torch.Tensor"),
        ([np.arange(2)], "[0]: cannot key this value: a numpy.ndarray is not a torch.Tensor"),
    ],
)
def test_explain_names_the_first_element_without_a_key(value: Any, start: str) -> None:
    assert (explain(value) or "").startswith(start)
