"""What the figures have to show: ratios of two figures of one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from contenders import BYPASS, BYTES, DECISION, LIST_PATH, OURS, OURS_LISTS
from tables import HEADLINE, OTHER_BINDING, WITH, WITHOUT, Table

NOISE = 1.03  # of two figures for the same work: a ratio up to here counts as 'not slower'
CONTENT = 16 * HEADLINE  # bytes: an ID and its mask, int64


@dataclass(frozen=True)
class Target:
    """A bound on a measured figure."""

    name: str
    bound: float
    at_least: bool
    measured: float

    @property
    def holds(self) -> bool:
        """Whether the figure is within the bound."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def targets(tables: dict[str, Table]) -> Iterator[Target]:
    """Compare the least times of this run with the targets."""
    key, hit, entries = tables["key"], tables["hit"], tables["entries"]

    def faster(name: str, than: str, by: float, row: str = OURS) -> Target:
        return Target(name, by, True, key.at(than, HEADLINE) / key.at(row, HEADLINE))

    yield faster(f"key of two tensors [1, {HEADLINE:,}] int64, against the list path", LIST_PATH, 100)
    yield faster("the same against bytes in the key", BYTES, 7)
    yield faster("the same against upstream's decision to bypass", BYPASS, 1)
    yield faster(f"two lists of {HEADLINE:,}, against upstream's list path", LIST_PATH, 5, OURS_LISTS)
    ratio = hit.at(OURS, HEADLINE) / hit.at(DECISION, HEADLINE)
    yield Target(f"a hit at {HEADLINE:,} tokens, against upstream's decision to bypass", 1, False, ratio)
    yield from _digest(tables["digest"])
    untouched = tables["untouched"]
    ratios = {row: untouched.at(row, WITH) / untouched.at(row, WITHOUT) for row in untouched.rows}
    other = ratios.pop(OTHER_BINDING)
    name = "calls without gain, the worst against the same without the package"
    yield Target(name, NOISE, False, max(ratios.values()))
    yield Target("the same where a default is an object, so that upstream's function binds", NOISE, False, other)
    shorter, longer = key.columns[-2:]
    growth = key.at(OURS, longer) / key.at(OURS, shorter)
    yield Target(f"a key's time from {shorter} to {longer} tokens (4 times is linear)", 5, False, growth)
    few, many = entries.columns[0], entries.columns[-1]
    growth = entries.at(OURS, many) / entries.at(OURS, few)
    yield Target(f"a hit among {many} entries, against a hit among {few}", 1.1, False, growth)
    held = (tables["memory"].at(OURS, HEADLINE) - CONTENT) / 2
    yield Target("bytes of memory beyond the content, per tensor", 256, False, held)


def _digest(table: Table) -> Iterator[Target]:
    ours, *_, library = table.rows
    for size in ("8 KiB", "1 MiB"):
        theirs, mine = (table.at(row, size) - table.at(row, "0 B") for row in (library, ours))
        yield Target(f"digest at {size}, less that of 0 B, against the C library xxHash", 0.9, True, theirs / mine)
