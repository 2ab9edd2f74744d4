"""One rank among several that see the same calls. Run as a script with a seed and a number: prints what it decided."""

from __future__ import annotations

import collections
import json
import random
import sys
from typing import Any

import torch

CALLS, PROMPTS, ENTRIES = 2000, 12, 24


def argument(rng: random.Random, depth: int = 0) -> Any:
    """Token IDs in one of the forms in which they come, or something that cannot be keyed."""
    prompt = rng.randrange(PROMPTS)
    ids = [(prompt * 31 + position) % 997 for position in range(4 + prompt % 5)]
    kind = rng.choices(
        ["tensor", "list", "text", "column", "batch", "nested", "dict", "numpy", "empty", "bypass"],
        [12, 6, 2, 2, 2, 2, 2, 1, 1, 3],
    )[0]
    if kind == "tensor":
        return torch.tensor(ids, dtype=rng.choice([torch.int64, torch.int32]))
    if kind == "text":
        return f"prompt {prompt}"
    if kind == "column":
        return torch.tensor([ids, ids]).t()[:, prompt % 2]
    if kind == "batch":
        return torch.tensor([ids] * 2)
    if kind == "nested":
        return [torch.tensor(ids), (torch.tensor([prompt]), None)]
    if kind == "dict":
        # Its keys in any order: sets and dicts of strings come out differently under another hash seed.
        return {name: torch.tensor([prompt]) for name in {"ids", "mask", "pooled"}}
    if kind == "numpy":
        return torch.tensor(ids).numpy().astype("int64")[prompt % 4]
    if kind == "empty":
        return torch.tensor([])
    if kind == "bypass":
        return rng.choice(
            [
                lambda: torch.ones(3),
                lambda: torch.zeros((1 << 20) + 1, dtype=torch.uint8),
                lambda: torch.ones(2, dtype=torch.int64, device="meta"),
                lambda: torch.tensor([[prompt]]).to_sparse(),
                lambda: [torch.tensor(ids), object()],
                lambda: {1, 2},
                lambda: torch.tensor(ids).numpy(),
            ]
        )()
    return ids


class Pipeline:
    runs = 0

    def encode_prompt(self, prompt: Any, mask: Any = None, prompt_embeds: Any = None, n: int = 1) -> Any:
        self.runs += 1
        return torch.ones(1)


def drive(seed: str, number: int) -> dict[str, Any]:
    """Make the calls; return the decision about each, and what it was keyed as."""
    from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

    import omni_tensor_key

    omni_tensor_key.activate()
    assert omni_tensor_key.is_active()
    rng = random.Random(seed)
    pipeline = Pipeline()
    cache = upstream.install_prompt_embed_cache(pipeline, max_size=ENTRIES)
    decisions, digests, ballast = [], [], []
    for _ in range(CALLS):
        mask = rng.choice([None, [1, 1], torch.tensor([True, False]), torch.tensor([1, 1])])
        options: dict[str, Any] = {"mask": mask}
        if rng.random() < 0.04:
            options["prompt_embeds"] = torch.ones(1)
        if rng.random() < 0.04:
            options["unknown"] = 1
        prompt = argument(rng)
        before, runs = cache.stats(), pipeline.runs
        if number:  # another rank has another heap and another pace
            ballast.append([bytes(number * 100), object()])
        try:
            pipeline.encode_prompt(prompt, **options)
        except TypeError:
            assert "unknown" in options
        after = cache.stats()
        (decision,) = (name for name in ("hits", "misses", "bypassed") if after[name] > before[name])
        if decision == "misses" and before["size"] == ENTRIES:
            decision = "eviction"
        elif decision == "hits" and pipeline.runs > runs:
            decision = "verified"
        decisions.append(decision)
        if isinstance(prompt, torch.Tensor) and omni_tensor_key.explain(prompt) is None:
            digests.append(omni_tensor_key.tensor_key(prompt).hexdigest)
    counted = collections.Counter(decisions)
    return {
        "decisions": decisions,
        "digests": digests,
        "counted": counted,
        "bypassed": omni_tensor_key.stats()["bypassed"],
        # Shows that the processes differ in what they should not depend on.
        "hash of a string": hash("prompt_ids"),
        "address": id(pipeline),
    }


if __name__ == "__main__":
    print("REPORT", json.dumps(drive(sys.argv[1], int(sys.argv[2]))))
