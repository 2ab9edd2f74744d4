"""What test_integration.py runs in a process of its own: the unit's first use, each time in a new process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FIRST_USE = """
import ctypes, logging, sys, threading
import device_backend, torch
from omni_tensor_key import _core, cuda_check, host_copy, tensor_key, tensor_keys

logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
fake = ctypes.CDLL(_core.__file__)
fake.fake_poison(device_backend.POISON)
otkdev = device_backend.load()
def tensor(device=0):
    return torch.arange(9, dtype=torch.uint8).to(f"otkdev:{device}")[1:]
def right():
    return tensor_key(tensor()).hexdigest == tensor_key(tensor().cpu()).hexdigest
def launches():
    return fake.fake_calls(b"launch")
"""
WRONG = (
    "ERROR omni_tensor_key: on otkdev:0 the CUDA unit read other bytes than torch (patterns 8, 9 of 11). Please report "
    "this. CUDA tensors are copied to the host from now on, which gives the right keys but is slower."
)
NO_MEMORY = (
    "omni_tensor_key: cudaHostAlloc() failed on cuda:0: an error of the fake (cudaErrorOfTheFake). The device's memory "
    "or the pinned memory that this process may take (`ulimit -l`) is used up."
)
# What is done in a new process, and what it prints.
FIRST_USES = {
    "right": ("print(right(), launches(), right(), launches())", "True 2 True 3"),
    "wrong": (
        "fake.fake_be_wrong(); print(right(), launches(), right(), launches(), _core.use_cuda_unit(True))",
        f"{WRONG}\nTrue 2 True 2 False",
    ),
    "each device": ("print(right(), launches()); tensor_key(tensor(1)); print(launches())", "True 2\n4"),
    "an error during it": (
        "fake.fake_fail(b'launch', 1, 700)\ntry: right()\nexcept RuntimeError as error: print(str(error)[:24])\n"
        "fake.fake_reset(); print(right(), launches())",
        "omni_tensor_key: launchi\nTrue 2",
    ),
    "not during a capture": (
        "cuda_check.is_capturing = lambda device: True\nprint(right(), launches())\n"
        "cuda_check.is_capturing = lambda device: False\nprint(right(), launches())",
        "True 1\nTrue 3",
    ),
    # Then torch has read for the unit, which says nothing of it.
    "memory runs out for a while": (
        "host_copy.note_host_copy = print\nfake.fake_be_wrong(); fake.fake_fail(b'cudaHostAlloc', 0, 2)\n"
        "print(right(), launches()); fake.fake_reset(); print(right(), launches())",
        f"{NO_MEMORY}\nTrue 0\n{WRONG}\nTrue 2",
    ),
    # Who comes meanwhile, does not wait for it and does not trust the unit either.
    "two threads": (
        "real, inside, go_on = cuda_check.compare_with_torch, threading.Event(), threading.Event()\n"
        "cuda_check.compare_with_torch = lambda tensor: inside.set() or go_on.wait() and real(tensor)\n"
        "thread = threading.Thread(target=right); thread.start(); inside.wait()\n"
        "print(right(), launches()); go_on.set(); thread.join(); print(launches(), right(), launches())",
        "True 2\n3 True 4",
    ),
    # A finalizer, say, that keys a tensor of another device: that device is compared at its own first use.
    "another device during it": (
        "real = cuda_check.compare_with_torch\n"
        "cuda_check.compare_with_torch = lambda tensor: tensor_key(globals()['tensor'](1)) and real(tensor)\n"
        "print(right(), launches()); cuda_check.compare_with_torch = real; tensor_key(tensor(1)); print(launches())",
        "True 3\n5",
    ),
}


@pytest.mark.parametrize("name", FIRST_USES)
def test_first_use(name: str) -> None:
    code, printed = FIRST_USES[name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FIRST_USE + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == printed, done.stderr
