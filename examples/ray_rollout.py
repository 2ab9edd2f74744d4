"""A rollout over several replicas with Ray: who hits depends on which replica a sample goes to.

Each replica is a Ray actor with vLLM-Omni's real prompt-embedding cache around a real text encoder. A prompt is sampled
n times, as in GRPO. Routed to the least-loaded replica, its samples spread, and each replica that gets one encodes the
prompt once; routed by its uid to the replica that got it first, it is encoded once in all.

    pip install ray
    python examples/ray_rollout.py --replicas 2 --prompts 8 --n 16
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from rich.console import Console
from rich.table import Table

# Ray's processes do not inherit the driver's shell. A training job passes the same to its ray.init().
ENVIRONMENT = {
    "OMNI_DIFFUSION_PROMPT_EMBED_CACHE": "1",
    "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE": "256",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@ray.remote(num_cpus=1)
class Replica:
    """One rollout server: an encoder, its cache, and nothing else of a diffusion model."""

    def __init__(self) -> None:
        from vllm_omni.plugins import load_omni_general_plugins

        load_omni_general_plugins()  # as vLLM-Omni does in each of its processes; this is what activates the extension

        from transformers import AutoModel

        from omni_tensor_key import demo

        self._encoder = AutoModel.from_pretrained(demo.MODEL).eval()
        self.start()

    def start(self) -> None:
        """Begin with an empty cache."""
        from vllm_omni.diffusion.cache import install_prompt_embed_cache, resolve_prompt_embed_cache_config

        from omni_tensor_key import demo

        enabled, size = resolve_prompt_embed_cache_config()
        self._pipeline = demo.Pipeline(self._encoder)
        self._cache = install_prompt_embed_cache(self._pipeline, max_size=size, enabled=enabled)
        self._seconds = 0.0

    def encode(self, token_ids: list[int], mask: list[int]) -> None:
        """Encode one sample's prompt, which arrives as lists and is made into tensors here."""
        from omni_tensor_key import demo

        self._seconds += demo.encode(self._pipeline, demo.Request(token_ids, mask))[1]

    def counters(self) -> dict[str, Any]:
        """What this replica has done since start()."""
        counted = self._cache.stats()
        return {**{name: counted[name] for name in ("hits", "misses", "bypassed")}, "seconds": self._seconds}


@dataclass
class Router:
    """Picks a replica for each sample. All samples of a step are handed out before the first is done."""

    replicas: int
    sticky: bool
    loads: Counter[int] = field(default_factory=Counter)
    homes: dict[str, int] = field(default_factory=dict)

    def pick(self, uid: str) -> int:
        """The replica for a sample of the prompt `uid`."""
        replica = min(range(self.replicas), key=lambda i: self.loads[i])
        if self.sticky:
            replica = self.homes.setdefault(uid, replica)
        self.loads[replica] += 1
        return replica


def rollout(
    replicas: list[Any], prompts: list[Any], n: int, router: Router
) -> tuple[list[set[str]], list[dict[str, Any]]]:
    """Sample each prompt n times. Returns, for each replica, the uids it got and its counters."""
    ray.get([replica.start.remote() for replica in replicas])
    seen: list[set[str]] = [set() for _ in replicas]
    pending = []
    for uid, prompt in enumerate(prompts):
        for _ in range(n):
            i = router.pick(str(uid))
            seen[i].add(str(uid))
            pending.append(replicas[i].encode.remote(prompt.prompt_token_ids, prompt.prompt_mask))
    ray.get(pending)
    return seen, ray.get([replica.counters.remote() for replica in replicas])


def run(replica_count: int, prompt_count: int, n: int, show: Callable[[Table], None]) -> bool:
    """Roll out with both routings; returns whether every count is the expected one."""
    from transformers import AutoTokenizer

    from omni_tensor_key import demo

    prompts = demo.load_requests(AutoTokenizer.from_pretrained(demo.MODEL))[:prompt_count]
    replicas = [Replica.remote() for _ in range(replica_count)]
    table = Table("routing", "replica", "samples", "hits", "misses", "bypassed", "encoder seconds")
    good = True
    for name, sticky in (("least-loaded", False), ("by uid", True)):
        router = Router(replica_count, sticky)
        seen, counted = rollout(replicas, prompts, n, router)
        for i, counters in enumerate(counted):
            counts = [counters[key] for key in ("hits", "misses", "bypassed")]
            # One miss for each prompt that came here, a hit for each of its other samples.
            good = good and counts == [router.loads[i] - len(seen[i]), len(seen[i]), 0]
            table.add_row(name, str(i), str(router.loads[i]), *map(str, counts), f"{counters['seconds']:.2f}")
        if sticky:
            good = good and sum(counters["misses"] for counters in counted) == len(prompts)
    show(table)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=16, help="samples of each prompt")
    args = parser.parse_args()
    ray.init(
        num_cpus=args.replicas,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": ENVIRONMENT},
    )
    try:
        good = run(args.replicas, args.prompts, args.n, Console(width=100).print)
    finally:
        ray.shutdown()
    raise SystemExit(0 if good else "A count differs from the expected one.")


if __name__ == "__main__":
    main()
