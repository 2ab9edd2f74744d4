"""The tables: one question each, in one unit."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import _core
from ..key import tensor_key
from .calls import BARE, BYPASS, LIST_PATH, OURS, Contenders, cached, make_prompt
from .timing import Contender, Effort, Sample, compete

HEADLINE = 1024  # tokens
LENGTHS = (16, 64, 256, 1024, 4096, 16_384)
BATCHES = (1, 4, 16, 64)  # 64 x 1,024 IDs are 512 KiB; 64 x 16,384 would be over the default limit of 1 MiB a tensor
ENTRIES = (1, 100, 10_000)
MEMORY_LENGTHS = (64, 1024, 16_384)
_NOT_COUNTED = 4  # keys
_COMPARED = 128 << 10  # bytes that are compared in one go


@dataclass
class Table:
    """Figures by row and column, all in `unit`; None where something was not measured."""

    name: str
    title: str
    unit: str
    heading: str
    columns: list[str]
    rows: dict[str, list[Sample | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def at(self, row: str, column: object) -> Sample:
        """Return one figure, which must have been measured."""
        sample = self.rows[row][self.columns.index(_label(column))]
        assert sample is not None, (self.name, row, column)
        return sample

    def add(self, measured: dict[str, Sample]) -> None:
        """Fill the next column; rows that are not in *measured* stay empty there."""
        filled = max((len(cells) for cells in self.rows.values()), default=0)
        for name in {**self.rows, **measured}:
            self.rows.setdefault(name, [None] * filled).append(measured.get(name))


def _label(column: object) -> str:
    return f"{column:,}" if isinstance(column, int) else str(column)


def _new(name: str, title: str, unit: str, heading: str, columns: Sequence[object]) -> Table:
    return Table(name, title, unit, heading, [_label(column) for column in columns])


def key_tables(contenders: Contenders, effort: Effort, lengths: Sequence[int]) -> list[Table]:
    """Time one key by prompt length and by batch size."""
    by_length = _new("key", "One key, by tokens in the prompt (batch 1)", "µs", "contender", lengths)
    for length in lengths:
        by_length.add(compete(contenders.keys(make_prompt(1, length)), effort))
    batches = BATCHES if len(lengths) == len(LENGTHS) else BATCHES[:2]
    by_batch = _new("key_batch", f"One key, by batch size ({HEADLINE:,} tokens a prompt)", "µs", "contender", batches)
    for batch in batches:
        by_batch.add(compete(contenders.keys(make_prompt(batch, HEADLINE)), effort))
    return [by_length, by_batch]


def call_tables(contenders: Contenders, effort: Effort, lengths: Sequence[int]) -> list[Table]:
    """Time whole calls through upstream's wrapper that hit, and that miss."""
    hit = _new("hit", "A wrapped call that hits, by tokens (batch 1)", "µs", "contender", lengths)
    miss = _new("miss", "A wrapped call that misses, by tokens (batch 1)", "µs", "contender", lengths)
    for length in lengths:
        hit.add(compete(contenders.hits(make_prompt(1, length)), effort))
        miss.add(compete(contenders.misses(make_prompt(1, length, 1), make_prompt(1, length, 2)), effort))
    hit.notes.append(f"The encoder costs nothing here; '{BARE}' is the call without a wrapper, '{BYPASS}' never hits.")
    miss.notes.append(
        "Key, lookup, insertion and the eviction of another entry: a cache of one entry, prompts in turn."
    )
    return [hit, miss]


def entries_table(contenders: Contenders, effort: Effort, counts: Sequence[int]) -> Table:
    """Time a hit by the number of entries in the cache."""
    table = _new("entries", "A wrapped call that hits, by entries in the cache (64 tokens)", "µs", "contender", counts)
    for count in counts:
        prompts = [make_prompt(1, 64, seed) for seed in range(count)]
        statements = {
            LIST_PATH: _filled(contenders.plain, [prompt.lists for prompt in prompts]),
            OURS: _filled(contenders.active, [prompt.tensors for prompt in prompts]),
        }
        table.add(compete(statements, effort))
    return table


def _filled(module: Any, calls: list[dict[str, Any]]) -> Contender:
    encode, _ = cached(module, len(calls))
    for arguments in calls:
        encode(**arguments)
    return Contender("encode(**arguments)", {"encode": encode, "arguments": calls[len(calls) // 2]})


def memory_table(contenders: Contenders, entries: int) -> Table:
    """Measure what a key holds when the call's arguments are gone, and the peak while it is made."""
    columns = [f"{length:,} tokens, {what}" for length in MEMORY_LENGTHS for what in ("held", "peak")]
    table = _new("memory", "Memory of one key", "bytes", "contender", columns)
    names = [name for name in contenders.names if name != BYPASS]
    for length in MEMORY_LENGTHS:
        count = max(4, entries * MEMORY_LENGTHS[0] // length)
        held, peak = {}, {}
        for name in names:
            held[name], peak[name] = _memory(contenders, name, length, count)
        table.add(held)
        table.add(peak)
    table.notes += [
        "By tracemalloc. The content of both tensors is 16 bytes a token.",
        "Held: by one of many keys, once the arguments are gone; a key of lists keeps the integers of the lists.",
        "Peak: while one key is made, without the arguments that the caller holds.",
    ]
    return table


def _memory(contenders: Contenders, name: str, length: int, count: int) -> tuple[Sample, Sample]:
    def make(seed: int) -> tuple[Any, int]:
        contender = contenders.key(name, make_prompt(1, length, seed))
        code = compile(contender.statement, "<key>", "eval")
        tracemalloc.reset_peak()
        start = tracemalloc.get_traced_memory()[0]
        key = eval(code, dict(contender.names))
        return key, tracemalloc.get_traced_memory()[1] - start

    # The first ones, which are not counted, may get memory that was kept when earlier keys were dropped.
    keys: list[Any] = [make(seed)[0] for seed in range(_NOT_COUNTED)] + [None] * count
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        peak = 0
        for seed in range(_NOT_COUNTED, len(keys)):
            keys[seed], peak = make(seed)
        held = (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()
    return Sample(held, held), Sample(peak, peak)


def digest_table(effort: Effort) -> Table:
    """Time the content hash alone."""
    sizes = {"0 B": 0, "8 KiB": 8 << 10, "1 MiB": 1 << 20}
    table = _new("digest", "XXH3-128 of a bytes object", "ns", "implementation", list(sizes))
    for size in sizes.values():
        data = random.Random(0).randbytes(size)
        statements = {
            f"ours, {path}": Contender("digest(data, path)", {"digest": _core.xxh3_128, "data": data, "path": path})
            for path in _core.SIMD_PATHS
        }
        try:
            import xxhash

            names = {"digest": xxhash.xxh3_128_digest, "data": data}
            statements[f"xxhash package (library {xxhash.XXHASH_VERSION})"] = Contender("digest(data)", names)
        except ImportError:
            table.notes = ["The xxhash package is not installed."]
        table.add(compete(statements, effort))
    table.notes.append("The column 0 B is what the call itself costs.")
    return table


def equality_table(effort: Effort) -> Table:
    """Time == of two equal keys against == of two equal bytes objects, which is memcmp behind the same operator."""
    counts = {"8 B": 1, "8 KiB": 1 << 10, "128 KiB": 16 << 10, "1 MiB": 128 << 10}
    table = _new("equality", "== of two equal objects that are not the same", "ns", "objects", list(counts))
    for count in counts.values():
        ids = make_prompt(1, count).ids
        data = random.Random(0).randbytes(ids.nbytes)
        pairs = min(100, max(2, _COMPARED // ids.nbytes))
        # Keys that were found equal know it, so each one is compared once.
        contenders = {
            "TensorKey": _compared("tensor_key(ids)", {"tensor_key": tensor_key, "ids": ids}, pairs),
            "bytes": _compared("bytes(bytearray(data))", {"data": data}, pairs),
        }
        table.add(compete(contenders, effort))
    table.notes.append("For the target, memcmp is 'bytes' less its column of 8 B; the key's figure is as measured.")
    return table


def _compared(make: str, names: dict[str, Any], pairs: int) -> Contender:
    setup = f"one, others = {make}, [{make} for _ in range({pairs})]"
    return Contender("for other in others: one == other", names, pairs, setup)
