"""What is shipped: a stable-ABI binary without torch in it, three layers of source, and a complete source archive."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

import omni_tensor_key
from omni_tensor_key import _core

BINARY = Path(_core.__file__)
INCLUDES_PYTHON = r'#\s*include\s*[<"](?:.*/)?[Pp]ython\.h[">]'
NATIVE_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
# The private names that belong to CPython's stable ABI, as macros and inline functions use them.
STABLE_PRIVATE = {
    "_Py_Dealloc", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct", "_Py_NotImplementedStruct",
    "_Py_IncRef", "_Py_DecRef", "_Py_EllipsisObject", "_Py_CheckRecursiveCall",
}  # fmt: skip


def undefined_symbols() -> list[str]:
    if shutil.which("nm") is None:
        pytest.skip("binutils' nm is not installed")
    listing = subprocess.run(["nm", "-D", "--undefined-only", BINARY], capture_output=True, text=True, check=True)
    return [line.split()[-1].split("@")[0] for line in listing.stdout.splitlines()]


@pytest.fixture(scope="module")
def native_sources(root: Path) -> dict[str, str]:
    """The text of each native file, by its path under csrc/."""
    folder = root / "csrc"
    files = sorted(path for path in folder.rglob("*") if path.suffix in NATIVE_SUFFIXES)
    assert files
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_the_version_is_the_metadata() -> None:
    assert omni_tensor_key.__version__ == version("omni-tensor-key")


def test_the_installed_version_is_the_one_of_the_checkout(root: Path) -> None:
    declared = re.search(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared
    assert omni_tensor_key.__version__ == declared[1]


def test_public_names() -> None:
    names = set(omni_tensor_key.__all__) - {"__version__"}
    assert len(names) < 10
    assert all(hasattr(omni_tensor_key, name) for name in names)
    assert names >= {
        "TensorKey", "UncacheableTensorError", "activate", "deactivate", "is_active", "tensor_key", "tensor_keys",
    }  # fmt: skip


def test_the_entry_point_names_a_function() -> None:
    points = distribution("omni-tensor-key").entry_points.select(group="vllm_omni.general_plugins")
    assert [point.name for point in points] == ["omni_tensor_key"]
    assert all(callable(point.load()) for point in points)


def test_the_binary_is_named_for_the_stable_abi() -> None:
    assert BINARY.name == "_core.abi3.so"


def test_the_wheel_is_tagged_for_the_stable_abi() -> None:
    wheel = distribution("omni-tensor-key").read_text("WHEEL") or ""
    assert re.search(r"^Tag: cp310-abi3-", wheel, re.MULTILINE), wheel


def test_the_binary_needs_no_symbol_of_torch() -> None:
    symbols = undefined_symbols()
    assert any(name.startswith("Py") for name in symbols)
    # As the linker sees them: the namespaces at, c10, caffe2 and torch, and torch's C functions.
    assert [name for name in symbols if re.search(r"N?K?(2at|3c10|6caffe2|5torch)[0-9A-Z]|torch|THP", name)] == []


def test_the_binary_links_no_library_of_torch_or_python() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("binutils' readelf is not installed")
    dynamic = subprocess.run(["readelf", "-d", BINARY], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert needed
    assert [name for name in needed if re.search(r"torch|c10|python|cuda", name)] == []
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)


def test_the_binary_uses_no_private_symbol_of_python() -> None:
    # Those in _SizeT are what PY_SSIZE_T_CLEAN makes of the argument parsers.
    private = {name for name in undefined_symbols() if name.startswith("_Py") and not name.endswith("_SizeT")}
    assert private - STABLE_PRIVATE == set()


def test_abi3audit_finds_nothing() -> None:
    if importlib.util.find_spec("abi3audit") is None:
        pytest.skip("abi3audit is not installed")
    audit = subprocess.run(
        [sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.10", str(BINARY)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_the_binary_exports_its_init_function_only() -> None:
    undefined_symbols()  # skips where there is no nm
    listing = subprocess.run(["nm", "-D", "--defined-only", BINARY], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listing.splitlines()}
    assert "PyInit__core" in names
    # Templates of the C++ library come out weak; nothing of ours may.
    assert [name for name in names if "otk" in name] == []


def test_only_the_python_layer_sees_python(native_sources: dict[str, str]) -> None:
    sees = {name for name, text in native_sources.items() if re.search(INCLUDES_PYTHON, text)}
    assert sees
    assert {name for name in sees if not name.startswith("python/")} == set()
    assert [name for name, text in native_sources.items() if re.search(r"#\s*include\s*<Python\.h>", text)] == [
        "python/python.h"
    ]


@pytest.mark.parametrize(("folder", "may_include"), [("hash", "hash"), ("tensor", "tensor"), ("cuda", "cuda|hash")])
def test_the_layers_look_one_way(native_sources: dict[str, str], folder: str, may_include: str) -> None:
    layer = {name: text for name, text in native_sources.items() if name.startswith(f"{folder}/")}
    assert layer
    for name, text in layer.items():
        included = re.findall(r'#\s*include\s*"\.\./(\w+)/', text)
        assert [other for other in included if not re.fullmatch(may_include, other)] == [], name
        assert not re.search(r"\bPyObject\b", text), name


def test_one_file_names_the_capsule(native_sources: dict[str, str]) -> None:
    named = [name for name, text in native_sources.items() if '"dlpack_exchange_api"' in text]
    assert named == ["tensor/dlpack_abi.h"]


def test_cpp_imports_no_module_of_this_package(native_sources: dict[str, str]) -> None:
    imports = re.compile(r"PyImport_Import\w*\(")
    assert [name for name, text in native_sources.items() if imports.search(text)] == []


def test_the_three_settings_of_the_stable_abi_agree(root: Path) -> None:
    setup = (root / "setup.py").read_text()
    assert "LIMITED_API = 0x030A0000" in setup
    assert "py_limited_api=True" in setup
    assert '"py_limited_api": "cp310"' in setup
    assert 'requires-python = ">=3.10"' in (root / "pyproject.toml").read_text()


def test_no_file_includes_torch(native_sources: dict[str, str]) -> None:
    includes = re.compile(r'#\s*include\s*[<"](torch|ATen|c10|pybind11|dlpack)/')
    assert [name for name, text in native_sources.items() if includes.search(text)] == []


def test_setup_does_not_import_torch(root: Path) -> None:
    assert not re.search(r"^\s*(import|from) torch", (root / "setup.py").read_text(), re.MULTILINE)


IMPORT = """
import sys
import omni_tensor_key, omni_tensor_key.plugin, torch
heavy = {"vllm", "vllm_omni", "transformers", "diffusers", "xxhash", "click"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}), torch.cuda.is_initialized())
"""


def test_importing_the_package_imports_nothing_heavy(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    result = run_python(IMPORT)
    assert result.stdout.strip() == "[] False", result.stderr[-2000:]


@pytest.fixture(scope="module")
def archive(root: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The paths inside the source archive, made from a copy of what it is made of."""
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip(f"pyproject.toml needs setuptools 77 or newer, here is {version('setuptools')}")
    folder = tmp_path_factory.mktemp("sdist")
    for name in ("csrc", "omni_tensor_key"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in root.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    code = "from setuptools import build_meta; print('made', build_meta.build_sdist('.'))"
    made = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    with tarfile.open(folder / made.stdout.split()[-1]) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


def test_the_source_archive_has_every_source(root: Path, archive: set[str]) -> None:
    sources = {
        str(path.relative_to(root))
        for folder in ("csrc", "omni_tensor_key")
        for path in (root / folder).rglob("*")
        if path.is_file() and path.suffix in (*NATIVE_SUFFIXES, ".py", ".pyi", ".typed", ".txt")
    }
    sources |= {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "omni_tensor_key/py.typed"}
    assert sources - archive == set()


def test_the_source_archive_has_nothing_that_was_built(archive: set[str]) -> None:
    assert [name for name in archive if name.endswith((".so", ".o", ".pyc"))] == []
