"""What was seen, as tables."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from importlib.metadata import version

SKIPPED = "skipped: "


@dataclass
class Report:
    """Collects the results of a run."""

    revision: str = ""
    # adapter -> entry point -> case -> extension ("on", "off") -> what came of it
    results: dict[str, dict[str, dict[str, dict[str, str]]]] = field(default_factory=dict)
    _reasons: dict[str, int] = field(default_factory=dict)
    rollouts: dict[str, dict[str, int]] = field(default_factory=dict)  # setting -> extension -> runs of the encoder
    notes: dict[str, str] = field(default_factory=dict)  # adapters and entry points that were not run, and why

    def add(self, adapter: str, entry: str, case: str, extension: str, result: str) -> None:
        self.results.setdefault(adapter, {}).setdefault(entry, {}).setdefault(case, {})[extension] = result

    def as_markdown(self) -> str:
        lines = [
            f"verl-omni {self.revision}, vllm-omni {version('vllm-omni')}, torch {version('torch')}; run on"
            f" {datetime.date.today()}.",
        ]
        groups: dict[str, list[str]] = {}  # adapters in which everything came out the same share a table
        for adapter, entries in self.results.items():
            groups.setdefault(self._table(entries), []).append(adapter)
        for table, adapters in groups.items():
            lines += ["", *(f"**{adapter}**  " for adapter in adapters), "", table]
        if self._reasons:
            lines += ["", "Skipped, in each case with the cache off, too:", ""]
            lines += [f"{number}. {reason}" for reason, number in self._reasons.items()]
        if self.rollouts:
            lines += ["", "| rollout | encoder runs, extension off | extension on |", "| --- | ---: | ---: |"]
            lines += [f"| {name} | {counts['off']} | {counts['on']} |" for name, counts in self.rollouts.items()]
        if self.notes:
            lines += ["", "Not run, or not whole:", ""]
            lines += [f"- {name}: {reason}" for name, reason in self.notes.items()]
        return "\n".join(lines) + "\n"

    def _table(self, entries: dict[str, dict[str, dict[str, str]]]) -> str:
        columns = [(entry, extension) for entry in entries for extension in ("on", "off")]
        cases = list(dict.fromkeys(case for results in entries.values() for case in results))
        rows = [["case", *(f"`{entry}`, extension {extension}" for entry, extension in columns)]]
        rows.append(["---"] * len(rows[0]))
        for case in cases:
            cells = [self._cell(entries[entry].get(case, {}).get(extension, "–")) for entry, extension in columns]
            rows.append([case, *cells])
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)

    def _cell(self, result: str) -> str:
        if not result.startswith(SKIPPED):
            return result
        reason = result.removeprefix(SKIPPED)
        return f"skipped ({self._reasons.setdefault(reason, len(self._reasons) + 1)})"


def summary(outcomes: list[list[str]]) -> str:
    """The outcomes of a case: one part for each request, in which the calls of encode_prompt() are joined by +."""
    parts = ["+".join(calls) for calls in outcomes]
    if len(set(parts)) == 1 and len(parts) > 1:
        return f"{parts[0]} ×{len(parts)}"
    return ", ".join(parts)
