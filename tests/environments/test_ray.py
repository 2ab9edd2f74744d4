"""The Ray example on a real local Ray: each replica has its own cache, and affinity encodes each prompt once."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from .planted import run_command

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_rollout.py"
ROW = re.compile(r"│ (least loaded|affinity) +│ (\d+) +│ (\d+) +│ (\d+) +│ (\d+) +│ (\d+) +│ [\d.]+ +│")


def test_two_replicas(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--prompts", "3"]
    # Ray writes a token to the home directory.
    done = run_command(command, tmp_path, HOME=str(tmp_path), COLUMNS="120", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    sums = {routing: Counter[str]() for routing in ("least loaded", "affinity")}
    replicas = []
    for routing, replica, *counts in ROW.findall(done.stdout):
        replicas.append((routing, replica))
        sums[routing].update(dict(zip(("samples", "hits", "misses", "bypassed"), map(int, counts), strict=True)))
    assert replicas == [(routing, replica) for routing in sums for replica in "01"]
    # Dealt out in turn, every prompt reaches both replicas and is encoded by each.
    assert sums["least loaded"] == Counter(samples=48, hits=42, misses=6, bypassed=0)
    assert sums["affinity"] == Counter(samples=48, hits=45, misses=3, bypassed=0)
