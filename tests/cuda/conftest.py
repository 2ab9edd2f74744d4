"""The CUDA unit on machines without CUDA: its launcher on a stand-in for CUDA's runtime."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from omni_tensor_key import _core

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
FAKE = HERE / "fake_runtime"
HASH = CSRC / "hash"
MAX_DIMS = 8
OK, UNPREPARED, CAPTURING, UNAVAILABLE, FAILED = range(5)  # OtkCudaStatus


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


class Unit:
    """The launcher on a stand-in runtime, with the state of a process that has just started."""

    describe = staticmethod(describe)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = library = ctypes.CDLL(str(path))
        library.otk_cuda_result.restype = CResult
        self._text = ctypes.create_string_buffer(512)

    @property
    def text(self) -> str:
        return self._text.value.decode()

    def prepare(self, device: int, count: int, nbytes: int) -> int:
        return int(self.library.otk_cuda_prepare(device, ctypes.c_size_t(count), ctypes.c_uint64(nbytes), self._text))

    def launch_prepared(self, device: int, stream: int, tensors: Sequence[CTensor]) -> tuple[int, ctypes.c_void_p]:
        """The status and the read."""
        read = ctypes.c_void_p()
        status = self.library.otk_cuda_launch(
            device, ctypes.c_void_p(stream), (CTensor * len(tensors))(*tensors), ctypes.c_size_t(len(tensors)),
            ctypes.byref(read), self._text,
        )  # fmt: skip
        return status, read

    def launch(self, device: int, stream: int, arrays: Sequence[np.ndarray | CTensor]) -> tuple[int, ctypes.c_void_p]:
        """The same, prepared where it must be."""
        tensors = [array if isinstance(array, CTensor) else describe(array) for array in arrays]
        status, read = self.launch_prepared(device, stream, tensors)
        if status == UNPREPARED:
            status = self.prepare(device, len(tensors), sum(tensor.nbytes for tensor in tensors))
            if status == OK:
                status, read = self.launch_prepared(device, stream, tensors)
        return status, read

    def wait(self, read: ctypes.c_void_p) -> int:
        return int(self.library.otk_cuda_wait(read, self._text))

    def result(self, read: ctypes.c_void_p, index: int) -> CResult:
        return self.library.otk_cuda_result(read, ctypes.c_size_t(index))

    def check(self, read: ctypes.c_void_p, arrays: Sequence[np.ndarray]) -> None:
        """The bytes are numpy's, and the digests those of the xxhash package."""
        for i, array in enumerate(arrays):
            content = np.ascontiguousarray(array).tobytes()
            result = self.result(read, i)
            about = f"{array.dtype} {array.shape} {array.strides}"
            assert ctypes.string_at(result.content, array.nbytes) == content, about
            digest = f"{result.digest_high:016x}{result.digest_low:016x}"
            assert digest == xxhash.xxh3_128_hexdigest(content), about

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
    sources = [*sorted((CSRC / "cuda").glob("*.cpp")), *sorted(HASH.glob("xxh3_*.cpp")), *sorted(FAKE.glob("*.cpp"))]
    return build_native(output, "-O1", "-shared", *sources)


@pytest.fixture
def unit(unit_library: Path, tmp_path: Path) -> Unit:
    return Unit(Path(shutil.copy(unit_library, tmp_path / "unit.so")))  # another file, so other globals


@pytest.fixture(scope="session")
def unit_class() -> type[Unit]:
    return Unit


@pytest.fixture
def gpu() -> Iterator[None]:
    """Skips where there is no GPU, unless OMNI_TENSOR_KEY_GPU=1 says that there must be one."""
    missing = None
    if not torch.cuda.is_available():
        missing = f"torch {torch.__version__} sees no CUDA GPU"
    elif _core.CUDA_BUILD is None:
        missing = "the extension was built without its CUDA unit"
    if missing:
        (pytest.fail if os.environ.get("OMNI_TENSOR_KEY_GPU") == "1" else pytest.skip)(missing)
    yield
    torch.cuda.synchronize()
    assert torch.cuda.current_device() == 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped_all(terminalreporter):
        terminalreporter.write_line("ERROR: no test ran on a GPU, so `pytest -m cuda` does not pass.", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """`-m cuda` with everything skipped is no run on a GPU."""
    if _skipped_all(session.config.pluginmanager.get_plugin("terminalreporter")) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skipped_all(reporter: Any) -> bool:
    asked = (
        reporter is not None and reporter.config.option.markexpr == "cuda" and not reporter.config.option.collectonly
    )
    return asked and "passed" not in reporter.stats


@pytest.fixture
def two_gpus(gpu: None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
