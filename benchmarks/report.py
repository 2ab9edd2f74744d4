"""The report: Markdown tables for people, and JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from contenders import EXPLANATIONS
from tables import Table
from targets import Target
from timing import Effort

from omni_tensor_key.settings import settings

_SCALES = {"ns": 1.0, "µs": 1e3, "bytes": 1.0}  # a Sample of time is in nanoseconds
_PACKAGES = ("omni-tensor-key", "vllm-omni", "torch", "numpy", "xxhash", "blake3")

LIMITS = (
    "One process on one core, torch on one thread, the garbage collector off: no contention, no collections.",
    "The same few tensors over and over: their content comes from the CPU's caches, that of a rollout from memory.",
    "Contiguous int64 tensors on the CPU. The encoder costs nothing: a whole call shows what the cache itself costs.",
    "The plain patches take only contiguous CPU tensors; a patch for real callers costs more.",
    "Other processes on the machine disturb the figures. Compare the least of the repeats, and ratios within a table.",
)


@dataclass(frozen=True)
class Report:
    """All that one run measured."""

    effort: Effort
    pinning: str
    load: tuple[float, float]  # before and after, averages of one minute
    tables: list[Table]
    targets: list[Target]

    def environment(self) -> dict[str, str]:
        """Return versions, the processor and what can make figures noisy."""
        found = {"Python": f"{platform.python_implementation()} {platform.python_version()}"}
        found |= {name: _version(name) for name in _PACKAGES}
        found["settings"] = ", ".join(f"{name} {value}" for name, value in settings()._asdict().items())
        found["CPU"] = f"{_cpu_model()}, {os.cpu_count()} cores"
        found["system"] = platform.platform()
        found["core"] = self.pinning
        found["load"] = f"{self.load[0]:.2f} before, {self.load[1]:.2f} after; this run alone makes 1"
        found["repeats"] = f"{self.effort.repeats} of about {self.effort.seconds * 1e3:g} ms, contenders in turn"
        return found

    def write_json(self, path: Path) -> None:
        """Write the report to a file; times are in nanoseconds."""
        report = {
            "environment": self.environment(),
            "limits": LIMITS,
            "tables": {table.name: _as_json(table) for table in self.tables},
            "targets": [{**asdict(target), "holds": target.holds} for target in self.targets],
        }
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def lines(self) -> Iterator[str]:
        """Return limits, environment, contenders, tables and targets, as Markdown."""
        yield from ("## Limits", "", *(f"- {line}" for line in LIMITS))
        yield from ("", "## Environment", "", *(f"- {name}: {value}" for name, value in self.environment().items()))
        yield from ("", "## Contenders", "", *(f"- {name}: {what}" for name, what in EXPLANATIONS.items()), "")
        for table in self.tables:
            kind = "" if table.unit == "bytes" else "; least (median)"
            yield from (f"## {table.title}", "", f"{table.unit}{kind}", "")
            rows = [[name, *(_cell(sample, table.unit) for sample in cells)] for name, cells in table.rows.items()]
            yield from _markdown([table.heading, *table.columns], rows)
            yield from ("", *(f"{note}\n" for note in table.notes))
        yield from ("## Targets", "", "From the least times of this run.", "")
        rows = [
            [
                target.name,
                f"{'≥' if target.at_least else '≤'} {target.bound:g}",
                _number(target.measured),
                "yes" if target.holds else "**no**",
            ]
            for target in self.targets
        ]
        yield from _markdown(["figure", "target", "measured", "holds"], rows)


def _as_json(table: Table) -> dict[str, Any]:
    unit = "bytes" if table.unit == "bytes" else "ns"
    rows = {name: [asdict(sample) for sample in cells] for name, cells in table.rows.items()}
    return {"title": table.title, "unit": unit, "columns": table.columns, "rows": rows, "notes": table.notes}


def _markdown(headings: list[str], rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for line in (headings, ["-" * width for width in widths], *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        yield f"| {' | '.join((first.strip().ljust(widths[0]), *others))} |"


def _cell(sample: Any, unit: str) -> str:
    least, median = (_number(value / _SCALES[unit]) for value in (sample.least, sample.median))
    return least if unit == "bytes" else f"{least} ({median})"


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
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
