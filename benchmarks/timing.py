"""Timing of short statements: contenders take turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import os
import timeit
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """Nanoseconds of one execution, or bytes: the least and the median of all repeats."""

    least: float
    median: float


@dataclass(frozen=True)
class Contender:
    """A statement to time, with the names it uses. It does `parts` times what its figure is for."""

    statement: str
    names: Mapping[str, Any]
    parts: int = 1

    def timer(self) -> timeit.Timer:
        """Return the timer of the statement. The loop around it is in bytecode: about 10 ns, and no call."""
        return timeit.Timer(self.statement, globals=dict(self.names))


@dataclass(frozen=True)
class Effort:
    """How long to measure: `repeats` of about `seconds` each, for every contender."""

    repeats: int
    seconds: float


FULL = Effort(repeats=100, seconds=0.001)  # short: a repeat that nothing interrupts is the one that counts
QUICK = Effort(repeats=3, seconds=0.0002)


def _calibrate(timer: timeit.Timer, seconds: float) -> int:
    """Return how often the statement has to run to fill *seconds*.

    By the least of some times: after an interruption that counted, a repeat would be a few runs with cold caches.
    """
    number = 1
    while (elapsed := min(timer.repeat(5, number))) < seconds / 4:
        number *= 4
    return max(1, round(number * seconds / elapsed))


def compete(contenders: Mapping[str, Contender], effort: Effort) -> dict[str, Sample]:
    """Time the contenders in turn, one repeat of each per round.

    The garbage collector is off while a statement runs; the caller keeps its results from growing.
    """
    timers = {name: contender.timer() for name, contender in contenders.items()}
    numbers = {name: _calibrate(timer, effort.seconds) for name, timer in timers.items()}
    measured: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(effort.repeats):
        for name, timer in timers.items():
            parts = numbers[name] * contenders[name].parts
            measured[name].append(timer.timeit(numbers[name]) / parts * 1e9)
    return {name: Sample(min(times), median(times)) for name, times in measured.items()}


@contextmanager
def one_core() -> Iterator[str]:
    """Keep this process on one core and torch on one thread; yield how, in words, and undo it at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    try:
        if allowed:
            core = max(allowed)  # the first one has the interrupts on many machines
            os.sched_setaffinity(0, {core})
            yield f"pinned to core {core}"
        else:
            yield "not pinned: this system has no sched_setaffinity"
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)
