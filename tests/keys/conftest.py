from __future__ import annotations

import pytest

from .support import SEED, Active


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The seed stands in the report of a test that fails."""
    print(f"OMNI_TENSOR_KEY_TEST_SEED={SEED}")


@pytest.fixture
def active() -> Active:
    return Active()
