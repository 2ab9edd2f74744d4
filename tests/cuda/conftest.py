"""The CUDA unit on machines without CUDA: its phases and its launcher, compiled for the host."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_tensor_key import _core

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
FAKE = HERE / "fake_runtime"
MAX_DIMS = 8
# How device code reads unaligned words. GCC cannot see that an aligned address is not rounded down out of its object.
WORD_READS = ["-DOTK_WORD_READS", "-Wno-array-bounds"]

OK, CAPTURING, UNAVAILABLE, FAILED = range(4)  # OtkCudaStatus
FORWARD, REVERSE, RANDOM = range(3)  # host_run.cpp's order of the threads


class CTensor(ctypes.Structure):
    """OtkCudaTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("nbytes", ctypes.c_uint64),
        ("item_size", ctypes.c_uint32),
        ("ndim", ctypes.c_uint32),
        ("shape", ctypes.c_int64 * MAX_DIMS),
        ("strides", ctypes.c_int64 * MAX_DIMS),
    ]


class CGroup(ctypes.Structure):
    """OtkCudaGroup."""

    _fields_ = [
        ("device", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("tensors", ctypes.POINTER(CTensor)),
        ("count", ctypes.c_size_t),
    ]


class CResult(ctypes.Structure):
    """OtkCudaResult."""

    _fields_ = [("content", ctypes.c_void_p), ("digest_low", ctypes.c_uint64), ("digest_high", ctypes.c_uint64)]


def describe(array: np.ndarray) -> CTensor:
    """The array as csrc/python describes a tensor: without dimensions of size 1, neighbours joined."""
    loops: list[list[int]] = []
    for size, stride in zip(array.shape, array.strides, strict=True):
        assert stride % array.itemsize == 0
        if size == 1:
            continue
        if loops and loops[-1][1] == size * stride // array.itemsize:
            loops[-1] = [loops[-1][0] * size, stride // array.itemsize]
        else:
            loops.append([size, stride // array.itemsize])
    assert len(loops) <= MAX_DIMS
    shape, strides = [loop[0] for loop in loops], [loop[1] for loop in loops]
    place = array.__array_interface__["data"][0]
    ints = ctypes.c_int64 * MAX_DIMS
    return CTensor(place, array.nbytes, array.itemsize, len(loops), ints(*shape), ints(*strides))


def hexdigest(low: int, high: int) -> str:
    return f"{high:016x}{low:016x}"


def build_native(output: Path, *args: str | Path) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    flags = ["-std=c++17", "-g", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{FAKE}"]
    command = [compiler, *flags, *map(str, args), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="session")
def compile_native() -> Callable[..., Path]:
    """Compiles C++ with the fake runtime's header in place of CUDA's: `compile_native(output, *arguments)`."""
    return build_native


@pytest.fixture
def run_cases(tmp_path: Path) -> Callable[..., None]:
    """Runs a file of tests in a process of its own."""

    def run(cases: Path, at_least: int, **variables: str) -> None:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(ROOT),
            str(cases),
        ]
        environment = os.environ | variables
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        print(done.stdout[-10_000:], done.stderr[-2000:])
        assert done.returncode == 0
        summary = re.search(r"(\d+) passed", done.stdout)
        assert summary
        assert int(summary[1]) >= at_least

    return run


@dataclass
class HostRun:
    """The kernel's phases, run thread by thread."""

    library: ctypes.CDLL

    def __call__(
        self, array: np.ndarray, threads: int = 512, order: int = FORWARD, seed: int = 0
    ) -> tuple[bytes, str] | None:
        """The content and the digest that the kernel would write, or None for a layout that it does not read."""
        size = (array.nbytes + 15) // 16 * 16
        # Aligned as staging memory is, with a guard behind.
        backing = np.full(size + 32, 0xA5, np.uint8)
        start = -backing.ctypes.data % 16
        digest = (ctypes.c_uint64 * 2)()
        read = self.library.otk_host_run(
            ctypes.byref(describe(array)),
            ctypes.c_uint32(threads),
            ctypes.c_int(order),
            ctypes.c_uint64(seed),
            ctypes.c_void_p(backing.ctypes.data + start),
            digest,
        )
        if not read:
            return None
        assert (backing[:start] == 0xA5).all()
        assert (backing[start + size :] == 0xA5).all()
        return backing[start : start + array.nbytes].tobytes(), hexdigest(*digest)

    def plan(self, array: np.ndarray) -> tuple[int, int]:
        """Bytes per load and dimensions."""
        unit, ndim = ctypes.c_uint32(), ctypes.c_uint32()
        self.library.otk_host_plan(ctypes.byref(describe(array)), ctypes.byref(unit), ctypes.byref(ndim))
        return unit.value, ndim.value


@pytest.fixture(scope="session", params=["byte reads", "word reads"])
def host_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostRun:
    """Both of xxh3.h's ways to read unaligned words: the host's and the GPU's."""
    output = tmp_path_factory.mktemp("host_run") / "host_run.so"
    words = WORD_READS if request.param == "word reads" else []
    build_native(output, "-O2", "-shared", *words, HERE / "host_run.cpp")
    return HostRun(ctypes.CDLL(str(output)))


class Unit:
    """The launcher on the fake runtime, with the state of a process that has just started."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = library = ctypes.CDLL(str(path))
        library.otk_cuda_result.restype = CResult
        library.otk_cuda_readable.restype = ctypes.c_bool
        self._text = ctypes.create_string_buffer(512)

    @property
    def text(self) -> str:
        return self._text.value.decode()

    def launch(self, *groups: tuple[int, int, Sequence[np.ndarray]]) -> tuple[int, ctypes.c_void_p]:
        """Launch groups of (device, stream, arrays); the status and the read."""
        described = (CGroup * len(groups))()
        for group, (device, stream, arrays) in zip(described, groups, strict=True):
            tensors = (CTensor * len(arrays))(*map(describe, arrays))
            group.device, group.stream, group.tensors, group.count = device, stream, tensors, len(arrays)
        read = ctypes.c_void_p()
        status = self.library.otk_cuda_launch(described, ctypes.c_size_t(len(groups)), ctypes.byref(read), self._text)
        return status, read

    def wait(self, read: ctypes.c_void_p) -> int:
        return int(self.library.otk_cuda_wait(read, self._text))

    def result(self, read: ctypes.c_void_p, index: int, nbytes: int) -> tuple[bytes, str]:
        result = self.library.otk_cuda_result(read, ctypes.c_size_t(index))
        return ctypes.string_at(result.content, nbytes), hexdigest(result.digest_low, result.digest_high)

    def release(self, read: ctypes.c_void_p) -> None:
        self.library.otk_cuda_release(read)

    def calls(self, name: str) -> int:
        return int(self.library.fake_calls(name.encode()))

    def fail(self, name: str, error: int, successes: int = 0) -> None:
        """Make calls of `name` return `error` after some that succeed."""
        self.library.fake_fail(name.encode(), successes, error)


@pytest.fixture(scope="session")
def unit_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("unit") / "unit.so"
    return build_native(
        output, "-O1", "-shared", *WORD_READS, *sorted((CSRC / "cuda").glob("*.cpp")), FAKE / "runtime.cpp"
    )


@pytest.fixture
def unit(unit_library: Path, tmp_path: Path) -> Unit:
    return Unit(Path(shutil.copy(unit_library, tmp_path / "unit.so")))  # another file, so other globals


@pytest.fixture(scope="session")
def unit_class() -> type[Unit]:
    return Unit


@pytest.fixture(scope="session")
def race_check(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles race_check.cpp with the given flags."""

    def build(*flags: str) -> Path:
        output = tmp_path_factory.mktemp("race_check") / "race_check"
        dispatch = sorted(CSRC.glob("xxh3_*.cpp"))
        return build_native(output, "-O1", *WORD_READS, *flags, HERE / "race_check.cpp", *dispatch)

    return build


@pytest.fixture
def gpu() -> Iterator[None]:
    """Skips where there is no GPU, and waits for it in the end."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA GPU")
    if _core.CUDA_BUILD is None:
        pytest.skip("the extension was built without its CUDA unit")
    yield
    torch.cuda.synchronize()
    assert torch.cuda.current_device() == 0


@pytest.fixture
def two_gpus(gpu: None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
