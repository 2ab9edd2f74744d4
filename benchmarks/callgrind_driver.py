"""What benchmarks/instructions.py runs under callgrind: the headline call, counted 1,000 and 2,000 times.

Usage: callgrind_driver.py SWITCH_LIBRARY. Prints one line of JSON that says what ran.
"""

from __future__ import annotations

import ctypes
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import omni_tensor_key
from omni_tensor_key import backend
from omni_tensor_key.bench.calls import OURS, Contenders, cached, make_prompt
from omni_tensor_key.bench.tables import HEADLINE

CALLS = 1000


def build(calls: int, *, build: Any, signature: Any, tag: Any, arguments: Any) -> None:
    """Make a key so often."""
    for _ in range(calls):
        build(signature, tag, (), arguments)


def build_and_get(calls: int, get: Any, *, build: Any, signature: Any, tag: Any, arguments: Any) -> None:
    """Make a key and find it in the cache so often."""
    for _ in range(calls):
        get(build(signature, tag, (), arguments))


def main() -> None:
    """Dump the counts of each phase twice: what CALLS more calls add is free of everything that happens once."""
    switch = ctypes.CDLL(sys.argv[1])
    contenders = Contenders()
    prompt = make_prompt(1, HEADLINE)
    encode, cache = cached(contenders.active, 1)
    encode(**prompt.tensors)
    names = contenders.key(OURS, prompt).names
    for calls in (CALLS, 10):
        build(calls, **names)
        build_and_get(calls, cache.get, **names)
        switch.start()
    switch.dump(b"warm-up")
    for calls in (CALLS, 2 * CALLS):
        build(calls, **names)
        switch.dump(f"build {calls}".encode())
        build_and_get(calls, cache.get, **names)
        switch.dump(f"build_and_get {calls}".encode())
    if cache.misses != 1:
        raise SystemExit(f"the lookups did not hit: {cache.stats()}")
    python = f"{platform.python_implementation()} {platform.python_version()}"
    libc = " ".join(platform.libc_ver())
    parts = [platform.machine(), python, libc, f"torch {torch.__version__}", backend.DESCRIPTION]
    print(json.dumps({"platform": ", ".join(parts), "package": str(Path(omni_tensor_key.__file__).parent)}))


if __name__ == "__main__":
    main()
