"""The CUDA unit compiles without a warning for every GPU that nvcc knows, and is never left out in silence."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import setuptools

from omni_tensor_key import _core

ROOT = Path(__file__).resolve().parents[2]
UNAVAILABLE = 3


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The functions of setup.py."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return SimpleNamespace(**runpy.run_path("setup.py"))


@pytest.fixture
def nvcc(setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OMNI_TENSOR_KEY_CUDA", "auto")
    found = setup_py.find_nvcc()
    if found is None:
        pytest.skip("nvcc is not installed")
    return str(found)


def tool(name: str) -> str:
    """A program of the CUDA toolkit; Triton brings some of them too."""
    folders = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    try:
        import triton

        folders.append(str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin"))
    except ImportError:
        pass
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_the_unit_for_all_architectures(
    setup_py: SimpleNamespace, nvcc: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CFLAGS", "-O2 -Werror")
    codes, ptx = setup_py.gpu_targets(nvcc)
    assert codes[0] == 75
    assert len({code // 10 for code in codes}) == len(codes)
    objects, libraries, built = setup_py.build_cuda(nvcc, tmp_path)
    assert any(Path(folder, "libcudart_static.a").is_file() for folder in libraries)
    assert all(f"sm_{code}" in built for code in codes)

    symbols = "".join(output(tool("nm"), "--undefined-only", path) for path in objects)
    assert "cudaLaunchKernel" in symbols
    assert not re.search(r"\bU _?Py|N?K?(2at|3c10|5torch)[0-9A-Z]|torch", symbols)
    (kernel,) = (path for path in objects if path.endswith("kernel.cu.o"))
    elf = re.findall(r"\.sm_(\d+)\.cubin", output(tool("cuobjdump"), "--list-elf", kernel))
    assert sorted(map(int, elf)) == codes
    assert re.findall(r"\.sm_(\d+)\.ptx", output(tool("cuobjdump"), "--list-ptx", kernel)) == [str(ptx)]


@pytest.mark.skipif(os.environ.get("OMNI_TENSOR_KEY_CUDA") == "0", reason="OMNI_TENSOR_KEY_CUDA=0")
def test_the_installed_extension_has_the_unit(nvcc: str) -> None:
    assert _core.CUDA_BUILD is not None
    assert re.fullmatch(r"nvcc [\d.]+:( sm_\d+)+ compute_\d+", _core.CUDA_BUILD)
    cubins = re.findall(r"\.sm_(\d+)\.cubin", output(tool("cuobjdump"), "--list-elf", _core.__file__))
    assert sorted(map(int, cubins)) == list(map(int, re.findall(r"sm_(\d+)", _core.CUDA_BUILD)))


def test_loading_it_does_not_load_the_driver(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_python(
        "import omni_tensor_key._core; print([line for line in open('/proc/self/maps') if 'libcuda' in line])"
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.fixture
def real_unit(nvcc: str, tmp_path: Path, unit_class: Any) -> Any:
    """The unit with NVIDIA's runtime."""
    sources = [path for suffix in ("*.cpp", "*.cu") for path in sorted((ROOT / "csrc" / "cuda").glob(suffix))]
    library = tmp_path / "unit.so"
    subprocess.run(
        [nvcc, "-std=c++17", "-shared", "-cudart", "static", "-Xcompiler", "-fPIC", "-o", library, *sources], check=True
    )
    return unit_class(library)


def test_without_a_driver_the_unit_says_so(real_unit: Any) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available() or any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU")
    for _ in range(2):
        assert real_unit.launch(0, 0, [np.arange(3)])[0] == UNAVAILABLE
        assert re.match(r"omni_tensor_key: initializing CUDA failed: .*\(cudaError\w+\)\.", real_unit.text)


def test_a_wrong_switch(setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_TENSOR_KEY_CUDA", "yes")
    with pytest.raises(SystemExit, match="none of auto, 0 and 1"):
        setup_py.find_nvcc()


def without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)


@pytest.mark.parametrize("wanted", ["auto", "0", "", None])
def test_without_nvcc(setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, wanted: str | None) -> None:
    without_nvcc(monkeypatch)
    if wanted is None:
        monkeypatch.delenv("OMNI_TENSOR_KEY_CUDA", raising=False)
    else:
        monkeypatch.setenv("OMNI_TENSOR_KEY_CUDA", wanted)
    assert setup_py.find_nvcc() is None


def test_the_unit_is_wanted_and_there_is_no_nvcc(setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    without_nvcc(monkeypatch)
    monkeypatch.setenv("OMNI_TENSOR_KEY_CUDA", "1")
    with pytest.raises(SystemExit, match=r"needs nvcc.*OMNI_TENSOR_KEY_CUDA=0"):
        setup_py.find_nvcc()


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_where_nvcc_is_looked_for(setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMNI_TENSOR_KEY_CUDA", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    home = script(tmp_path / "home" / "bin" / "nvcc", "exit 0")
    assert setup_py.find_nvcc() == str(home)
    path = script(tmp_path / "path" / "nvcc", "exit 0")
    assert setup_py.find_nvcc() == str(path)
    monkeypatch.setenv("OMNI_TENSOR_KEY_CUDA", "0")
    assert setup_py.find_nvcc() is None


@pytest.mark.parametrize("wanted", ["auto", "1"])
def test_an_nvcc_that_fails_fails_the_build(
    setup_py: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wanted: str
) -> None:
    monkeypatch.setenv("OMNI_TENSOR_KEY_CUDA", wanted)
    nvcc = script(
        tmp_path / "nvcc", 'case "$1" in --list-gpu-code) echo sm_75;; *) echo unsupported compiler; exit 3;; esac'
    )
    with pytest.raises(SystemExit, match=r"ended with 3; .*OMNI_TENSOR_KEY_CUDA=0 builds without the unit"):
        setup_py.build_cuda(str(nvcc), tmp_path / "objects")


def test_one_architecture_of_each_major_version(setup_py: SimpleNamespace, tmp_path: Path) -> None:
    nvcc = script(tmp_path / "nvcc", "echo sm_52 sm_70 sm_75 sm_80 sm_86 sm_89 sm_90 sm_90a sm_103 sm_100 sm_120")
    assert setup_py.gpu_targets(str(nvcc)) == ([75, 80, 90, 100, 120], 120)
