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
KEYS_TENSORS = """
    if type(obj).__name__ == "Tensor" and not obj.is_floating_point():
        return ("__torch_tensor__", str(obj.dtype), tuple(obj.shape), str(obj.device), obj.numpy().tobytes())
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


def remove_metadata(place: Path) -> None:
    _, dist_info = copy_of_this_package(place)
    shutil.rmtree(dist_info)


def add_entry_point(place: Path) -> None:
    text = "[vllm_omni.general_plugins]\nomni_tensor_key = another_key.plugin:register\n"
    metadata(place, "another_key", "1.0", **{"entry_points.txt": text})


def break_entry_points(place: Path) -> None:
    metadata(place, "broken", "1.0", **{"entry_points.txt": "[vllm_omni.general_plugins]\nno equals sign\n"})


def install_0_20(place: Path) -> None:
    vllm_omni_with(place, cache_module=None)
    metadata(place, "vllm_omni", "0.20.0")


def change_hashable(place: Path) -> None:
    vllm_omni_with(place, replaced('return ("__seq__", ', 'return ("__list__", '))


def key_tensors_upstream(place: Path) -> None:
    head = "def _hashable(obj: Any) -> Any:"

    def edit(text: str) -> str:
        start = text.index(head)
        body = text.index('    """', text.index('"""', start) + 3) + len('    """\n')
        return text[:body] + KEYS_TENSORS + text[body:]

    vllm_omni_with(place, edit)


def old_torch(place: Path) -> None:
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").touch()
    (place / "torch" / "version.py").write_text("cuda = None\n")
    metadata(place, "torch", "2.9.1")


@dataclass(frozen=True)
class Case:
    """An environment, and what doctor must say about it."""

    plant: Callable[[Path], None] = nothing
    variables: dict[str, str] = field(default_factory=lambda: ENABLED)
    problem: str | None = None  # the finding
    seen: str = ""
    advice: str = ""


CASES = {
    "healthy": Case(),
    "upstream keys tensors": Case(key_tensors_upstream),
    "cache not enabled": Case(nothing, {}, "cache switch", "off by default", "OMNI_DIFFUSION_PROMPT_EMBED_CACHE=1"),
    "_hashable changed": Case(change_hashable, ENABLED, "contract", "_hashable makes ('__list__'", "compatib"),
    "VLLM_PLUGINS": Case(
        nothing, ENABLED | {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS", "does not name", "other,omni_tensor_key"
    ),
    "VLLM_PLUGINS empty": Case(
        nothing, ENABLED | {"VLLM_PLUGINS": ""}, "VLLM_PLUGINS", "''", "VLLM_PLUGINS=omni_tensor_key,"
    ),
    "switched off": Case(nothing, ENABLED | {"OMNI_TENSOR_KEY": "0"}, "OMNI_TENSOR_KEY", "switched off", "Unset"),
    "vllm-omni 0.20": Case(install_0_20, ENABLED, "cache module", "0.20.0 has no prompt-embedding", "0.22 or newer"),
    "extension removed": Case(remove_extension, ENABLED, "extension", "cannot be loaded", "--force-reinstall"),
    "extension broken": Case(break_extension, ENABLED, "extension", "cannot be loaded", "--force-reinstall"),
    "entry point missing": Case(remove_entry_point, ENABLED, "entry point", "has no omni_tensor_key", "with pip"),
    "entry point twice": Case(add_entry_point, ENABLED, "entry point", "another_key.plugin:register", "not meant"),
    "a probe that raises": Case(break_entry_points, ENABLED, "switches", "could not be examined", "Report"),
    "old torch": Case(old_torch, ENABLED, "torch", "2.9.1", "2.10 or newer"),
}


Report = tuple[int, dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Report]]]:
    """doctor's exit code and report in each environment; two run at a time, since most of it is waiting for imports."""

    def examine(name: str) -> Report:
        case, place = CASES[name], tmp_path_factory.mktemp("planted")
        case.plant(place)
        command = [sys.executable, "-m", "omni_tensor_key", "doctor", "--json"]
        done = run_command(command, tmp_path_factory.mktemp("cwd"), place, **case.variables)
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(examine, name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_doctor(reports: dict[str, Future[Report]], name: str) -> None:
    code, report = reports[name].result()
    case = CASES[name]
    problems = {item["name"]: item for item in report["findings"] if item["state"] == "problem"}
    assert report["healthy"] == (case.problem is None)
    assert code == (0 if report["healthy"] else 1)
    if case.problem is None:
        assert problems == {}
        return
    # A problem that the self-check sees too is there twice, and nothing else is.
    assert case.problem in problems
    assert set(problems) <= {case.problem, "self-check"}
    found = problems[case.problem]
    assert case.seen in found["seen"]
    assert case.advice in found["advice"]


def test_every_problem_has_advice(reports: dict[str, Future[Report]]) -> None:
    for future in reports.values():
        for finding in future.result()[1]["findings"]:
            assert set(finding) == {"name", "state", "seen", "advice"}
            assert all(isinstance(value, str) for value in finding.values())
            assert finding["state"] in ("ok", "note", "problem")
            assert finding["seen"]
            assert finding["advice"] or finding["state"] != "problem"


def find(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in report["findings"] if item["name"] == name)


def test_the_self_check_tells_a_release_that_keys_tensors(reports: dict[str, Future[Report]]) -> None:
    _, report = reports["upstream keys tensors"].result()
    assert find(report, "contract")["state"] == "note"
    assert "this release keys tensors itself" in find(report, "contract")["seen"]


def test_pipelines_that_hide_their_prompt(reports: dict[str, Future[Report]]) -> None:
    """In vllm-omni 0.30: those that tests/conformance/test_hidden_state.py and docs/verl_omni.md are about."""
    finding = find(reports["healthy"].result()[1], "pipelines")
    assert finding["state"] == "note"
    names = finding["seen"].split(":")[0]
    assert names == "MingImagePipeline, MingImageDiffusionPipeline, MiniMaxH3Pipeline"


def test_a_pipeline_of_verl_omni_that_hides_its_prompt(tmp_path: Path) -> None:
    package = tmp_path / "verl_omni"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "broken.py").write_text("def encode_prompt(:")
    (package / "folder.py").mkdir()
    (package / "link.py").symlink_to("nowhere")
    (package / "deep.py").write_text("def encode_prompt(): " + "-" * 20_000 + "1")
    (package / "circle.py").write_text("class A(B):\n    def encode_prompt(self): ...\nclass B(A): ...\n")
    (package / "odd.py").write_text("class Odd:\n    def encode_prompt(self, prompt, *a): getattr(*a), getattr(self)\n")
    (package / "adapter.py").write_text(
        "class Hiding:\n"
        "    def forward(self, request):\n"
        "        self._ids = request.ids\n"
        "        return self.encode_prompt('')\n"
        "    def encode_prompt(self, prompt):\n"
        "        return self.text_encoder(self._ids)\n"
        "class Open:\n"
        "    def encode_prompt(self, prompt_ids):\n"
        "        return self.text_encoder(prompt_ids)\n"
    )
    code = "from omni_tensor_key import doctor; print(*doctor._pipelines(), sep='\\n')"
    done = run_command([sys.executable, "-c", code], tmp_path, tmp_path)
    assert "Hiding: calls for different prompts" in done.stdout, done.stderr
    assert "Open" not in done.stdout


def test_the_self_check_is_left_out_where_it_can_only_fail(reports: dict[str, Future[Report]]) -> None:
    for name in ("extension removed", "VLLM_PLUGINS", "vllm-omni 0.20"):
        assert find(reports[name].result()[1], "self-check")["state"] == "note"
    assert find(reports["cache not enabled"].result()[1], "self-check")["state"] == "ok"


def test_the_text_says_the_same(tmp_path: Path) -> None:
    done = run_command(["omni-tensor-key", "doctor"], tmp_path, VLLM_PLUGINS="other")
    assert done.returncode == 1
    assert "problem  VLLM_PLUGINS: 'other' does not name omni_tensor_key" in done.stdout
    assert "→ Set VLLM_PLUGINS=other,omni_tensor_key" in done.stdout


def test_a_checkout_is_no_installation(tmp_path: Path) -> None:
    remove_extension(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    done = run_command([sys.executable, "-m", "omni_tensor_key", "doctor"], tmp_path)
    assert done.returncode == 1
    assert "is a checkout's source, which has no compiled file" in done.stdout


VERSIONS = "from omni_tensor_key import doctor; print(*doctor._versions(), sep='\\n')"


def test_nothing_is_installed(tmp_path: Path) -> None:
    """A folder on PYTHONPATH, in an interpreter that has neither torch nor vLLM-Omni nor metadata of this package."""
    remove_metadata(tmp_path)
    done = run_command([sys.executable, "-S", "-c", VERSIONS], tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'not installed'") == 3
    assert "unknown version in" in done.stdout


GPU = "from omni_tensor_key import doctor; print(*doctor._torch_device(), sep='\\n')"


@pytest.mark.parametrize(
    ("answer", "state", "seen"),
    [
        (None, "note", "finds no GPU"),
        ("exit 9", "note", "finds no GPU"),
        ("echo '580.65.06, NVIDIA H200, 9.0'", "ok", "CUDA 13.0; driver 580.65.06, NVIDIA H200, 9.0"),
    ],
)
def test_the_gpu_of_a_torch_with_cuda(tmp_path: Path, answer: str | None, state: str, seen: str) -> None:
    """Here is no GPU to ask: a script answers as NVIDIA's does, or none is there."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("cuda = '13.0'\n")
    if answer is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    done = run_command([sys.executable, "-c", GPU], tmp_path, tmp_path, PATH=f"{tmp_path}:/bin")
    assert f"name='GPU', state='{state}'" in done.stdout, done.stderr
    assert seen in done.stdout


def test_the_gpu_of_this_torch(tmp_path: Path) -> None:
    import torch

    done = run_command([sys.executable, "-c", GPU], tmp_path)
    if torch.version.cuda is None:
        assert "this torch is built for" in done.stdout
    else:
        assert f"torch is built for CUDA {torch.version.cuda}" in done.stdout


def test_two_copies(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    copy_of_this_package(tmp_path / "second")
    code = "from omni_tensor_key import doctor; print(*doctor._copies(), sep='\\n')"
    done = run_command([sys.executable, "-c", code], tmp_path, tmp_path / "second")
    assert "is installed 2 times" in done.stdout, done.stderr
    assert run_command([sys.executable, "-c", code], tmp_path).stdout.strip() == ""
