"""The CUDA unit inside the extension, built with the fake runtime and with the test device in CUDA's place."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
FAKE = Path(__file__).with_name("fake_runtime")
TEST_DEVICE = 12  # DLPack's code for PrivateUse1


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, compile_native: Callable[..., Path]) -> Path:
    """A folder with a copy of the package that has this extension."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "omni_tensor_key", folder / "omni_tensor_key", ignore=shutil.ignore_patterns("*.so"))
    places = ("*/*.cpp",)
    compile_native(
        folder / "omni_tensor_key" / "_core.abi3.so", "-O1", "-shared", "-DPy_LIMITED_API=0x030A0000",
        '-DOTK_CUDA_BUILD="fake"', f"-DOTK_CUDA_DEVICE={TEST_DEVICE}", f"-I{sysconfig.get_path('include')}",
        *(path for place in places for path in sorted(CSRC.glob(place))), FAKE / "runtime.cpp", FAKE / "kernel.cpp",
    )  # fmt: skip
    return folder


def test_integration_cases(package: Path, run_cases: Callable[..., None]) -> None:
    run_cases(Path(__file__).with_name("integration_cases.py"), at_least=20, PYTHONPATH=str(package))


def test_first_use_cases(package: Path, run_cases: Callable[..., None]) -> None:
    run_cases(Path(__file__).with_name("first_use_cases.py"), at_least=11, PYTHONPATH=str(package))
