from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import omni_tensor_key

from .checkout import PIPELINES, Adapter, Checkout

_CHECKOUT = pytest.StashKey["Checkout | None"]()
ABSENT = "needs a checkout of verl-omni: --verl-omni=PATH, or VERL_OMNI=PATH in the environment"


def checkout_of(config: pytest.Config) -> Checkout | None:
    """The checkout that the run is about, if there is one."""
    if _CHECKOUT not in config.stash:
        path = config.getoption("--verl-omni")
        try:
            config.stash[_CHECKOUT] = Checkout(Path(path)) if path else None
        except FileNotFoundError as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[_CHECKOUT]


@pytest.fixture(scope="session")
def checkout(pytestconfig: pytest.Config) -> Checkout:
    found = checkout_of(pytestconfig)
    if found is None:
        pytest.skip(ABSENT)
    return found


def adapters_of(config: pytest.Config) -> list[Adapter]:
    """The checkout's adapters of diffusion pipelines."""
    found = checkout_of(config)
    return [] if found is None else [adapter for adapter in found.adapters() if adapter.registry == PIPELINES]


@pytest.fixture(params=["on", "off"], scope="module")
def extension(request: pytest.FixtureRequest) -> Iterator[str]:
    """The state of this package during the test."""
    was_active = omni_tensor_key.is_active()
    (omni_tensor_key.activate if request.param == "on" else omni_tensor_key.deactivate)()
    assert omni_tensor_key.is_active() == (request.param == "on")
    yield request.param
    (omni_tensor_key.activate if was_active else omni_tensor_key.deactivate)()
