from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import omni_tensor_key

from .checkout import PIPELINES, Adapter, Checkout
from .report import Report

_REPORT = pytest.StashKey[Report]()
_CHECKOUT = pytest.StashKey["Checkout | None"]()
ABSENT = "needs a checkout of verl-omni: --verl-omni=PATH, or VERL_OMNI=PATH in the environment"


def pytest_addoption(parser: pytest.Parser) -> None:
    # In the form with "=": pytest reads a path after a space as a place to look for conftest.py files, too.
    parser.addoption("--verl-omni", metavar="PATH", help="checkout of verl-omni whose adapters are run")
    parser.addoption("--verl-omni-report", metavar="FILE", help="write what was seen to this file, as Markdown")


def _option(config: pytest.Config, name: str) -> str | None:
    # The option does not exist where this folder was not named on the command line.
    return config.getoption(name, None) or None


def checkout_of(config: pytest.Config) -> Checkout | None:
    """The checkout that the run is about, if there is one."""
    if _CHECKOUT not in config.stash:
        path = _option(config, "--verl-omni") or os.environ.get("VERL_OMNI")
        try:
            config.stash[_CHECKOUT] = Checkout(Path(path)) if path else None
        except FileNotFoundError as error:
            raise pytest.UsageError(str(error)) from None
    return config.stash[_CHECKOUT]


def _report(config: pytest.Config) -> Report:
    return config.stash.setdefault(_REPORT, Report())


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    return _report(pytestconfig)


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


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = _option(session.config, "--verl-omni-report")
    checkout = checkout_of(session.config)
    if file and checkout is not None:
        report = _report(session.config)
        report.revision = checkout.revision()
        Path(file).write_text(report.as_markdown(), encoding="utf-8")
