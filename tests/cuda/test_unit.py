"""The launcher keeps the rules of the road: tested on a fake CUDA runtime whose work is done when it is waited for."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

OK, UNPREPARED, CAPTURING, UNAVAILABLE, FAILED = range(5)
OUT_OF_MEMORY, NOT_INITIALIZED, OLD_DRIVER, NO_DEVICE, _, NO_IMAGE, ILLEGAL_ADDRESS, IMPLICIT_CAPTURE = (
    2, 3, 35, 100, 101, 209, 700, 906,
)  # fmt: skip


def arrays(count: int, length: int = 1024) -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(0, 1 << 62, length + i, np.int64) for i in range(count)]


def read(unit: Any, tensors: list[np.ndarray], device: int = 0, stream: int = 0) -> None:
    status, read = unit.launch(device, stream, tensors)
    assert (status, unit.wait(read)) == (OK, OK), unit.text
    unit.check(read, tensors)
    unit.release(read)


@pytest.mark.parametrize(("count", "launches"), [(1, 1), (2, 1), (16, 1), (17, 2), (40, 3)])
def test_one_wait_and_a_launch_for_sixteen_tensors(unit: Any, count: int, launches: int) -> None:
    tensors = arrays(count)
    status, read = unit.launch(0, 7, tensors)
    assert (status, unit.calls("launch"), unit.calls("cudaStreamSynchronize")) == (OK, launches, 0)
    assert unit.wait(read) == OK
    unit.check(read, tensors)
    unit.release(read)
    assert unit.calls("cudaStreamSynchronize") == 1


def test_too_many_dimensions_are_refused(unit: Any) -> None:
    base = np.arange(3**8, dtype=np.int32).reshape([3] * 8)
    read(unit, [base[(slice(0, 3, 2),) * 8]])
    # The bytes of a misaligned item are one dimension more.
    octets = np.zeros(base.nbytes + 32, np.uint8)
    start = -octets.ctypes.data % 16 + 2
    moved = octets[start : start + base.nbytes].view(np.int32).reshape(base.shape)
    assert unit.launch(0, 0, [base, moved[(slice(0, 3, 2),) * 8]])[0] == UNAVAILABLE
    assert "layout" in unit.text


def test_nothing_slow_in_a_launch(unit: Any) -> None:
    """What may wait for a device is done in otk_cuda_prepare(), which is called without the GIL."""
    tensors = [unit.describe(array) for array in arrays(2)]
    slow = ["cudaGetDeviceCount", "load", "cudaHostAlloc", "cudaSetDevice"]
    assert unit.launch_prepared(0, 0, tensors)[0] == UNPREPARED
    assert [unit.calls(name) for name in slow] == [0, 0, 0, 0]
    assert unit.prepare(0, 2, 20_000) == OK
    prepared = [unit.calls(name) for name in slow]
    status, read = unit.launch_prepared(0, 0, tensors)
    assert (status, [unit.calls(name) for name in slow[:3]]) == (OK, prepared[:3])
    # A second read at the same time needs memory of its own.
    assert unit.launch_prepared(0, 0, tensors)[0] == UNPREPARED
    unit.release(read)
    assert unit.launch_prepared(0, 0, [unit.describe(array) for array in arrays(1, 1 << 20)])[0] == UNPREPARED


def test_nothing_is_launched_while_the_stream_is_captured(unit: Any) -> None:
    assert unit.prepare(1, 1, 8192) == OK
    unit.library.fake_capture(1, ctypes.c_void_p(5))
    assert unit.launch(1, 5, arrays(1))[0] == CAPTURING
    assert [unit.calls(name) for name in ("launch", "cudaStreamSynchronize")] == [0, 0]
    read(unit, arrays(1), device=1, stream=6)


def test_the_default_stream_beside_a_capture(unit: Any) -> None:
    unit.fail("cudaStreamIsCapturing", IMPLICIT_CAPTURE)
    assert unit.launch(0, 0, arrays(1))[0] == CAPTURING
    assert unit.calls("cudaGetLastError") == 1
    assert unit.calls("launch") == 0


def test_a_thread_keeps_its_context_and_its_capture_mode(unit: Any) -> None:
    fake = unit.library
    for before in (-1, 1, 0):
        fake.fake_set_current_device(before)
        assert unit.prepare(1, 1, 1 << 20) == OK
        assert (fake.fake_current_device(), fake.fake_capture_mode()) == (before, 0)
        read(unit, arrays(1), device=1)
        assert (fake.fake_current_device(), fake.fake_capture_mode()) == (before, 0)
    assert fake.fake_has_context(1) == 1


def test_no_context_is_made_on_device_0(unit: Any) -> None:
    """Nearly every call of CUDA's runtime makes one for a thread that has none, also the exchange of capture modes."""
    for _ in range(2):
        thread = threading.Thread(target=read, args=(unit, arrays(1), 1))
        thread.start()
        thread.join()
    assert [unit.library.fake_has_context(device) for device in range(2)] == [0, 1]


def test_one_guard_for_a_read_and_none_where_the_context_is_current(unit: Any) -> None:
    read(unit, arrays(2), device=1)
    for current, switches in ((1, 0), (0, 1), (-1, 1)):
        unit.library.fake_set_current_device(current)
        unit.library.fake_reset()
        read(unit, arrays(2), device=1)
        assert unit.calls("cudaSetDevice") == switches
        assert unit.calls("cudaThreadExchangeStreamCaptureMode") == 2
        assert unit.calls("cudaStreamIsCapturing") == 1


@pytest.mark.parametrize("error", [OLD_DRIVER, NO_DEVICE])
def test_without_a_runtime_the_unit_says_so_for_good(unit: Any, error: int) -> None:
    unit.fail("cudaGetDeviceCount", error)
    for _ in range(2):
        assert unit.launch(0, 0, arrays(1))[0] == UNAVAILABLE
        assert unit.text.startswith("omni_tensor_key: initializing CUDA failed")
    assert unit.calls("cudaGetDeviceCount") == 1


def test_a_runtime_that_fails_is_asked_again(unit: Any) -> None:
    unit.fail("cudaGetDeviceCount", NOT_INITIALIZED)
    assert unit.launch(0, 0, arrays(1))[0] == FAILED
    assert "spawn" in unit.text
    unit.library.fake_reset()
    read(unit, arrays(1))


CALLS = [
    "cudaSetDevice", "cudaThreadExchangeStreamCaptureMode", "load", "cudaHostAlloc", "cudaStreamIsCapturing", "launch",
    "cudaStreamSynchronize",
]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_each_call(unit: Any, name: str) -> None:
    for successes in range(3):
        unit.library.fake_reset()
        unit.fail(name, ILLEGAL_ADDRESS, successes)
        status, read_ = unit.launch(1, 0, arrays(17))
        if status == OK:
            status = unit.wait(read_)
            unit.library.fake_fail(name.encode(), 0, 0)
            unit.release(read_)
        if status != OK:
            assert status == FAILED
            assert unit.text.startswith("omni_tensor_key: ")
            assert "Earlier asynchronous work" in unit.text
            assert "on cuda:1" in unit.text
        if name == "launch" and successes == 1:
            # What went out before the error is waited for, so that its memory can be lent again.
            assert unit.calls("cudaStreamSynchronize") == 1
        assert unit.library.fake_current_device() == -1
    unit.library.fake_reset()
    read(unit, arrays(17), device=1)


@pytest.mark.parametrize(
    ("name", "error"), [("cudaHostAlloc", OUT_OF_MEMORY), ("launch", NO_IMAGE), ("load", NO_IMAGE)]
)
def test_where_only_the_unit_fails_others_may_copy(unit: Any, name: str, error: int) -> None:
    unit.fail(name, error)
    assert unit.launch(0, 0, arrays(1))[0] == UNAVAILABLE
    unit.library.fake_reset()
    read(unit, arrays(1))


@pytest.mark.parametrize("device", [9, 1000])
def test_a_device_that_is_not_there(unit: Any, device: int) -> None:
    assert unit.launch(device, 0, arrays(1))[0] == FAILED
    assert "cudaSetDevice() failed" in unit.text


def test_staging_memory_is_used_again_and_never_freed(unit: Any) -> None:
    for _ in range(20):
        read(unit, arrays(16))
    assert (unit.calls("cudaHostAlloc"), unit.calls("cudaFreeHost")) == (1, 0)
    read(unit, arrays(1, 1 << 20))
    read(unit, arrays(2))
    assert (unit.calls("cudaHostAlloc"), unit.calls("cudaFreeHost")) == (2, 0)


def test_staging_memory_on_loan_is_not_lent_again(unit: Any) -> None:
    first, second = arrays(2), arrays(3, 900)
    _, a = unit.launch(0, 1, first)
    _, b = unit.launch(0, 2, second)
    assert (unit.wait(b), unit.wait(a)) == (OK, OK)
    unit.check(a, first)
    unit.check(b, second)
    unit.release(b)
    unit.release(a)
    assert unit.calls("cudaHostAlloc") == 2


def test_memory_that_a_device_may_still_write_to_is_not_lent_again(unit: Any) -> None:
    status, first = unit.launch(0, 0, arrays(1))
    unit.fail("cudaStreamSynchronize", ILLEGAL_ADDRESS)
    assert (status, unit.wait(first)) == (OK, FAILED)
    unit.release(first)
    unit.library.fake_reset()
    read(unit, arrays(1))
    assert unit.calls("cudaHostAlloc") == 1


def test_a_read_that_nobody_waited_for(unit: Any) -> None:
    _, first = unit.launch(0, 0, arrays(1))
    unit.release(first)
    assert unit.calls("cudaStreamSynchronize") == 1


FORK = """
import os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
import conftest, numpy as np
unit = conftest.Unit(Path({library!r}))
ids = np.arange(100)

def use():
    status, read = unit.launch(0, 0, [ids])
    if status == conftest.OK:
        status = unit.wait(read)
        unit.release(read)
    return status

def in_child(function):
    pid = os.fork()
    if pid == 0:
        os._exit(function())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

assert in_child(use) == conftest.OK  # before the parent has used CUDA
assert use() == conftest.OK

def refused():
    before = unit.calls("launch"), unit.calls("cudaSetDevice"), unit.calls("cudaGetDeviceCount")
    status = use()
    after = unit.calls("launch"), unit.calls("cudaSetDevice"), unit.calls("cudaGetDeviceCount")
    return 0 if status == conftest.FAILED and "spawn" in unit.text and before == after else 1

assert in_child(refused) == 0
assert in_child(lambda: in_child(refused)) == 0
assert use() == conftest.OK
print("held")
"""


def test_fork(unit: Any, tmp_path: Path) -> None:
    code = FORK.format(here=str(Path(__file__).parent), library=str(unit.path))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "held", done.stderr
