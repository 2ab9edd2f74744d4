"""Keys of CUDA tensors in processes of their own: `pytest -m cuda`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("gpu")]

ROOT = Path(__file__).resolve().parents[2]
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

NO_CONTEXT = """
import ctypes, threading, torch
from omni_tensor_key import tensor_key
ids = torch.arange(100, device="cuda:1")
thread = threading.Thread(target=tensor_key, args=(ids,))  # a thread that has no context yet
thread.start(); thread.join()
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
print("context on device 0:", active.value)
"""


def test_no_context_is_made_on_another_device(two_gpus: None, run_python: RunPython) -> None:
    done = run_python(NO_CONTEXT)
    assert done.stdout.strip() == "context on device 0: 0", done.stderr


FORK = """
import os, torch
import omni_tensor_key
omni_tensor_key.activate()
assert not torch.cuda.is_initialized()

def in_child(function):
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def key():
    return omni_tensor_key.tensor_key(torch.arange(100, device="cuda"))

assert in_child(lambda: key().nbytes == 800) == 0  # the parent has not used CUDA
tensor = torch.arange(100, device="cuda")
omni_tensor_key.tensor_key(tensor)

def refused():
    try:
        omni_tensor_key.tensor_key(tensor)
    except RuntimeError as error:
        return "omni_tensor_key" in str(error) and "spawn" in str(error)

assert in_child(refused) == 0
assert omni_tensor_key.tensor_key(tensor) == key()
print("held")
"""


def test_fork(run_python: RunPython) -> None:
    done = run_python(FORK)
    assert done.stdout.strip() == "held", done.stdout + done.stderr


EARLIER_ERROR = """
import torch
from omni_tensor_key import tensor_key
ids = torch.arange(100, device="cuda")
tensor_key(ids)
torch.zeros(3, device="cuda")[ids]  # out of range: fails on the device, later
try:
    tensor_key(ids)
except RuntimeError as error:
    print(error)
"""


def test_an_earlier_error_is_raised(run_python: RunPython) -> None:
    done = run_python(EARLIER_ERROR)
    assert "omni_tensor_key: " in done.stdout, done.stderr
    assert "Earlier asynchronous work" in done.stdout
