"""A second torch device for tests on machines that have no accelerator.

``load()`` compiles ``backend.cpp`` against the installed torch on its first
use, registers the devices ``otkdev:0`` and ``otkdev:1`` and returns the module
``torch.otkdev``::

    from tests import device_backend

    otkdev = device_backend.load()
    ids = torch.tensor([[1, 2, 3]], device="otkdev:0")
    otkdev.reset_counters()
    ids.cpu()
    assert (otkdev.copies_to_host(), otkdev.bytes_to_host()) == (1, 24)

The memory behind such a tensor holds its bytes XOR-ed with 0xA5: code that
reads the data pointer as if it were host memory gets wrong bytes.

A registration lasts for the life of the process, and torch has room for one
such device. A test that must not see it belongs in a process of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import sys
import sysconfig
import types
from pathlib import Path

import torch

NAME = "otkdev"
DEVICES = 2  # as in backend.cpp
POISON = 0xA5  # as in backend.cpp

_HERE = Path(__file__).resolve().parent
_EXTENSION = "otk_device_backend"


def load() -> types.ModuleType:
    """Build the device if needed, register it, and return ``torch.otkdev``."""
    # The registration lives in torch, so that is where to look for it: this
    # module may have been imported under a second name.
    registered = getattr(torch, NAME, None)
    if registered is not None:
        return registered
    library = ctypes.CDLL(str(_build()))
    library.otkdev_host_copies.restype = ctypes.c_uint64
    library.otkdev_host_bytes.restype = ctypes.c_uint64
    library.otkdev_reset_counters.restype = None
    library.otkdev_exchange_stream.restype = ctypes.c_int64
    torch.utils.rename_privateuse1_backend(NAME)
    module = _device_module(library)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    return module


def _build() -> Path:
    """Compile the library, or find it in the build cache, and load it into torch."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR") or _HERE.parents[1] / "build" / "torch_extensions"
    # One folder per torch and Python, so that environments can share a checkout.
    folder = Path(root) / _EXTENSION / f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    folder.mkdir(parents=True, exist_ok=True)

    path = os.environ.get("PATH", os.defpath)
    with open(folder / "guard", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        # torch marks a running build with a file and waits for as long as it is
        # there. Whoever holds the guard knows that one found here was left by
        # a process that was killed.
        (folder / "lock").unlink(missing_ok=True)
        # ninja may be installed beside an interpreter that is not on PATH.
        os.environ["PATH"] = os.pathsep.join((path, sysconfig.get_path("scripts")))
        try:
            cpp_extension.load(
                _EXTENSION,
                [str(_HERE / "backend.cpp")],
                # Optimisation would only lengthen the build.
                extra_cflags=["-O0", "-Wall", "-Wextra"],
                build_directory=str(folder),
                is_python_module=False,
            )
        finally:
            os.environ["PATH"] = path
    return folder / f"{_EXTENSION}.so"


def _device_module(library: ctypes.CDLL) -> types.ModuleType:
    """Make the module that torch exposes as ``torch.otkdev``."""
    module = types.ModuleType(f"torch.{NAME}", "Test-only device backed by host memory.")

    def set_device(device: int | str | torch.device) -> None:
        torch.accelerator.set_device_index(device)

    class device:
        """Context manager that changes the current device."""

        def __init__(self, device: int | str | torch.device) -> None:
            self._device = device

        def __enter__(self) -> None:
            self._before = module.current_device()
            set_device(self._device)

        def __exit__(self, *_: object) -> None:
            set_device(self._before)

    class Stream:
        """A stream that has a number, and on which nothing waits."""

        _numbers = itertools.count(1)

        def __init__(self, device: int | str | torch.device = 0) -> None:
            self._index = torch.device(device).index or 0
            self.cuda_stream = next(self._numbers)  # torch.cuda's name for the address

    class stream:
        """Context manager that makes a stream current on its device."""

        def __init__(self, stream: Stream) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            self._before = library.otkdev_exchange_stream(self._stream._index, ctypes.c_int64(self._stream.cuda_stream))

        def __exit__(self, *_: object) -> None:
            library.otkdev_exchange_stream(self._stream._index, ctypes.c_int64(self._before))

    def copies_to_host() -> int:
        """Return how often a device tensor was copied to the host."""
        return library.otkdev_host_copies()

    def bytes_to_host() -> int:
        """Return how many bytes these copies carried."""
        return library.otkdev_host_bytes()

    def reset_counters() -> None:
        library.otkdev_reset_counters()

    module.hide_streams = lambda hide: library.otkdev_hide_streams(hide)
    for member in (set_device, device, Stream, stream, copies_to_host, bytes_to_host, reset_counters):
        setattr(module, member.__name__, member)
    module.device_count = lambda: DEVICES
    # torch.accelerator is this device once its hooks are registered.
    module.current_device = torch.accelerator.current_device_index
    # The rest is what torch itself asks of a device module; here there is
    # nothing to wait for, to initialise or to seed.
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.synchronize = lambda device=None: None
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    return module
