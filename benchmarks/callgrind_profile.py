"""Callgrind's output files: what each function cost, with all it called.

The format is in valgrind's manual ("Callgrind Format Specification"). Of it, this reads names, which are written once
with a number and then by number alone, the cost lines, and the calls, whose next line has the cost of all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"^(c?fn)=\((\d+)\)(?: (.*))?$")
_COST = re.compile(r"^[+\-*\d]\S* (\d+)$")
_TRIGGER = "desc: Trigger: Client Request: "


@dataclass(frozen=True)
class Profile:
    """Instructions: all of them, and by function those of its calls."""

    total: int
    calls: Counter[str]

    def inclusive(self, callee: str) -> int:
        """Return what the calls of *callee* cost, by its name up to its parameters, or further.

        Raises KeyError if no call was counted.
        """
        found = [count for to, count in self.calls.items() if to.startswith(callee) and count]
        if not found:
            raise KeyError(f"no call of {callee} was counted: was it renamed or inlined?")
        return sum(found)

    def __sub__(self, other: Profile) -> Profile:
        """Return what the longer run counted more than the shorter one."""
        calls = Counter(self.calls)
        calls.subtract(other.calls)
        return Profile(self.total - other.total, calls)


def read_profiles(folder: Path) -> dict[str, Profile]:
    """Return the dumps in *folder* by the name that they were asked for with."""
    found = {}
    for path in sorted(folder.glob("out.*")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if line.startswith(_TRIGGER):
                found[line.removeprefix(_TRIGGER)] = _parse(lines)
                break
    return found


def _parse(lines: list[str]) -> Profile:
    names: dict[str, str] = {}
    calls: Counter[str] = Counter()
    total = 0
    callee = ""  # it is named before the cost of its calls, and not otherwise
    for line in lines:
        if match := _NAME.match(line):
            kind, number, name = match.groups()
            if name is not None:
                names[number] = name
            if kind == "cfn":
                callee = names[number]
        elif match := _COST.match(line):
            if callee:
                calls[callee] += int(match.group(1))
                callee = ""
            else:
                total += int(match.group(1))
    return Profile(total, calls)
