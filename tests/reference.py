"""What the native core does, stated in plain Python: the oracle of the tests, and a backend for debugging."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from .errors import UncacheableTensorError, uncacheable

ToHost = Callable[[list[torch.Tensor]], "list[torch.Tensor] | None"]

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

    __slots__ = ("_device_code", "builder", "content", "device", "digest", "dtype", "shape", "source")

    def __init__(self, tensor: torch.Tensor, content: bytes) -> None:
        device = tensor.device
        on_cpu = device.type == "cpu"
        code = _DEVICE_CODES.get(device.type, _OTHER_DEVICE)
        self._device_code = (code, 0 if on_cpu else device.index)
        self.device = "cpu" if on_cpu else f"{device.type if code != _OTHER_DEVICE else 'privateuseone'}:{device.index}"
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)
        self.content = content
        self.digest: bytes = xxhash.xxh3_128_digest(content)
        self.source = tensor.data_ptr() if content else 0
        self.builder: KeyBuilder | None = None

    @property
    def hexdigest(self) -> str:
        return self.digest.hex()

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def _identity(self) -> tuple[object, ...]:
        return (self.dtype, self.shape, self._device_code, self.content)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorKey):
            return NotImplemented
        is_over = any(key.builder is not None and key.builder.closed for key in (self, other))
        return self is other or (not is_over and self._identity() == other._identity())

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
    if obj.dtype not in _DTYPE_CODES or (torch._C._functorch.is_functorch_wrapped_tensor(obj) and not functional):
        return "unexportable"
    if obj.dim() > _MAX_DIMS:
        return "malformed"
    if obj.numel() == 0:
        return None
    if _DTYPE_CODES[obj.dtype][0] not in _KEYED_CODES:
        return "dtype"
    if obj.numel() * obj.element_size() > max_bytes:
        return "size"
    if functional or obj.data_ptr() == 0:
        return "storage"
    return "negated" if obj.is_neg() else None


def tensor_keys(tensors: Iterable[torch.Tensor], to_host: ToHost, max_bytes: int) -> list[TensorKey]:
    """See `omni_tensor_key.tensor_keys`."""
    listed = tuple(tensors)
    for tensor in listed:
        if reason := reason_against(tensor, max_bytes):
            raise uncacheable(tensor, reason, max_bytes)
    on_device = [t for t in listed if t.device.type != "cpu" and t.numel() > 0]
    copies = to_host(on_device) if on_device else []
    if copies is None:
        raise uncacheable(listed, "graph_capture", max_bytes)
    copy_of = dict(zip(map(id, on_device), copies, strict=True))
    return [TensorKey(t, _content(copy_of.get(id(t), t))) for t in listed]


def _content(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def sources(key: Any) -> list[int] | None:
    """The addresses from which the TensorKeys in a key were read, or None for a key without one."""
    if isinstance(key, TensorKey):
        return [key.source] if key.source else []
    found = [inner for inner in map(sources, key) if inner is not None] if type(key) is tuple else []
    return [source for inner in found for source in inner] if found else None


class KeyBuilder:
    """See `_core.KeyBuilder`."""

    def __init__(
        self,
        hashable: Callable[[Any], Any],
        build_key: Callable[..., Any],
        not_hashable: object,
        precomputed: tuple[str, ...],
        to_host: ToHost,
        max_bytes: int,
        on_bypass: Callable[[str, str, str, int], object] | None = None,
        tensors_only: bool = False,
    ) -> None:
        self._hashable = hashable
        self._build_key = build_key
        self._not_hashable = not_hashable
        self._to_host = to_host
        self._max_bytes = max_bytes
        self.closed = False

    def close(self) -> None:
        """From here on, answer as upstream does, and let the keys made so far equal nothing but themselves."""
        self.closed = True

    def hashable(self, obj: Any) -> Any:
        """Upstream's _hashable(obj), with a TensorKey for each tensor that has one."""
        if self.closed:
            return self._hashable(obj)
        if not isinstance(obj, torch.Tensor):
            value = self._hashable(obj)  # comes back here for the items of containers
            # Upstream unpacks a numpy array of one object: a tensor in there is as little a key as the array is.
            hides_tensor = sources(value) is not None and not isinstance(obj, list | tuple | dict)
            return self._not_hashable if hides_tensor else value
        try:
            key = tensor_keys([obj], self._to_host, self._max_bytes)[0]
        except UncacheableTensorError:
            return self._not_hashable
        key.builder = self
        return key

    def build_key(
        self, signature: inspect.Signature, model_tag: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Upstream's _build_key: a key, or None to bypass the cache."""
        return self._build_key(signature, model_tag, args, kwargs)

    def bypassed(self) -> dict[tuple[str, str, str], int]:
        """Nothing: this backend does not count."""
        return {}
