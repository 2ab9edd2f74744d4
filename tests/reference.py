"""What the native core does, stated in plain Python: the oracle of the tests."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

# DLPack's codes, with which dtype and device enter hash().
_DTYPE_CODES = {
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
    torch.uint8: (1, 8), torch.uint16: (1, 16), torch.uint32: (1, 32), torch.uint64: (1, 64),
    torch.bool: (6, 8),
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16),
    torch.complex32: (5, 32), torch.complex64: (5, 64), torch.complex128: (5, 128),
    torch.float8_e4m3fn: (10, 8), torch.float8_e4m3fnuz: (11, 8),
    torch.float8_e5m2: (12, 8), torch.float8_e5m2fnuz: (13, 8), torch.float8_e8m0fnu: (14, 8),
}  # fmt: skip
_KEYED_CODES = (0, 1, 6)  # signed, unsigned, bool
_DEVICE_CODES = {"cpu": 1, "cuda": 2, "mps": 8, "xpu": 14, "maia": 17}
_OTHER_DEVICE = 12  # PrivateUse1
_MAX_DIMS = 64  # numpy's limit too


class TensorKey:
    """A tensor's content, dtype, shape and device as a dictionary key."""

    def __init__(self, tensor: torch.Tensor) -> None:
        device = tensor.device
        on_cpu = device.type == "cpu"
        code = _DEVICE_CODES.get(device.type, _OTHER_DEVICE)
        self._device_code = (code, 0 if on_cpu else device.index)
        self.device = "cpu" if on_cpu else f"{device.type if code != _OTHER_DEVICE else 'privateuseone'}:{device.index}"
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        self.content = np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes() if tensor.numel() else b""
        self.digest: bytes = xxhash.xxh3_128_digest(self.content)
        self.hexdigest = self.digest.hex()
        self.nbytes = len(self.content)

    def _identity(self) -> tuple[object, ...]:
        return (self.dtype, self.shape, self._device_code, self.content)

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, TensorKey) else NotImplemented

    def __hash__(self) -> int:
        high, low = struct.unpack(">QQ", self.digest)
        code, bits = _DTYPE_CODES[getattr(torch, self.dtype)]
        words = struct.pack(
            f"<QQ{5 + len(self.shape)}q", low, high, code, bits, *self._device_code, len(self.shape), *self.shape
        )
        return int.from_bytes(xxhash.xxh3_128_digest(words)[8:], "big", signed=True)

    def __repr__(self) -> str:
        return f"TensorKey({self.hexdigest}, {self.dtype}, {self.shape}, {self.device})"


def reason_against(obj: Any, max_bytes: int) -> str | None:
    """The one reason why `obj` has no key, or None."""
    if type(obj) not in (torch.Tensor, torch.nn.Parameter):
        return "subclass" if isinstance(obj, torch.Tensor) else "type"
    if obj.layout != torch.strided or obj.is_quantized or obj.is_nested or obj.device.type == "meta":
        return "unexportable"
    functional = torch._is_functional_tensor(obj)  # wrapped too, but described: as a tensor without storage
    if torch._C._functorch.is_functorch_wrapped_tensor(obj) and not functional:
        return "unexportable"
    if obj.dtype not in _DTYPE_CODES:
        return "dtype" if "int" in str(obj.dtype) else "unexportable"
    if obj.dim() > _MAX_DIMS:
        return "malformed"
    if obj.numel() == 0:
        return None
    if _DTYPE_CODES[obj.dtype][0] not in _KEYED_CODES:
        return "dtype"
    if obj.numel() * obj.element_size() > max_bytes:
        return "size"
    return "storage" if functional or obj.data_ptr() == 0 else None


def tensor_keys(tensors: Iterable[torch.Tensor]) -> list[TensorKey]:
    return [TensorKey(tensor) for tensor in tensors]


class Reference:
    """What a KeyBuilder must answer, by upstream's own functions in a module of their own."""

    def __init__(self, module: Any, max_bytes: int = 1 << 20) -> None:
        self._module = module
        self._upstream_hashable = module._hashable
        self._max_bytes = max_bytes
        self._tensors = 0
        module._hashable = self.hashable

    def hashable(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self._tensors += 1
            return self._module._NOT_HASHABLE if reason_against(obj, self._max_bytes) else TensorKey(obj)
        before = self._tensors
        value = self._upstream_hashable(obj)
        # Upstream unpacks a numpy array of one object: a tensor in there is as little a key as the array is.
        hides_tensor = self._tensors > before and not isinstance(obj, list | tuple | dict)
        return self._module._NOT_HASHABLE if hides_tensor else value

    def build_key(
        self, signature: inspect.Signature, model_tag: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: Any
    ) -> Any:
        self._tensors = 0
        key = self._module._build_key(signature, model_tag, args, kwargs)
        return key if key is None or not self._tensors else (*key, state)
