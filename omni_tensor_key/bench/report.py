"""The report as tables for people and as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from .. import backend
from ..settings import settings
from .calls import EXPLANATIONS
from .tables import Table
from .targets import Target
from .timing import Effort

SCHEMA = 1
_SCALES = {"ns": 1.0, "µs": 1e3, "ms": 1e6}  # a Sample of time is in nanoseconds
_PACKAGES = ("omni-tensor-key", "vllm-omni", "torch", "numpy", "xxhash", "blake3")

LIMITS = (
    "One process on one core, torch on one thread, the garbage collector off: no contention, no collections. The "
    "plugin's import alone is timed in processes of its own.",
    "The same few tensors over and over, so the content comes from the CPU's caches; a rollout's comes from memory.",
    "CPU tensors only, contiguous, int64. The encoder costs nothing: whole calls show what the cache itself costs.",
    "The plain patches take only tensors that are on the CPU and contiguous; a patch for real callers costs more.",
    "Figures of other processes on the machine are in here. The least of the repeats is the one to compare.",
)


@dataclass(frozen=True)
class Report:
    """All that one run measured."""

    effort: Effort
    pinning: str
    load: tuple[str, str]
    tables: list[Table]
    targets: list[Target]
    readings: list[str]
    missing: list[str]

    @property
    def environment(self) -> dict[str, str]:
        """Versions, processor and what can make figures noisy."""
        found = {"Python": f"{platform.python_implementation()} {platform.python_version()}"}
        found |= {name: _version(name) for name in _PACKAGES}
        found["backend"] = backend.DESCRIPTION
        found["settings"] = ", ".join(f"{name} {value}" for name, value in settings()._asdict().items())
        found["CPU"] = f"{_cpu_model()}, {os.cpu_count()} cores visible"
        found["governor"] = _governor()
        found["system"] = platform.platform()
        found["core"] = self.pinning
        found["load"] = f"{self.load[0]} before, {self.load[1]} after (one minute; this run alone makes 1)"
        found["repeats"] = f"{self.effort.repeats} of about {self.effort.seconds * 1e3:g} ms, contenders in turn"
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values; times are in nanoseconds."""
        return {
            "schema": SCHEMA,
            "environment": self.environment,
            "limits": list(LIMITS),
            "not_measured": self.missing,
            "tables": {table.name: _table_as_json(table) for table in self.tables},
            "targets": [{**asdict(target), "holds": target.holds} for target in self.targets],
            "readings": self.readings,
        }

    def write_json(self, path: Path) -> None:
        """Write the report to *path*."""
        path.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        """Print limits, environment, tables, targets and what to read off them, in this order."""
        _print_list(console, "Limits", LIMITS)
        _print_list(console, "Environment", [f"{name}: {value}" for name, value in self.environment.items()])
        _print_list(console, "Contenders", [f"{name}: {what}" for name, what in EXPLANATIONS.items()])
        for table in self.tables:
            kind = "" if table.unit == "bytes" else ", least (median)"
            console.print(f"{table.title}: {table.unit}{kind}", style="bold", highlight=False)
            console.print(_as_rich(table))
            for note in table.notes:
                console.print(f"  {note}", highlight=False, style="dim")
            console.print()
        for name in self.missing:
            console.print(f"Not measured, because its package is missing: {name}.", highlight=False)
        _print_list(console, "To read off", self.readings)
        console.print("Targets, from the least times of this run", style="bold")
        console.print(_targets_as_rich(self.targets))


def _table_as_json(table: Table) -> dict[str, Any]:
    stored = "ns" if table.unit in _SCALES else table.unit
    rows = {name: [sample and asdict(sample) for sample in cells] for name, cells in table.rows.items()}
    return {"title": table.title, "unit": stored, "columns": table.columns, "rows": rows, "notes": table.notes}


def _print_list(console: Console, heading: str, lines: Any) -> None:
    console.print(heading, style="bold")
    for line in lines:
        console.print(f"  {line}", highlight=False, markup=False)
    console.print()


def _as_rich(table: Table) -> RichTable:
    rich = RichTable()
    rich.add_column(table.heading)
    for column in table.columns:
        rich.add_column(column, justify="right")
    scale = _SCALES.get(table.unit, 1.0)
    for name, cells in table.rows.items():
        texts = ["-"] * len(cells)
        for i, sample in enumerate(cells):
            if sample is not None:
                texts[i] = _number(sample.least / scale)
                texts[i] += "" if table.unit == "bytes" else f" ({_number(sample.median / scale)})"
        rich.add_row(name, *texts)
    return rich


def _targets_as_rich(targets: list[Target]) -> RichTable:
    rich = RichTable()
    rich.add_column("figure")
    rich.add_column("target", justify="right")
    rich.add_column("measured", justify="right")
    rich.add_column("holds")
    words = {True: "[green]yes[/]", False: "[red]no[/]", None: "not measured"}
    for target in targets:
        unit = "" if target.unit == "times" else f" {target.unit}"
        bound = f"{'≥' if target.at_least else '≤'} {target.bound:g}{unit}"
        measured = "-" if target.measured is None else f"{_number(target.measured)}{unit}"
        rich.add_row(target.name, bound, measured, words[target.holds])
    return rich


def _number(value: float) -> str:
    """Write three digits, or all before the point: 0.04, 1.94, 19.4, 16,384."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _governor() -> str:
    path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "not told by this system (a virtual machine?): expect the frequency to vary"
