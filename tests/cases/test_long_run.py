"""Case 20, and a long run: 100,000 distinct keys and calls leave memory and reference counts as they were."""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_tensor_key import TensorKey, tensor_key

from .support import Pipeline, installed, outcome, upstream

pytestmark = [
    pytest.mark.usefixtures("active"),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc"),
]

COUNT = 100_000
# What an allocator may hold back or hand out anew; content that stayed would be 800 MB of keys.
TOLERANCE = 16 << 20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(step: Callable[[int], Any], count: int) -> int:
    """How much resident memory grows over `count` steps, after a tenth as many of warm-up."""
    warm = count // 10
    for i in range(warm):
        step(i)
    before = resident_bytes()
    for i in range(warm, warm + count):
        step(i)
    return resident_bytes() - before


def test_case_20_distinct_keys_leave_memory_flat() -> None:
    ids = torch.zeros(1, 1024, dtype=torch.int64)
    digests = set()

    def make_and_drop(i: int) -> None:
        ids[0, 0] = i
        digests.add(hash(tensor_key(ids)))

    count = 10_000
    assert growth(make_and_drop, count) < TOLERANCE
    assert len(digests) == count * 11 // 10


def test_100_000_distinct_keys_leave_memory_and_references_as_they_were() -> None:
    ids, mask = torch.zeros(1, 1024, dtype=torch.int64), torch.ones(1, 1024, dtype=torch.bool)
    signature = inspect.signature(Pipeline().encode_prompt)
    watched = [ids, mask, signature, upstream._NOT_HASHABLE, TensorKey, torch.int64]
    if sys.version_info < (3, 12):  # immortal since
        watched.append(None)

    def make_and_drop(i: int) -> None:
        ids[0, i % 1024] = i
        upstream._build_key(signature, "tag", (ids, [mask, None, i]), {"num_images_per_prompt": i})
        upstream._build_key(signature, "tag", (ids, 1.5), {"prompt_embeds_mask": mask})
        upstream._hashable([ids, object()])

    assert growth(make_and_drop, 1000) < TOLERANCE
    before = [sys.getrefcount(value) for value in watched]
    assert growth(make_and_drop, COUNT) < TOLERANCE
    after = [sys.getrefcount(value) for value in watched]
    # None is used by everything that runs here, so a few of its references may come and go.
    drift = {str(value): b - a for value, a, b in zip(watched, before, after, strict=True) if abs(b - a) > 50}
    assert not drift


def test_100_000_distinct_calls_through_a_small_cache_leave_memory_flat() -> None:
    pipeline, cache = installed(max_size=4)
    ids, mask = torch.zeros(1, 256, dtype=torch.int64), torch.ones(1, 256, dtype=torch.bool)

    def call(i: int) -> None:
        ids[0, i % 256] = i
        mask[0, i % 256] = i % 3 == 0
        pipeline.encode_prompt(ids, mask)

    assert growth(call, COUNT) < TOLERANCE
    counted = outcome(cache)
    assert sum(counted) == COUNT * 11 // 10
    assert counted.misses > COUNT
    assert cache.stats()["size"] == 4
