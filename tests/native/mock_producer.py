"""Puts a DLPack producer of our own in the place of torch's, in a process that is only for this."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

NAME = b"dlpack_exchange_api"


class Description(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Producer:
    """The compiled mock_producer.cpp, and torch's own table as it was."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.mock_chain.restype = ctypes.c_void_p
        self.torch: Any = torch.Tensor.__dlpack_c_exchange_api__
        self._alive: list[Any] = []

    def _torch_header(self) -> ctypes.c_void_p:
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        return ctypes.c_void_p(get(self.torch, NAME))

    def table(self, *tables: tuple[int, bool], name: bytes = NAME, then_torch: bool = False, loop: bool = False) -> Any:
        """A capsule with a chain of tables: for each its major version and whether it has the function."""
        majors = (ctypes.c_uint32 * len(tables))(*(major for major, _ in tables))
        functions = (ctypes.c_bool * len(tables))(*(function for _, function in tables))
        last = self._torch_header() if then_torch else None
        first = ctypes.c_void_p(self._library.mock_chain(majors, functions, len(tables), last))
        if loop:
            self._library.mock_close_loop(first)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self._alive.append(name)  # a capsule borrows its name
        return new(first, name, None)

    def offer(self, table: Any) -> None:
        """Make `table` what torch.Tensor has."""
        torch.Tensor.__dlpack_c_exchange_api__ = table

    def describe(
        self,
        shape: list[int] | None = None,
        strides: list[int] | None = None,
        *,
        data: int | None = None,
        ndim: int | None = None,
        dtype: tuple[int, int, int] = (0, 64, 1),
        device: tuple[int, int] = (1, 0),
        byte_offset: int = 0,
        status: int = 0,
        error: type[Exception] | None = None,
    ) -> None:
        """What the producer says of every tensor from here on; by default one int64 of value 7."""

        def array(values: list[int] | None) -> Any:
            if values is None:
                return None
            self._alive.append((ctypes.c_int64 * len(values))(*values))
            return ctypes.cast(self._alive[-1], ctypes.POINTER(ctypes.c_int64))

        if data is None:
            self._alive.append(ctypes.c_int64(7))
            data = ctypes.addressof(self._alive[-1])
        ndim = len(shape or ()) if ndim is None else ndim
        Description.in_dll(self._library, "mock_tensor").__init__(  # type: ignore[misc]
            data, *device, ndim, *dtype, array(shape), array(strides), byte_offset
        )
        ctypes.c_void_p.in_dll(self._library, "mock_error").value = None if error is None else id(error)
        ctypes.c_int.in_dll(self._library, "mock_status").value = status
