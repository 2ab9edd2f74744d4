"""What test_integration.py runs in a process of its own: the unit's first use, each time in a new process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FIRST_USE = """
import ctypes, logging, sys, threading
import device_backend, torch
from omni_tensor_key import _core, tensor_key, tensor_keys
from omni_tensor_key.keys import cuda_check, host_copy
real, note = cuda_check.check_cuda_unit, host_copy.note_host_copy

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
COPIED = "WARNING CUDA tensors are copied to the host before they are hashed, which gives the same keys but is slower: "
# What is done in a new process, and what it prints.
FIRST_USES = {
    "right": ("print(right(), launches(), right(), launches())", "True 2 True 3"),
    "wrong": (
        "fake.fake_be_wrong(); print(right(), launches(), right(), launches())",
        f"{WRONG}\nTrue 1 True 1",
    ),
    "each device": ("print(right(), launches()); tensor_key(tensor(1)); print(launches())", "True 2\n4"),
    "an error during it": (
        "fake.fake_fail(b'launch', 0, 700)\ntry: right()\nexcept RuntimeError as error: print(str(error)[:24])\n"
        "fake.fake_reset(); print(right(), launches())",
        "omni_tensor_key: launchi\nTrue 2",
    ),
    "not during a capture": (
        "cuda_check.is_capturing = lambda device: True\nprint(right(), launches())\n"
        "cuda_check.is_capturing = lambda device: False\nprint(right(), launches())",
        "True 0\nTrue 2",
    ),
    # torch's copies must not end a capture on another thread, and no context stays behind.
    "in the relaxed capture mode": (
        "state = lambda: (fake.fake_capture_mode(), fake.fake_current_device())\n"
        "_core.set_cuda_functions(lambda tensor: print(*state()) or real(tensor), note)\n"
        "print(right(), *state(), fake.fake_has_context(0))",
        "2 0\nTrue 0 -1 1",
    ),
    "no context on device 0": (
        "tensor_key(tensor(1)); print(fake.fake_has_context(1), fake.fake_has_context(0))",
        "1 0",
    ),
    # Then torch has read for the unit, which says nothing of it.
    "memory runs out for a while": (
        "fake.fake_be_wrong(); fake.fake_fail(b'cudaHostAlloc', 0, 2)\n"
        "print(right(), launches()); fake.fake_reset(); print(right(), launches())",
        f"{COPIED}{NO_MEMORY}\nTrue 0\n{WRONG}\nTrue 1",
    ),
    "torch does not tell the stream": (
        "otkdev.hide_streams(True); print(right(), launches()); print(right(), launches())",
        f"{COPIED}torch does not tell the current CUDA stream. A second backend beside CUDA is one cause.\n"
        "True 0\nTrue 0",
    ),
    # Who comes meanwhile, does not wait for it and does not trust the unit either.
    "two threads": (
        "inside, go_on = threading.Event(), threading.Event()\n"
        "_core.set_cuda_functions(lambda tensor: inside.set() or go_on.wait() and real(tensor), note)\n"
        "thread = threading.Thread(target=right); thread.start(); inside.wait()\n"
        "print(right(), launches()); go_on.set(); thread.join(); print(launches(), right(), launches())",
        "True 0\n2 True 3",
    ),
    # A finalizer, say, that keys a tensor of another device: that device is compared at its own first use.
    "another device during it": (
        "_core.set_cuda_functions(lambda tensor: tensor_key(globals()['tensor'](1)) and real(tensor), note)\n"
        "print(right(), launches()); tensor_key(tensor(1)); print(launches())",
        "True 4\n5",
    ),
}


@pytest.mark.parametrize("name", FIRST_USES)
def test_first_use(name: str) -> None:
    code, printed = FIRST_USES[name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FIRST_USE + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == printed, done.stderr
