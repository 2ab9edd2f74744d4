"""What n samples of each prompt cost in runs of the text encoder, on a real adapter.

How requests reach the replicas is played here by the rule of verl's load balancer: a request goes to the replica with
the fewest requests in flight, and all of a step's requests are in flight at once, so they are dealt out in turn. Each
replica takes its requests in order.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm_omni.diffusion.cache import prompt_embed_cache

from .calls import Prompt, Request, send
from .checkout import Checkout
from .conftest import adapters_of
from .pipelines import BUILDERS

PROMPTS, N = 8, 16
# replicas, whether all samples of a prompt go to one, requests in a batch, entry point, and the runs of the encoder
# that have to be left of PROMPTS * N
SETTINGS = [
    (1, False, 1, "forward", PROMPTS),
    (1, False, 1, "prepare_encode", PROMPTS),
    (4, False, 1, "forward", 4 * PROMPTS),
    (4, True, 1, "forward", PROMPTS),
    (1, False, 8, "forward", PROMPTS),  # every batch is of one prompt
    (4, True, 8, "forward", PROMPTS),
    (4, False, 8, "forward", PROMPTS * N // 8),  # four samples each of two prompts: no batch comes twice
    (1, False, 6, "forward", 14),  # 22 batches; only one that repeats the one before it hits
]


@pytest.mark.parametrize(("replicas", "affinity", "batch", "entry", "expected"), SETTINGS)
def test_runs_of_the_encoder(
    pytestconfig: pytest.Config,
    checkout: Checkout,
    replicas: int,
    affinity: bool,
    batch: int,
    entry: str,
    expected: int,
    extension: str,
    rng: random.Random,
) -> None:
    adapter = next(item for item in adapters_of(pytestconfig) if item.keys == ("QwenImagePipeline", "flow_grpo"))
    cls = checkout.load(adapter)
    prompts = [[rng.randrange(1000, 20000) for _ in range(50)] for _ in range(PROMPTS)]
    queues: list[list[list[int]]] = [[] for _ in range(replicas)]
    for number in range(PROMPTS * N):
        prompt = number // N
        queues[(prompt if affinity else number) % replicas].append(prompts[prompt])
    pipelines: list[Any] = [BUILDERS[adapter.architecture](cls) for _ in queues]
    calls = 0
    for pipeline, queue in zip(pipelines, queues, strict=True):
        prompt_embed_cache.install_prompt_embed_cache(pipeline)
        for start in range(0, len(queue), batch):
            request = Request([Prompt(list(ids)) for ids in queue[start : start + batch]])
            assert send(pipeline, entry, request) == ""
            calls += 1
    total = sum(pipeline.text_encoder.runs for pipeline in pipelines)
    assert total == (expected if extension == "on" else calls)
