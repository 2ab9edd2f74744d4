"""Replicas of a text encoder as Ray actors, each with vLLM-Omni's prompt cache and this extension.

Every prompt is sampled several times, all samples are sent at once, and a router deals them out twice: to the replica
with the fewest requests in flight, and with affinity, where a prompt's uid sticks to the replica that got it first.
Exit code 1 if, with affinity, a prompt is encoded more than once.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

# Before ray is imported: an example has nothing to report to anybody.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import typer
from rich.console import Console
from rich.table import Table

# What a trainer puts into its own runtime environment: Ray's workers do not have the driver's variables.
RUNTIME_ENV = {
    "env_vars": {
        "OMNI_DIFFUSION_PROMPT_EMBED_CACHE": "1",
        "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE": "64",
    }
}


@ray.remote(num_cpus=0)
class Replica:
    """One rollout worker: a real text encoder behind the real cache, called with tensors that are made early."""

    def __init__(self) -> None:
        from transformers import AutoModel
        from vllm_omni.plugins import load_omni_general_plugins

        from omni_tensor_key import demo

        load_omni_general_plugins()  # as each process of vLLM-Omni does
        self.demo = demo
        self.text_encoder = AutoModel.from_pretrained(demo.MODEL).eval()

    def start(self) -> None:
        """Begin with an empty cache."""
        from vllm_omni.diffusion.cache import prompt_embed_cache

        enabled, size = prompt_embed_cache.resolve_prompt_embed_cache_config()
        self.pipeline = self.demo.Pipeline(self.text_encoder)
        self.cache = prompt_embed_cache.install_prompt_embed_cache(self.pipeline, max_size=size, enabled=enabled)
        self.samples = 0
        self.seconds = 0.0

    def sample(self, request: Any) -> None:
        """Encode the prompt of one sample; a real worker would denoise with it now."""
        _, seconds = self.demo.encode(self.pipeline, request)
        self.samples += 1
        self.seconds += seconds

    def report(self) -> dict[str, Any]:
        """What this replica has done since it started."""
        counts = {name: self.cache.stats()[name] for name in ("hits", "misses", "bypassed")}
        return {"samples": self.samples, **counts, "seconds": self.seconds}


class Router:
    """Chooses a replica for each sample."""

    def __init__(self, replicas: list[Any], affinity: bool) -> None:
        self.replicas = replicas
        self.affinity = affinity
        self.in_flight: Counter[int] = Counter()
        self.homes: dict[int, int] = {}

    def send(self, uid: int, request: Any) -> Any:
        """Send one sample of the prompt `uid`."""
        least = min(range(len(self.replicas)), key=lambda index: self.in_flight[index])
        index = self.homes.setdefault(uid, least) if self.affinity else least
        self.in_flight[index] += 1
        return self.replicas[index].sample.remote(request)


def rollout(replicas: list[Any], requests: list[Any], samples: int, affinity: bool) -> list[dict[str, Any]]:
    """Run all samples and return the replicas' reports."""
    ray.get([replica.start.remote() for replica in replicas])
    router = Router(replicas, affinity)
    ray.get([router.send(uid, request) for uid, request in enumerate(requests) for _ in range(samples)])
    return ray.get([replica.report.remote() for replica in replicas])


def main(replicas: int = 2, prompts: int = 8, samples: int = 16) -> None:
    """Sample prompts on replicas with both routings and print what each replica did."""
    from transformers import AutoTokenizer

    from omni_tensor_key import demo

    requests = demo.load_requests(AutoTokenizer.from_pretrained(demo.MODEL))[:prompts]
    ray.init(address="local", num_cpus=replicas, runtime_env=RUNTIME_ENV, include_dashboard=False, log_to_driver=False)
    actors = [Replica.remote() for _ in range(replicas)]
    reports = {name: rollout(actors, requests, samples, name == "affinity") for name in ("least loaded", "affinity")}
    ray.shutdown()
    table = Table("routing", "replica", "samples", "hits", "misses", "bypassed", "encoder seconds")
    for routing, rows in reports.items():
        for index, row in enumerate(rows):
            cells = (f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
            table.add_row(routing, str(index), *cells)
    Console().print(table)
    misses = sum(row["misses"] for row in reports["affinity"])
    print(f"{len(requests)} prompts, {samples} samples each: {misses} encoder runs with affinity.")
    if misses != len(requests):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
