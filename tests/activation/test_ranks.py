"""Ranks that see the same calls decide the same: if one had a hit where another encodes, a collective would hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANK, SEED, RANKS = Path(__file__).with_name("rank.py"), "rank test 1", 4


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four processes say that have driven the same calls."""
    folder = tmp_path_factory.mktemp("ranks")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMNI_")}
    inherited["OMNI_TENSOR_KEY_VERIFY"] = "0.25"
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), SEED, str(number)],
            cwd=folder,
            env=inherited | {"PYTHONHASHSEED": str(number)},
            stdout=subprocess.PIPE,
            stderr=Path(folder, f"errors-{number}").open("w"),  # noqa: SIM115 - the process has it
            text=True,
        )
        for number in range(RANKS)
    ]
    found = []
    for number, process in enumerate(processes):
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, Path(folder, f"errors-{number}").read_text()
        (line,) = (line for line in output.splitlines() if line.startswith("REPORT "))
        found.append(dict(json.loads(line.removeprefix("REPORT "))))
    return found


def test_the_calls_are_of_every_kind(reports: list[dict[str, Any]]) -> None:
    counted = reports[0]["counted"]
    assert sum(counted.values()) == 2000
    for decision in ("hits", "misses", "eviction", "bypassed", "verified"):
        assert counted[decision] >= 10, counted
    reasons = {reason for reasons in reports[0]["bypassed"]["Pipeline"].values() for reason in reasons}
    assert reasons >= {"dtype", "size", "unexportable", "type", "precomputed", "binding"}


def test_all_ranks_decide_and_count_the_same(reports: list[dict[str, Any]]) -> None:
    assert len({report["hash of a string"] for report in reports}) == RANKS  # they differ in what must not matter
    for report in reports[1:]:
        assert report["decisions"] == reports[0]["decisions"]
        assert report["bypassed"] == reports[0]["bypassed"]


def test_all_ranks_make_the_same_digests(reports: list[dict[str, Any]]) -> None:
    assert len(reports[0]["digests"]) > 500
    for report in reports[1:]:
        assert report["digests"] == reports[0]["digests"]
