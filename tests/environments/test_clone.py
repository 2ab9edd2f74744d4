"""What somebody meets in a clone of this project: the source folder, an editable installation, the benchmark."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from .planted import run_command
from .venvs import Venv

ROOT = Path(__file__).resolve().parents[2]
BUILT = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info")
USE = "import omni_tensor_key; print(omni_tensor_key.tensor_key)"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs, without anything built."""
    place = tmp_path_factory.mktemp("clone")
    for name in ("omni_tensor_key", "csrc"):
        shutil.copytree(ROOT / name, place / name, ignore=BUILT)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, place)
    return place


@pytest.mark.parametrize("use", [USE, "from omni_tensor_key import activate", "from omni_tensor_key import TensorKey"])
def test_python_in_the_clone_says_what_to_do(clone: Path, use: str) -> None:
    """Also where the package is installed: Python takes the folder of the working directory."""
    done = run_command([sys.executable, "-c", use], clone)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "this is the source folder: leave that directory, or run `pip install -e .` in it" in last


def test_an_editable_installation(clone: Path, tmp_path: Path) -> None:
    environment = Venv(tmp_path / "environment")
    environment.borrow("omni-tensor-key", "__editable__")
    place = Path(shutil.copytree(clone, tmp_path / "clone"))
    python = str(environment.python)
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", "."]
    done = run_command(pip, place, OMNI_TENSOR_KEY_CUDA="0")
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in (place, tmp_path):
        used = run_command([python, "-c", USE + "; print(omni_tensor_key.__file__)"], folder)
        assert used.stdout.splitlines()[-1:] == [str(place / "omni_tensor_key" / "__init__.py")], used.stderr


def test_the_version(tmp_path: Path) -> None:
    assert run_command(["omni-tensor-key", "--version"], tmp_path).stdout.strip() == version("omni-tensor-key")


def test_the_benchmark(tmp_path: Path) -> None:
    """A quick run compares all targets; its figures say nothing."""
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "--quick", "--json", "figures.json"]
    done = run_command([*command, "--chart", "cost"], tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["targets"]) == 12
    assert all(target["measured"] > 0 for target in figures["targets"])
    assert figures["environment"]["vllm-omni"] == version("vllm-omni")
    assert {path.name for path in tmp_path.glob("cost.*")} == {"cost.svg", "cost.png"}
    for table in figures["tables"].values():
        assert all(len(cells) == len(table["columns"]) for cells in table["rows"].values())
        assert all(f"| {name} " in done.stdout for name in table["rows"])


def test_a_chart_without_matplotlib_is_refused_before_the_run(tmp_path: Path) -> None:
    block = "import sys; sys.modules['matplotlib'] = None; sys.path.insert(0, sys.argv[1]); "
    run = "sys.argv = ['bench.py', '--chart', 'cost']; import bench; bench.main()"
    done = run_command([sys.executable, "-c", block + run, str(ROOT / "benchmarks")], tmp_path)
    assert done.returncode == 2
    assert "--chart needs matplotlib" in done.stderr
