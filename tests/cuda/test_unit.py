"""The launcher keeps the rules of the road: tested on a fake CUDA runtime whose work is done when it is waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

OK, CAPTURING, UNAVAILABLE, FAILED = range(4)
OUT_OF_MEMORY, NOT_INITIALIZED, OLD_DRIVER, NO_DEVICE, BAD_DEVICE, NO_IMAGE, ILLEGAL_ADDRESS, IMPLICIT_CAPTURE = (
    2, 3, 35, 100, 101, 209, 700, 906,
)  # fmt: skip


def arrays(count: int, length: int = 1024) -> list[np.ndarray]:
    return [np.random.default_rng(i).integers(0, 1 << 62, length + i, np.int64) for i in range(count)]


def check(unit: Any, read: Any, tensors: list[np.ndarray]) -> None:
    for i, tensor in enumerate(tensors):
        content = np.ascontiguousarray(tensor).tobytes()
        assert unit.result(read, i, len(content)) == (content, xxhash.xxh3_128_hexdigest(content))


@pytest.mark.parametrize(("count", "launches"), [(1, 1), (2, 1), (16, 1), (17, 2), (40, 3)])
def test_one_wait_and_a_launch_for_sixteen_tensors(unit: Any, count: int, launches: int) -> None:
    tensors = arrays(count)
    status, read = unit.launch((0, 7, tensors))
    assert (status, unit.calls("launch"), unit.calls("cudaStreamSynchronize")) == (OK, launches, 0)
    assert unit.wait(read) == OK
    check(unit, read, tensors)
    unit.release(read)
    assert unit.calls("cudaStreamSynchronize") == 1


def test_sizes_and_layouts(unit: Any) -> None:
    base = np.arange(4096, dtype=np.int64).reshape(64, 64)
    tensors = [base, base.T, base[:, 3:9], base[::2, ::-1], base[:1, :1], base.view(np.uint8)[:, 1:4], base[:0:-1]]
    status, read = unit.launch((1, 0, tensors))
    assert (status, unit.wait(read)) == (OK, OK), unit.text
    check(unit, read, tensors)
    unit.release(read)


def test_devices_are_launched_before_one_is_waited_for(unit: Any) -> None:
    first, second = arrays(3), arrays(2)
    status, read = unit.launch((0, 5, first), (1, 0, second))
    assert (status, unit.calls("launch"), unit.calls("cudaStreamSynchronize")) == (OK, 2, 0)
    assert unit.wait(read) == OK
    assert unit.calls("cudaStreamSynchronize") == 2
    check(unit, read, first + second)
    unit.release(read)


@pytest.mark.parametrize("groups", [1, 2])
def test_nothing_is_launched_while_a_stream_is_captured(unit: Any, groups: int) -> None:
    unit.library.fake_capture(groups - 1, 5)
    status, _ = unit.launch(*[(device, 5, arrays(1)) for device in range(groups)])
    assert status == CAPTURING
    assert [unit.calls(name) for name in ("launch", "cudaHostAlloc", "cudaStreamSynchronize")] == [0, 0, 0]


def test_the_default_stream_beside_a_capture(unit: Any) -> None:
    unit.fail("cudaStreamIsCapturing", IMPLICIT_CAPTURE)
    assert unit.launch((0, 0, arrays(1)))[0] == CAPTURING
    assert unit.calls("cudaGetLastError") == 1
    assert unit.calls("launch") == 0


def test_no_call_before_the_first_tensor(unit: Any) -> None:
    names = ["cudaGetDeviceCount", "cudaSetDevice", "cudaGetDriverEntryPointByVersion", "cudaHostAlloc"]
    assert [unit.calls(name) for name in names] == [0, 0, 0, 0]


def test_the_thread_keeps_its_device_and_its_capture_mode(unit: Any) -> None:
    fake = unit.library
    for before in (-1, 1, 0):
        fake.fake_set_current_device(before)
        status, read = unit.launch((1, 0, arrays(1)))
        assert (status, fake.fake_current_device()) == (OK, before)
        assert (unit.wait(read), fake.fake_current_device()) == (OK, before)
        unit.release(read)
        assert fake.fake_capture_mode() == 0
    assert fake.fake_has_context(1) == 1
    assert fake.fake_has_context(0) == 0  # putting "device 0" back would have made its context


@pytest.mark.parametrize("error", [OLD_DRIVER, NO_DEVICE])
def test_without_a_runtime_the_unit_says_so_for_good(unit: Any, error: int) -> None:
    unit.fail("cudaGetDeviceCount", error)
    assert unit.launch((0, 0, arrays(1)))[0] == UNAVAILABLE
    assert unit.text.startswith("omni_tensor_key: initializing CUDA failed")
    assert unit.launch((0, 0, arrays(1)))[0] == UNAVAILABLE
    assert unit.calls("cudaGetDeviceCount") == 1


def test_a_runtime_that_fails_is_asked_again(unit: Any) -> None:
    unit.fail("cudaGetDeviceCount", NOT_INITIALIZED)
    assert unit.launch((0, 0, arrays(1)))[0] == FAILED
    assert "spawn" in unit.text
    unit.library.fake_reset()
    assert unit.launch((0, 0, arrays(1)))[0] == OK


CALLS = ["cudaSetDevice", "cudaStreamIsCapturing", "cudaHostAlloc", "launch", "cudaStreamSynchronize"]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_each_call(unit: Any, name: str, groups: int) -> None:
    for successes in range(3):
        unit.library.fake_reset()
        unit.fail(name, ILLEGAL_ADDRESS, successes)
        status, read = unit.launch(*[(device, 0, arrays(17)) for device in range(groups)])
        if status == OK:
            status = unit.wait(read)
            unit.release(read)
        if unit.calls(name) > successes:
            assert status == FAILED
            assert unit.text.startswith("omni_tensor_key: ")
            assert "Earlier asynchronous work" in unit.text
            assert "on cuda:" in unit.text
        else:
            assert status == OK
        if name == "launch" and successes > 0:
            # What went out before the error is waited for, so that its memory can be lent again.
            assert unit.calls("cudaStreamSynchronize") > 0
        assert unit.library.fake_current_device() == -1
        assert unit.library.fake_capture_mode() == 0
    unit.library.fake_reset()
    tensors = arrays(17)
    status, read = unit.launch((0, 0, tensors))
    assert (status, unit.wait(read)) == (OK, OK)
    check(unit, read, tensors)
    unit.release(read)


@pytest.mark.parametrize(("name", "error"), [("cudaHostAlloc", OUT_OF_MEMORY), ("launch", NO_IMAGE)])
def test_where_only_the_unit_fails_others_may_copy(unit: Any, name: str, error: int) -> None:
    unit.fail(name, error)
    assert unit.launch((0, 0, arrays(1)))[0] == UNAVAILABLE
    unit.library.fake_reset()
    assert unit.launch((0, 0, arrays(1)))[0] == OK


def test_a_device_that_is_not_there(unit: Any) -> None:
    assert unit.launch((9, 0, arrays(1)))[0] == FAILED
    assert "cudaSetDevice() failed on cuda:9" in unit.text


def test_staging_memory_is_used_again_and_never_freed(unit: Any) -> None:
    for _ in range(20):
        status, read = unit.launch((0, 0, arrays(16)))
        assert (status, unit.wait(read)) == (OK, OK)
        unit.release(read)
    assert (unit.calls("cudaHostAlloc"), unit.calls("cudaFreeHost")) == (1, 0)
    large = arrays(1, 1 << 20)
    status, read = unit.launch((0, 0, large))
    assert (status, unit.wait(read)) == (OK, OK)
    check(unit, read, large)
    unit.release(read)
    assert (unit.calls("cudaHostAlloc"), unit.calls("cudaFreeHost")) == (2, 0)


def test_staging_memory_on_loan_is_not_lent_again(unit: Any) -> None:
    first, second = arrays(2), arrays(3, 900)
    _, a = unit.launch((0, 1, first))
    _, b = unit.launch((0, 2, second))
    assert unit.calls("cudaHostAlloc") == 2
    assert (unit.wait(b), unit.wait(a)) == (OK, OK)
    check(unit, a, first)
    check(unit, b, second)
    unit.release(a)
    unit.release(b)


def test_memory_that_a_device_may_still_write_to_is_not_lent_again(unit: Any) -> None:
    status, read = unit.launch((0, 0, arrays(1)))
    unit.fail("cudaStreamSynchronize", ILLEGAL_ADDRESS)
    assert (status, unit.wait(read)) == (OK, FAILED)
    unit.release(read)
    unit.library.fake_reset()
    assert unit.launch((0, 0, arrays(1)))[0] == OK
    assert unit.calls("cudaHostAlloc") == 1


def test_a_read_that_nobody_waited_for(unit: Any) -> None:
    _, read = unit.launch((0, 0, arrays(1)))
    unit.release(read)
    assert unit.calls("cudaStreamSynchronize") == 1


def test_threads(unit: Any) -> None:
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for i in range(30):
                tensors = arrays(1 + (thread + i) % 5, 100 * (thread + 1))
                status, read = unit.launch((thread % 2, thread + 1, tensors))
                assert (status, unit.wait(read)) == (OK, OK)
                check(unit, read, tensors)
                unit.release(read)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert unit.calls("cudaHostAlloc") <= 8


FORK = """
import os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
import conftest, numpy as np
unit = conftest.Unit(Path({library!r}))
ids = np.arange(100)

def use():
    status, read = unit.launch((0, 0, [ids]))
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
