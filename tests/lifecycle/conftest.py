from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from upstream.fresh_process import FreshProcesses as Fresh

import omni_tensor_key

from .support import CALLS, Adapter, LoadingEncoder


@pytest.fixture(scope="module")
def active() -> Iterator[None]:
    """The extension is active."""
    omni_tensor_key.activate()
    assert omni_tensor_key.is_active()
    yield
    omni_tensor_key.deactivate()


@pytest.fixture
def switched_on() -> Iterator[None]:
    """The extension is active in this test alone, and leaves nothing on the classes."""
    before = [dict(vars(cls)) for cls in (Adapter, LoadingEncoder)]
    omni_tensor_key.activate()
    yield
    omni_tensor_key.deactivate()
    assert [dict(vars(cls)) for cls in (Adapter, LoadingEncoder)] == before


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Any:
    """The arguments of one encode_prompt() call: once as tensors, once as lists."""
    return CALLS[request.param]


class Log(list[str]):
    """The lines that the package logs, each with its level in front."""

    def having(self, *parts: str) -> list[str]:
        return [line for line in self if all(part in line for part in parts)]


@pytest.fixture
def log() -> Iterator[Log]:
    """What the package logs during the test, down to DEBUG."""
    lines = Log()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname}: {record.getMessage()}")

    logger, handler = logging.getLogger("vllm_omni.omni_tensor_key"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    """Processes in which neither upstream's cache nor this package is imported."""
    processes = Fresh(tmp_path_factory.mktemp("fresh"))
    yield processes
    processes.close()
