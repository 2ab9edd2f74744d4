"""The caches' counters in prometheus_client's default registry, for a process that exposes it.

Since vLLM-Omni 0.28, a single diffusion stage on one GPU runs inside the process that serves /metrics: the counters
come out there. A diffusion worker that is a process of its own serves nothing, and prometheus_client's multiprocess
mode, in which other processes write files, knows no collectors: every call would have to write. There, ask the worker
with `collective_rpc("get_prompt_embed_cache_stats")`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .log import logger

_PREFIX = "omni_tensor_key_prompt_embed_cache"
_COUNTERS = {
    "hits": "encode_prompt() calls answered from the cache.",
    "misses": "encode_prompt() calls that ran and were stored.",
    "bypassed": "encode_prompt() calls that ran past the cache.",
}
Read = Callable[[], Iterable[tuple[str, dict[str, Any]]]]


class Collector:
    """Reads the counters when somebody asks for the metrics; costs nothing otherwise.

    read: the name of each pipeline and what its worker's `get_prompt_embed_cache_stats` returns.
    """

    def __init__(self, read: Read) -> None:
        self._core: Any = importlib.import_module("prometheus_client.core")
        self._read = read

    def _families(self) -> dict[str, Any]:
        core = self._core
        families = {
            name: core.CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=["pipeline"])
            for name, text in _COUNTERS.items()
        }
        families["size"] = core.GaugeMetricFamily(f"{_PREFIX}_entries", "Entries in the cache.", labels=["pipeline"])
        families["reasons"] = core.CounterMetricFamily(
            f"{_PREFIX}_bypass_reasons",
            "Calls that were not keyed, by the argument to blame and the reason.",
            labels=["pipeline", "argument", "reason"],
        )
        return families

    def describe(self) -> Iterator[Any]:
        """The families, without a sample: asked for when this is registered."""
        yield from self._families().values()

    def collect(self) -> Iterator[Any]:
        """The families with their samples. Workers whose pipelines have one name are added up."""
        families, sums, reasons = self._families(), Counter[tuple[str, str]](), dict[str, Any]()
        for pipeline, stats in self._read():
            for name in (*_COUNTERS, "size"):
                sums[name, pipeline] += stats.get(name, 0)
            reasons = stats["omni_tensor_key"].get("bypassed", {})  # of the whole process
        for (name, pipeline), value in sums.items():
            families[name].add_metric([pipeline], value)
        for pipeline, arguments in reasons.items():
            for argument, counts in arguments.items():
                for reason, count in counts.items():
                    families["reasons"].add_metric([pipeline, argument, reason], count)
        yield from families.values()


def register(read: Read) -> Callable[[], None]:
    """Register a collector where prometheus_client is in use. Returns what takes it out again."""
    client: Any = sys.modules.get("prometheus_client")
    if client is None or os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return lambda: None
    try:
        collector = Collector(read)
        client.REGISTRY.register(collector)
    except Exception as error:  # somebody has these names, for one: not worth anything but a line
        logger.warning("omni_tensor_key: no metrics for Prometheus: %s", error)
        return lambda: None

    def unregister() -> None:
        with contextlib.suppress(KeyError):  # somebody has taken it out already
            client.REGISTRY.unregister(collector)

    return unregister
