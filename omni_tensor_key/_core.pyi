import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch

_ToHost = Callable[[list[torch.Tensor]], list[torch.Tensor] | None]

SIMD_PATHS: tuple[str, ...]
CUDA_BUILD: str | None  # what the CUDA unit was compiled with and for; None in a build without it

@final
class TensorKey:
    @property
    def digest(self) -> bytes: ...
    @property
    def hexdigest(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Callable[..., TensorKey], tuple[Any, ...]]: ...

class KeyBuilder:
    def __new__(
        cls,
        hashable: Callable[[Any], Any],
        build_key: Callable[..., Any],
        not_hashable: object,
        precomputed: tuple[str, ...],
        plan: Callable[..., tuple[int, int, int, tuple[tuple[Any, ...], ...]] | None],
        call_state: Callable[[], Any],
        on_bypass: Callable[[str, str, str], object],
        to_host: _ToHost,
        max_bytes: int,
        tensors_only: bool,
    ) -> KeyBuilder: ...
    def hashable(self, obj: Any, /) -> Any: ...
    def build_key(
        self, signature: inspect.Signature, model_tag: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], /
    ) -> Any: ...

def tensor_keys(
    tensors: Iterable[torch.Tensor], to_host: _ToHost, max_bytes: int, cuda_unit: bool | None = None, /
) -> list[TensorKey] | tuple[int, str]: ...
def restore_key(
    dtype_code: int, dtype_bits: int, device_type: int, device_index: int, shape: tuple[int, ...], content: bytes, /
) -> TensorKey: ...
def set_cuda_functions(
    check_cuda_unit: Callable[[torch.Tensor], bool | None], note_host_copy: Callable[[str], object], /
) -> None: ...
def cuda_stream(index: int, /) -> int: ...
def xxh3_128(data: bytes, simd_path: str, /) -> bytes: ...
