from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
EXAMPLE = TESTS.parent / "examples" / "engine"
PROMPTS = ["a red cat on a blue chair", "rain"]
N = 4
SAMPLES = len(PROMPTS) * N
ROLLOUT = ["rollout", PROMPTS, N]
OFF = [SAMPLES, 0, 0, SAMPLES]  # encoder runs, hits, misses, bypassed
ON = [len(PROMPTS), SAMPLES - len(PROMPTS), len(PROMPTS), 0]

Scenario = dict[str, Any]
Drive = Callable[..., dict[str, list[Any]]]


def scenario(on: bool, *events: list[Any], env: dict[str, str] | None = None, **engine: Any) -> Scenario:
    """What drive.py runs: an engine with the extension off or on, and what happens in it."""
    return {"on": on, "events": [list(event) for event in events], "env": env or {}, "engine": engine}


def pair(name: str, *events: list[Any], **options: Any) -> dict[str, Scenario]:
    """The same scenario with the extension off and on."""
    return {f"{name} {state}": scenario(state == "on", *events, **options) for state in ("off", "on")}


def run_script(path: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, without what this one has set for the package and vLLM-Omni."""
    prefixes = ("OMNI_", "VLLM_", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    command = [sys.executable, str(path), *args]
    return subprocess.run(command, env=inherited | variables, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen-Image with random weights."""
    folder = tmp_path_factory.mktemp("model")
    made = run_script(EXAMPLE / "make_model.py", str(folder))
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="session")
def drive(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """Run named scenarios in one process; return for each what its events gave."""

    def run(scenarios: dict[str, Scenario], **variables: str) -> dict[str, list[Any]]:
        out = tmp_path_factory.mktemp("drive") / "results.json"
        done = run_script(TESTS / "engine" / "drive.py", str(model), json.dumps(scenarios), str(out), **variables)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        results: dict[str, list[Any]] = json.loads(out.read_text())
        return results

    return run
