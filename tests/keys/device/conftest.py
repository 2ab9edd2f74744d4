"""The device of the files in this folder, which test_device.py runs in a process of their own."""

from __future__ import annotations

import types
from collections.abc import Iterator

import device_backend
import pytest


@pytest.fixture(autouse=True)
def device() -> Iterator[types.ModuleType]:
    """torch.otkdev, with its counters at zero and device 0 current."""
    otkdev = device_backend.load()
    otkdev.reset_counters()
    yield otkdev
    otkdev.set_device(0)
