from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from upstream.fresh_process import FreshProcesses

import omni_tensor_key

from .support import upstream


@pytest.fixture(scope="module")
def active() -> Iterator[Any]:
    """Upstream's cache module, with the extension active."""
    omni_tensor_key.activate()
    assert omni_tensor_key.is_active()
    yield upstream
    omni_tensor_key.deactivate()


@pytest.fixture(scope="package")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshProcesses]:
    """Processes in which neither upstream's cache nor this package is imported."""
    processes = FreshProcesses(tmp_path_factory.mktemp("fresh"))
    yield processes
    processes.close()


@pytest.fixture(autouse=True)
def _cuda(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")
