"""What a key, a hit and a miss cost on this machine, on one core: `make bench`.

    python benchmarks/bench.py [--json FILE] [--chart PREFIX] [--quick]

Prints Markdown tables. The exit code is 2 where nothing can be measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # read when vllm is imported

from contenders import Contenders
from report import Report
from tables import (
    ENTRIES,
    HEADLINE,
    LENGTHS,
    call_tables,
    digest_table,
    entries_table,
    memory_table,
    untouched_table,
)
from targets import targets
from timing import FULL, QUICK, one_core
from upstream import CannotMeasure


def measure(quick: bool) -> Report:
    """Measure everything in this process. With `quick`, in seconds, for a test: its figures are good for nothing."""
    effort = QUICK if quick else FULL
    contenders = Contenders()
    load = os.getloadavg()[0]
    with one_core() as pinning:
        tables = [
            *call_tables(contenders, effort, (16, 256, HEADLINE) if quick else LENGTHS),
            entries_table(contenders, effort, ENTRIES[:2] if quick else ENTRIES),
            memory_table(contenders, 20 if quick else 1000),
            digest_table(effort),
            untouched_table(contenders, effort),
        ]
    by_name = {table.name: table for table in tables}
    return Report(effort, pinning, (load, os.getloadavg()[0]), tables, list(targets(by_name)))


def main() -> None:
    """Parse the command line, measure, and write what is asked for."""
    parser = argparse.ArgumentParser(description="Measure what a key, a hit and a miss cost on this machine.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--chart", metavar="PREFIX", help="also draw PREFIX.svg and PREFIX.png")
    parser.add_argument("--quick", action="store_true", help="take seconds, for a test: no figures to rely on")
    options = parser.parse_args()
    if options.chart and importlib.util.find_spec("matplotlib") is None:
        parser.error("--chart needs matplotlib: pip install matplotlib")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # µ and ≥, where the terminal has not
    try:
        report = measure(options.quick)
    except CannotMeasure as error:
        parser.exit(2, f"Nothing was measured: {error}.\n")
    print("\n".join(report.lines()))
    if options.json:
        report.write_json(options.json)
    if options.chart:
        from chart import draw

        draw({table.name: table for table in report.tables}, options.chart)


if __name__ == "__main__":
    main()
