"""One run: all tables in one process, on one core."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from .calls import BYPASS, Contenders
from .report import Report
from .tables import (
    ENTRIES,
    HEADLINE,
    LENGTHS,
    Table,
    call_tables,
    digest_table,
    entries_table,
    equality_table,
    key_tables,
    memory_table,
)
from .targets import BYTES_A_TOKEN, readings, targets
from .tax import activation_table, tax_table
from .timing import FULL, QUICK, Sample, one_core

_QUICK_LENGTHS = (16, 256, HEADLINE)


def run(console: Console, *, quick: bool = False, json_file: Path | None = None, chart: str | None = None) -> None:
    """Measure, print the tables, and write JSON and the chart where asked to.

    Raises CannotMeasure where there is no prompt-embedding cache or none that this package knows, and where a contender
    does not key or hit as it should.
    """
    report = measure(console, quick=quick)
    report.print(console)
    if json_file is not None:
        report.write_json(json_file)
        console.print(f"Wrote {json_file}.", highlight=False)
    if chart is not None:
        try:
            from .chart import draw

            paths = draw({table.name: table for table in report.tables}, chart)
            console.print(f"Wrote {' and '.join(map(str, paths))}.", highlight=False)
        except ImportError as error:
            console.print(f"No chart: {error}; `pip install omni-tensor-key[bench]` has it.", markup=False)


def measure(console: Console, *, quick: bool = False) -> Report:
    """Measure everything. *quick* takes seconds, and its figures are good for nothing but a test."""
    effort, lengths = (QUICK, _QUICK_LENGTHS) if quick else (FULL, LENGTHS)
    contenders = Contenders()
    contenders.check()
    jobs: list[Callable[[], list[Table]]] = [
        lambda: _with_per_byte(key_tables(contenders, effort, lengths)),
        lambda: call_tables(contenders, effort, lengths),
        lambda: [entries_table(contenders, effort, ENTRIES[:2] if quick else ENTRIES)],
        lambda: [memory_table(contenders, 20 if quick else 1000)],
        lambda: [digest_table(effort), equality_table(effort)],
        lambda: [tax_table(contenders, effort), activation_table(processes=1 if quick else 7)],
    ]
    load = _load()
    tables: dict[str, Table] = {}
    with one_core() as pinning, Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for job in progress.track(jobs, description="measuring"):
            tables |= {table.name: table for table in job()}
    return Report(
        effort,
        pinning,
        (load, _load()),
        list(tables.values()),
        list(targets(tables)),
        list(readings(tables)),
        contenders.missing,
    )


def _with_per_byte(tables: list[Table]) -> list[Table]:
    """Add a table of the times of one key, divided by the bytes of content in the call."""
    key = tables[0]
    sizes = [int(column.replace(",", "")) * BYTES_A_TOKEN for column in key.columns]
    rows: dict[str, list[Sample | None]] = {
        name: [s and Sample(s.least / n, s.median / n) for s, n in zip(cells, sizes, strict=True)]
        for name, cells in key.rows.items()
        if name != BYPASS
    }
    title = "One key, for each byte of content, by tokens in the prompt (batch 1)"
    return [*tables, replace(key, name="key_per_byte", title=title, unit="ns", rows=rows, notes=[])]


def _load() -> str:
    return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"
