"""What all tests share: the seed of the random ones, and fresh interpreters."""

from __future__ import annotations

import gc
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SEED = int(os.environ.get("OMNI_TENSOR_KEY_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
os.environ["OMNI_TENSOR_KEY_TEST_SEED"] = str(SEED)  # of the workers of pytest-xdist too

# `python -m pytest` puts the working directory first, but the package's folder there has no compiled core: the tests
# are of the package that is installed.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_addoption(parser: pytest.Parser) -> None:
    # In the form with "=": pytest reads a path after a space as a place to look for conftest.py files, too.
    parser.addoption(
        "--verl-omni",
        metavar="PATH",
        default=os.environ.get("VERL_OMNI"),
        help="checkout of verl-omni whose adapters are run; VERL_OMNI in the environment says it, too",
    )


def pytest_report_header() -> str:
    return f"OMNI_TENSOR_KEY_TEST_SEED={SEED}"


@pytest.fixture(scope="session")
def verl_omni(pytestconfig: pytest.Config) -> str:
    """The checkout of verl-omni."""
    path = pytestconfig.getoption("--verl-omni")
    if not path:
        pytest.skip("needs a checkout of verl-omni: --verl-omni=PATH, or VERL_OMNI=PATH in the environment")
    return str(Path(path).resolve())


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> Iterator[None]:
    """Activation and collections look at all objects; leave out the millions that the imports have made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers that depend on the seed and on the test's name, so that one test alone can be run again."""
    print(f"OMNI_TENSOR_KEY_TEST_SEED={SEED}")  # shown with a failure, where -q has hidden the header
    return random.Random(f"{SEED} {request.node.nodeid}")


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run code in a fresh interpreter outside the checkout, with the given environment variables."""

    def run(code: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_TENSOR_KEY")}
        return subprocess.run(
            [sys.executable, "-c", code, *args],
            cwd=tmp_path,
            env=inherited | variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def active() -> Iterator[None]:
    """The extension is active."""
    import omni_tensor_key

    omni_tensor_key.activate()
    assert omni_tensor_key.is_active()
    yield
    omni_tensor_key.deactivate()
    assert not omni_tensor_key.is_active()


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
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Processes in which neither upstream's cache nor this package is imported."""
    from activation.fresh_process import FreshProcesses

    processes = FreshProcesses(tmp_path_factory.mktemp("fresh"))
    yield processes
    processes.close()
