"""The first key of a process, on a thread that has no CUDA context: the unit reads it and leaves no context behind."""

import ctypes
import threading

import torch

from omni_tensor_key import _core, tensor_key
from omni_tensor_key.keys.host_copy import to_host

cuda = ctypes.CDLL("libcuda.so.1")
ids = torch.arange(1024, device="cuda")
contexts = []


def note_context() -> None:
    context = ctypes.c_void_p()
    cuda.cuCtxGetCurrent(ctypes.byref(context))
    contexts.append(context.value)


def use() -> None:
    note_context()
    tensor_key(ids)
    note_context()


thread = threading.Thread(target=use)
thread.start()
thread.join()
print("contexts of a fresh thread before and after:", contexts)
assert contexts == [None, None]
by_unit = _core.tensor_keys([ids], to_host, 1 << 20, True)
assert by_unit[0].digest == tensor_key(ids.cpu()).digest
