"""No byte outside a tensor's storage is read: the storage lies between two pages that cannot be read at all."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="page protection is set with Linux's mprotect")

PREPARE = """
import ctypes, mmap, random, sys
import numpy as np, torch, xxhash
from omni_tensor_key import tensor_key

PAGE, PROT_NONE = mmap.PAGESIZE, 0
memory = mmap.mmap(-1, 3 * PAGE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
storage = torch.frombuffer(memory, dtype=torch.uint8, count=PAGE, offset=PAGE)
rng = random.Random(int(sys.argv[1]))
storage.copy_(torch.frombuffer(bytearray(rng.randbytes(PAGE)), dtype=torch.uint8))
for guard in (start, start + 2 * PAGE):
    assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), PROT_NONE) == 0

def digests(tensor):
    return tensor_key(tensor).digest, xxhash.xxh3_128_digest(np.ascontiguousarray(tensor.numpy()).tobytes())
"""

KEY_VIEWS_AT_BOTH_ENDS = """
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
count = 0
for _ in range(3000):
    elements = storage.view(rng.choice(DTYPES))
    shape = [rng.choice([1, 1, 2, 3, 4, 5]) for _ in range(rng.randrange(5))]
    strides = [rng.randrange(8) if size > 1 else rng.choice([0, 1, 5, 1 << 40]) for size in shape]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides) if size > 1)
    if reach > elements.numel():
        continue
    for offset in (0, elements.numel() - reach):
        tensor = elements.as_strided(shape, strides, offset)
        native, expected = digests(tensor)
        assert native == expected, (shape, strides, offset)
        count += 1
print(count)
"""

KEY_WHOLE_LENGTHS_TO_THE_END = """
for length in range(PAGE + 1):
    for part in (storage[PAGE - length:], storage[:length]):
        native, expected = digests(part)
        assert native == expected, length
print(length)
"""


@pytest.mark.parametrize("views", [KEY_VIEWS_AT_BOTH_ENDS, KEY_WHOLE_LENGTHS_TO_THE_END], ids=["strided", "contiguous"])
def test_views_that_touch_the_ends_of_the_storage(views: str, run_python: RunPython, rng: random.Random) -> None:
    result = run_python(PREPARE + views, str(rng.randrange(1 << 32)))
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout) > 1000


@pytest.mark.parametrize("outside", ["PAGE", "-1"])
def test_the_guard_pages_stop_a_read_outside(outside: str, run_python: RunPython) -> None:
    peek = f"ctypes.string_at(start + PAGE + {outside}, 1); print('read')"
    result = run_python(PREPARE + peek, "0")
    assert (result.returncode, result.stdout) == (-signal.SIGSEGV, "")


# The mode's Python code runs wherever torch is asked for anything about a tensor.
RESIZE_WHILE_KEYING = """
import torch
from torch.overrides import TorchFunctionMode
from omni_tensor_key import tensor_keys

first, second = torch.arange(1 << 14, dtype=torch.uint8), torch.tensor([1], dtype=torch.int8)
whole, storage = tensor_keys([first, second]), first.untyped_storage()

class Resizing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        storage.resize_(0)
        return function(*args, **(kwargs or {}))

with torch.device("cpu"), Resizing():
    assert tensor_keys([first, second]) == whole == tensor_keys([first, second])
    assert storage.nbytes() == 1 << 14
    first.dim()
    assert storage.nbytes() == 0
"""


def test_a_function_mode_does_not_run_while_a_key_is_made(run_python: RunPython) -> None:
    result = run_python(RESIZE_WHILE_KEYING)
    assert result.returncode == 0, result.stderr[-2000:]
