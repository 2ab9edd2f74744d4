"""`omni-tensor-key doctor` in a healthy environment and in broken ones, each a real process."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .planted import copy_of_this_package, metadata, replaced, run_command, vllm_omni_with

ENABLED = {"OMNI_DIFFUSION_PROMPT_EMBED_CACHE": "1"}
# What the closed pull request #5195 adds to _hashable.
KEYS_TENSORS = """
    if type(obj).__name__ == "Tensor" and str(obj.dtype) in ("torch.int64", "torch.bool"):
        content = obj.cpu().numpy().tobytes()
        return ("__torch_tensor__", str(obj.dtype), tuple(obj.shape), str(obj.device), content)
"""


def nothing(place: Path) -> None:
    """Plant no fault."""


def remove_extension(place: Path) -> None:
    package, _ = copy_of_this_package(place)
    for binary in package.glob("_core*.so"):
        binary.unlink()


def break_extension(place: Path) -> None:
    package, _ = copy_of_this_package(place)
    for binary in package.glob("_core*.so"):
        binary.write_bytes(binary.read_bytes()[:4096])


def remove_entry_point(place: Path) -> None:
    _, dist_info = copy_of_this_package(place)
    (dist_info / "entry_points.txt").unlink()


def add_entry_point(place: Path) -> None:
    text = "[vllm_omni.general_plugins]\nomni_tensor_key = another_key.plugin:register\n"
    metadata(place, "another_key", "1.0", **{"entry_points.txt": text})


def break_entry_points(place: Path) -> None:
    metadata(place, "broken", "1.0", **{"entry_points.txt": "[vllm_omni.general_plugins]\nno equals sign\n"})


def install_0_20(place: Path) -> None:
    vllm_omni_with(place, cache_module=None)
    metadata(place, "vllm_omni", "0.20.0")


def change_hashable(place: Path) -> None:
    vllm_omni_with(
        place,
        replaced(
            "→ not safe.\n    return _NOT_HASHABLE",
            "\n    return _NOT_HASHABLE if isinstance(obj, torch.Tensor) else repr(obj)",
        ),
    )


def key_tensors_upstream(place: Path) -> None:
    def edit(text: str) -> str:
        start = text.index("def _hashable(obj: Any) -> Any:")
        body = text.index('    """', text.index('"""', start) + 3) + len('    """\n')
        return text[:body] + KEYS_TENSORS + text[body:]

    vllm_omni_with(place, edit)


def old_torch(place: Path) -> None:
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").touch()
    (place / "torch" / "version.py").write_text("cuda = None\n")
    metadata(place, "torch", "2.9.1")


def talkative_python(place: Path) -> None:
    """Every Python process prints at its start and at its end."""
    (place / "sitecustomize.py").write_text('import atexit\nprint("{}")\natexit.register(print, "[1, 2]")\n')


def no_temporary_folder(place: Path) -> None:
    (place / "sitecustomize.py").write_text("import tempfile\ntempfile._candidate_tempdir_list = list\n")


@dataclass(frozen=True)
class Case:
    """An environment, and what doctor must say about it."""

    plant: Callable[[Path], object] = nothing
    variables: dict[str, str] = field(default_factory=dict)  # beside the one that enables the cache
    finding: str | None = None  # its name
    seen: str = ""
    advice: str = ""
    state: str = "problem"


def variable(name: str, value: str, seen: str, advice: str, state: str = "problem") -> Case:
    return Case(nothing, {name: value}, name, seen, advice, state)


CASES = {
    "healthy": Case(),
    "upstream keys tensors as #5195": Case(key_tensors_upstream),
    "Python prints": Case(talkative_python),
    "cache not enabled": variable("OMNI_DIFFUSION_PROMPT_EMBED_CACHE", "0", "does not enable", "_CACHE=1"),
    "_hashable changed": Case(change_hashable, {}, "contract", "_hashable keys an unknown object", "compatib"),
    "VLLM_PLUGINS": variable("VLLM_PLUGINS", "other", "does not name", "other,omni_tensor_key"),
    "VLLM_PLUGINS empty": variable("VLLM_PLUGINS", "", "''", "VLLM_PLUGINS=omni_tensor_key,"),
    "switched off": variable("OMNI_TENSOR_KEY", "false", "'false': this package is switched off", "Unset"),
    "limit below a token": variable("OMNI_TENSOR_KEY_MAX_BYTES", "7", "up to 0 tokens", "larger"),
    "cache of a few bytes": variable("OMNI_TENSOR_KEY_CACHE_BYTES", "8", "at most 8 bytes", "larger"),
    "vllm-omni 0.20": Case(install_0_20, {}, "cache module", "0.20.0 has no prompt-embedding", "0.22 or newer"),
    "extension removed": Case(remove_extension, {}, "extension", "cannot be loaded", "--force-reinstall"),
    "extension broken": Case(break_extension, {}, "extension", "cannot be loaded", "--force-reinstall"),
    "entry point missing": Case(remove_entry_point, {}, "entry point", "has no omni_tensor_key", "with pip"),
    "entry point twice": Case(add_entry_point, {}, "entry point", "another_key.plugin:register", "not meant"),
    "a probe that raises": Case(break_entry_points, {}, "entry point", "could not be examined", "Report"),
    "old torch": Case(old_torch, {}, "torch", "2.9.1", "2.10 or newer"),
    "no temporary folder": Case(no_temporary_folder, {}, "temporary folder", "No usable temporary", "TMPDIR"),
    "refused values": Case(
        nothing,
        {
            "OMNI_TENSOR_KEY": "perhaps",
            "OMNI_TENSOR_KEY_CACHE_BYTES": "1 MiB",
            "OMNI_TENSOR_KEY_DEBUG": "1",
            "OMNI_TENSOR_KEY_MAX_BYTES": "1e6",
            "OMNI_TENSOR_KEY_VERIFY": "2",
            "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE": "many",
        },
        "OMNI_TENSOR_KEY_MAX_BYTES",
        "'1e6' is not a number of bytes; the default is used: 1048576",
        "unset it",
        "note",
    ),
    "good values": Case(
        nothing,
        {
            "OMNI_TENSOR_KEY": "1",
            "OMNI_TENSOR_KEY_CACHE_BYTES": "1000000",
            "OMNI_TENSOR_KEY_MAX_BYTES": "4096",
            "OMNI_TENSOR_KEY_VERIFY": "1",
            "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE": "64",
            "VLLM_PLUGINS": "other,omni_tensor_key",
        },
        "OMNI_TENSOR_KEY_MAX_BYTES",
        "'4096': int64 token IDs of up to 512 tokens are keyed, longer ones bypass",
        state="ok",
    ),
}

Report = dict[str, Any]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Report]]]:
    """doctor's report in each environment; two run at a time, since most of it is waiting for imports."""

    def examine(name: str) -> Report:
        case, place = CASES[name], tmp_path_factory.mktemp("planted")
        case.plant(place)
        command = [sys.executable, "-m", "omni_tensor_key", "doctor", "--json"]
        done = run_command(command, tmp_path_factory.mktemp("cwd"), place, **(ENABLED | case.variables))
        text = done.stdout[done.stdout.index('{\n  "healthy"') : done.stdout.rindex("\n}") + 2]
        return {**json.loads(text), "code": done.returncode}

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(examine, name) for name in CASES}


def find(report: Report, name: str) -> dict[str, str]:
    return next(item for item in report["findings"] if item["name"] == name)


@pytest.mark.parametrize("name", CASES)
def test_doctor(reports: dict[str, Future[Report]], name: str) -> None:
    report, case = reports[name].result(), CASES[name]
    problems = {item["name"] for item in report["findings"] if item["state"] == "problem"}
    expected = {case.finding} if case.finding and case.state == "problem" else set()
    # A problem that the self-check sees too is there twice, and nothing else is.
    assert expected <= problems <= expected | ({"self-check"} if expected else set())
    assert report["healthy"] == (not expected)
    assert report["code"] == (1 if expected else 0)
    if case.finding:
        found = find(report, case.finding)
        assert found["state"] == case.state
        assert case.seen in found["seen"]
        assert case.advice in found["advice"]
    for item in report["findings"]:
        assert item["seen"]
        assert item["advice"] or item["state"] != "problem"


@pytest.mark.parametrize(("name", "state"), [("refused values", "note"), ("good values", "ok")])
def test_each_variable_that_is_set_has_a_line(reports: dict[str, Future[Report]], name: str, state: str) -> None:
    report = reports[name].result()
    for variable, value in CASES[name].variables.items():
        found = find(report, variable)
        assert found["state"] == state
        assert repr(value) in found["seen"]


def test_the_self_check_runs_where_it_can_succeed(reports: dict[str, Future[Report]]) -> None:
    for name in ("healthy", "good values", "cache not enabled"):
        assert find(reports[name].result(), "self-check")["state"] == "ok"
    for name in ("extension removed", "VLLM_PLUGINS", "vllm-omni 0.20", "no temporary folder"):
        assert find(reports[name].result(), "self-check")["state"] == "note"


def test_pipelines_for_which_the_cache_is_wrong(reports: dict[str, Future[Report]]) -> None:
    """Those of vllm-omni 0.30 in the table of docs/lifecycle.md."""
    found = [item["seen"] for item in reports["healthy"].result()["findings"] if item["name"] == "pipeline"]
    named = {line.partition(":")[0].removeprefix("vllm_omni's ") for line in found if line.startswith("vllm_omni")}
    ming = {"MingImagePipeline", "MingImageDiffusionPipeline"}
    assert named == ming | {"MiniMaxH3Pipeline", "ErnieImagePipeline", "HeliosPipeline"}


def test_text_for_a_narrow_terminal_without_unicode(tmp_path: Path) -> None:
    """Lines are whole, and what the encoding cannot carry is escaped."""
    place = tmp_path / "plätze"
    place.mkdir()
    copy_of_this_package(place)
    command = [sys.executable, "-m", "omni_tensor_key", "doctor"]
    variables = {"VLLM_PLUGINS": "ö" * 60 + ",other", "COLUMNS": "80", "PYTHONIOENCODING": "ascii"}
    done = run_command(command, tmp_path, place, **variables)
    assert done.returncode == 1, done.stderr
    assert done.stdout.isascii()
    escaped = "\\xf6" * 60
    assert f"problem  VLLM_PLUGINS: '{escaped},other' does not name omni_tensor_key" in done.stdout
    assert f"-> Set VLLM_PLUGINS={escaped},other,omni_tensor_key, or unset it." in done.stdout


def test_the_source_folder_is_no_installation(tmp_path: Path) -> None:
    remove_extension(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    done = run_command([sys.executable, "-m", "omni_tensor_key", "doctor"], tmp_path)
    assert done.returncode == 1
    assert "is the source folder: leave that directory, or run `pip install -e .` in it" in done.stdout


VERSIONS = "from omni_tensor_key.tools import doctor; print(*doctor._versions(), sep='\\n')"


def test_nothing_is_installed(tmp_path: Path) -> None:
    """A folder on PYTHONPATH, in an interpreter that has neither torch nor vLLM-Omni nor metadata of this package."""
    _, dist_info = copy_of_this_package(tmp_path)
    shutil.rmtree(dist_info)
    done = run_command([sys.executable, "-S", "-c", VERSIONS], tmp_path, tmp_path)
    assert done.stdout.count("'not installed'") == 3, done.stderr
    assert "unknown version in" in done.stdout
