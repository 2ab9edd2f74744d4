"""The tables: one question each, in one unit."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from contenders import BARE, BYPASS, LIST_PATH, OURS, OURS_LISTS, Contenders, make_prompt
from timing import Contender, Effort, Sample, compete
from upstream import READERS, ObjectDefaultPipeline, OneParameterPipeline, Pipeline, cached

from omni_tensor_key import _core

HEADLINE = 1024  # tokens
LENGTHS = (16, 64, 256, 1024, 4096, 16_384)
ENTRIES = (1, 100, 10_000)
MEMORY_LENGTHS = (64, 1024, 16_384)
OTHER_BINDING = "a string, a default that is an object, a hit"  # upstream's function binds, with this package too
WITHOUT, WITH = "without the package", "with the package"


@dataclass
class Table:
    """Figures by row and column, all in `unit`."""

    name: str
    title: str
    unit: str
    heading: str
    columns: list[str]
    rows: dict[str, list[Sample]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def at(self, row: str, column: object) -> float:
        """Return the least of one figure."""
        return self.rows[row][self.columns.index(_label(column))].least

    def add(self, measured: dict[str, Sample]) -> None:
        """Fill the next column."""
        for name, sample in measured.items():
            self.rows.setdefault(name, []).append(sample)


def _label(column: object) -> str:
    return f"{column:,}" if isinstance(column, int) else str(column)


def _new(name: str, title: str, unit: str, heading: str, columns: Sequence[object]) -> Table:
    return Table(name, title, unit, heading, [_label(column) for column in columns])


def call_tables(contenders: Contenders, effort: Effort, lengths: Sequence[int]) -> list[Table]:
    """Time one key, a whole call through upstream's wrapper that hits, and one that misses."""
    key = _new("key", "One key, by tokens in the prompt", "µs", "contender", lengths)
    hit = _new("hit", "A wrapped call that hits, by tokens in the prompt", "µs", "contender", lengths)
    miss = _new("miss", "A wrapped call that misses, by tokens in the prompt", "µs", "contender", lengths)
    for length in lengths:
        key.add(compete(contenders.keys(make_prompt(length)), effort))
        hit.add(compete(contenders.hits(make_prompt(length)), effort))
        miss.add(compete(contenders.misses(make_prompt(length, 1), make_prompt(length, 2)), effort))
    hit.notes.append(f"The encoder costs nothing here. '{BARE}' is the call without a wrapper. '{BYPASS}' never hits.")
    miss.notes.append("Key, lookup, insertion, eviction of another entry: a cache of one entry, two prompts in turn.")
    return [key, hit, miss]


def entries_table(contenders: Contenders, effort: Effort, counts: Sequence[int]) -> Table:
    """Time a hit by the number of entries in the cache."""
    table = _new("entries", "A wrapped call that hits, by entries in the cache (64 tokens)", "µs", "contender", counts)
    for count in counts:
        prompts = [make_prompt(64, seed) for seed in range(count)]
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


def memory_table(contenders: Contenders, count: int) -> Table:
    """Measure what a key holds when the call's arguments are gone."""
    table = _new("memory", "Memory of one key, by tokens in the prompt", "bytes", "contender", MEMORY_LENGTHS)
    for length in MEMORY_LENGTHS:
        number = max(4, count * MEMORY_LENGTHS[0] // length)
        table.add({name: _held(contenders, name, length, number) for name in (LIST_PATH, *READERS, OURS, OURS_LISTS)})
    table.notes.append("By tracemalloc. The content of both tensors is 16 bytes a token.")
    return table


def _held(contenders: Contenders, name: str, length: int, count: int) -> Sample:
    keys: list[Any] = [None] * count
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for seed in range(count):
            contender = contenders.key(name, make_prompt(length, seed))
            keys[seed] = eval(contender.statement, dict(contender.names))
        del contender
        held = (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()
    return Sample(held, held)


def digest_table(effort: Effort) -> Table:
    """Time the content hash alone."""
    sizes = {"0 B": 0, "8 KiB": 8 << 10, "1 MiB": 1 << 20}
    table = _new("digest", "XXH3-128 of a bytes object", "ns", "implementation", list(sizes))
    for size in sizes.values():
        data = random.Random(0).randbytes(size)
        statements = {
            f"this package, {path}": Contender(
                "digest(data, path)", {"digest": _core.xxh3_128, "data": data, "path": path}
            )
            for path in _core.SIMD_PATHS
        }
        library = {"digest": xxhash.xxh3_128_digest, "data": data}
        statements[f"xxhash package, library {xxhash.XXHASH_VERSION}"] = Contender("digest(data)", library)
        table.add(compete(statements, effort))
    table.notes.append("The column 0 B is what the call itself costs.")
    return table


class _PictureLike:
    """An object that upstream cannot key, as a PIL image is."""


def untouched_table(contenders: Contenders, effort: Effort) -> Table:
    """Time calls that the package does nothing for, with and without it."""
    text = {"prompt_ids": "a photograph of an astronaut riding a horse"}
    prompt, embeds = make_prompt(HEADLINE), torch.zeros(1, HEADLINE, 64)
    calls: dict[str, tuple[dict[str, Any], type[Pipeline]]] = {
        "a string, a hit": (text, Pipeline),
        "a string, the only parameter, a hit": (text, OneParameterPipeline),
        OTHER_BINDING: (text, ObjectDefaultPipeline),
        f"lists of {HEADLINE:,} tokens, a hit": (prompt.lists, Pipeline),
        "a float tensor, a bypass": ({"prompt_ids": prompt.ids, "attention_mask": embeds}, Pipeline),
        "an image-like object, a bypass": ({"prompt_ids": "a photo", "attention_mask": _PictureLike()}, Pipeline),
        "precomputed embeddings, a bypass": (
            {"prompt_ids": None, "prompt_embeds": embeds, "prompt_embeds_mask": embeds},
            Pipeline,
        ),
    }
    table = _new("untouched", "Calls that the package does nothing for", "µs", "call", [WITHOUT, WITH])
    for name, (arguments, make) in calls.items():
        statements = {
            state: Contender("encode(**arguments)", {"encode": cached(module, 1, make)[0], "arguments": arguments})
            for state, module in {WITHOUT: contenders.plain, WITH: contenders.active}.items()
        }
        samples = compete(statements, effort)
        table.rows[name] = [samples[WITHOUT], samples[WITH]]
    return table
