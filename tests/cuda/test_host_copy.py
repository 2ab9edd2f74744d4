"""Host copies of device tensors. The test device stays for a process's life, so its tests have one of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_host_copy_cases(run_cases: Callable[..., None]) -> None:
    run_cases(Path(__file__).with_name("host_copy_cases.py"), at_least=9)
