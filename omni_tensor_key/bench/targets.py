"""What the figures have to show, and what a user reads off them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .calls import BYPASS, BYTES, LIST_PATH, OURS, OURS_LISTS, OURS_UPSTREAM_BINDING
from .tables import HEADLINE, Table
from .tax import ACTIVE, BOTH, ELAPSED, INACTIVE

NOISE = 1.03  # of two figures for the same work; a ratio up to here counts as 'not slower'
BYTES_A_TOKEN = 16  # of content: an ID and its mask, int64


@dataclass(frozen=True)
class Target:
    """A bound on a measured figure; `measured` is None where it could not be measured."""

    name: str
    bound: float
    at_least: bool
    measured: float | None
    unit: str = "times"

    @property
    def holds(self) -> bool | None:
        """Whether the figure is within the bound; None where there is no figure."""
        if self.measured is None:
            return None
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def targets(tables: dict[str, Table]) -> Iterator[Target]:
    """Compare the least times of this run with the targets."""
    key = tables["key"]

    def faster(name: str, than: str, by: float, row: str) -> Target:
        ratio = key.at(than, HEADLINE).least / key.at(row, HEADLINE).least if than in key.rows else None
        return Target(name, by, True, ratio)

    what = f"Key of two tensors [1, {HEADLINE:,}] int64"
    yield faster(f"{what}, against the list path", LIST_PATH, 100, OURS)
    yield faster(f"{what}, against bytes in the key", BYTES, 10, OURS)
    yield faster(f"{what}, against upstream's bypass", BYPASS, 1, OURS)
    yield faster("The same through upstream's binding, against the list path", LIST_PATH, 25, OURS_UPSTREAM_BINDING)
    yield faster(f"Key of two lists of {HEADLINE:,}, against upstream's list path", LIST_PATH, 6, OURS_LISTS)
    yield from _equality(tables["equality"])
    yield from _digest(tables["digest"])
    yield from _growth(tables)
    tax = tables["tax"]
    slowest = max(tax.at(row, ACTIVE).least / tax.at(row, INACTIVE).least for row in tax.rows)
    yield Target("Calls without gain, the worst against the same without the extension", NOISE, False, slowest)
    plugin = tables["activation"].at(BOTH, ELAPSED).least / 1e6
    yield Target("Import and activation in a process without the cache", 5, False, plugin, "ms")


def _equality(table: Table) -> Iterator[Target]:
    for size in ("8 KiB", "1 MiB"):
        memcmp = table.at("bytes", size).least - table.at("bytes", "8 B").least
        yield Target(
            f"== of equal keys of {size}, against 1.5 x memcmp + 100 ns",
            1,
            False,
            table.at("TensorKey", size).least / (1.5 * memcmp + 100),
        )


def _digest(table: Table) -> Iterator[Target]:
    ours, *_ = (row for row in table.rows if row.startswith("ours"))
    package = next((row for row in table.rows if row.startswith("xxhash")), None)
    for size in ("8 KiB", "1 MiB"):
        speed = package and _net(table, package, size) / _net(table, ours, size)
        name = f"Speed of the digest at {size} less that of 0 B, against the xxhash package"
        yield Target(name, 0.9, True, speed or None)


def _net(table: Table, row: str, size: str) -> float:
    return table.at(row, size).least - table.at(row, "0 B").least


def _growth(tables: dict[str, Table]) -> Iterator[Target]:
    key, entries, memory = tables["key"], tables["entries"], tables["memory"]
    shorter, longer = key.columns[-2:]
    yield Target(
        f"Growth of a key's time from {shorter} to {longer} tokens (bytes: 4 times)",
        5,
        False,
        key.at(OURS, longer).least / key.at(OURS, shorter).least,
    )
    few, many = entries.columns[0], entries.columns[-1]
    yield Target(
        f"Hit among {many} entries, against a hit among {few}",
        1.1,
        False,
        entries.at(OURS, many).least / entries.at(OURS, few).least,
    )
    held = memory.at(OURS, f"{HEADLINE:,} tokens, held").least
    yield Target("Memory beyond the content, per tensor", 256, False, (held - BYTES_A_TOKEN * HEADLINE) / 2, "bytes")


def readings(tables: dict[str, Table]) -> Iterator[str]:
    """Say what the tables answer: from which length it pays, and what those pay who gain nothing."""
    key, hit, miss, tax = (tables[name] for name in ("key", "hit", "miss", "tax"))
    for than in (LIST_PATH, BYTES, BYPASS):
        if than in key.rows:
            yield _pays(key, than)
    shortest, longest = hit.columns[0], hit.columns[-1]
    for column in dict.fromkeys((shortest, f"{HEADLINE:,}", longest)):
        missed = miss.at(OURS, column).least - miss.at(BYPASS, column).least
        both = missed + hit.at(OURS, column).least - hit.at(BYPASS, column).least
        yield (
            f"At {column} tokens a hit takes {_us(hit, OURS, column)}, and a miss {missed / 1e3:+,.2f} µs against the "
            f"bypass that it replaces. Two samples of a prompt take {both / 1e3:+,.2f} µs, and one encoder run less."
        )
    yield "A call that bypasses takes, with the extension and without: " + "; ".join(
        f"{row.removesuffix(' (bypass)')} {_us(tax, row, ACTIVE)} and {_us(tax, row, INACTIVE)}"
        for row in tax.rows
        if row.endswith("(bypass)")
    )
    plugin = tables["activation"].at(BOTH, ELAPSED)
    yield f"A process that never imports the cache pays {plugin.least / 1e6:.2f} ms once, for the plugin."


def _pays(key: Table, than: str) -> str:
    faster = [column for column in key.columns if key.at(OURS, column).least < key.at(than, column).least]
    if len(faster) == len(key.columns):
        where = f"at every length measured, {faster[0]} to {faster[-1]} tokens"
    else:
        where = f"at {', '.join(faster)} tokens and at no other length measured" if faster else "at no length measured"
    return f"A tensor's key is faster than '{than}' {where}."


def _us(table: Table, row: str, column: object) -> str:
    return f"{table.at(row, column).least / 1e3:,.2f} µs"
