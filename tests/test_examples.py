"""The examples, run as a user runs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPLICAS, PROMPTS, N = 2, 3, 16


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_rollout(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(root / "examples" / "ray_rollout.py")]
    command += ["--replicas", str(REPLICAS), "--prompts", str(PROMPTS), "--n", str(N)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMNI_", "RAY_"))}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    half = N * PROMPTS // REPLICAS
    # samples, hits, misses, bypassed
    assert [row[2:6] for row in rows if row[0] == "least-loaded"] == [
        [str(half), str(half - PROMPTS), str(PROMPTS), "0"] for _ in range(REPLICAS)
    ]
    sticky = [list(map(int, row[2:6])) for row in rows if row[0] == "by uid"]
    assert [sum(column) for column in zip(*sticky, strict=True)] == [N * PROMPTS, (N - 1) * PROMPTS, PROMPTS, 0]
    assert all(hits == (N - 1) * misses and samples == N * misses for samples, hits, misses, _ in sticky)
    assert sorted(misses for _, _, misses, _ in sticky) == [1, 2]
