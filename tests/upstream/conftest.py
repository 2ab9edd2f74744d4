from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

import omni_tensor_key

from .fresh_process import FreshProcesses
from .support import SEED, upstream


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The seed stands in the report of a test that fails."""
    print(f"OMNI_TENSOR_KEY_TEST_SEED={SEED}")


@pytest.fixture(scope="module")
def active() -> Iterator[Any]:
    """Upstream's cache module, with the extension active."""
    omni_tensor_key.activate()
    assert omni_tensor_key.is_active()
    yield upstream
    omni_tensor_key.deactivate()


@pytest.fixture
def log() -> Iterator[list[logging.LogRecord]]:
    """What the package logs during the test."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("vllm_omni.omni_tensor_key"), Keep()
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshProcesses]:
    """Processes in which neither upstream's cache nor this package is imported."""
    processes = FreshProcesses(tmp_path_factory.mktemp("fresh"))
    yield processes
    processes.close()
