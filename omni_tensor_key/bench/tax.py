"""What those pay who gain nothing: calls that upstream keys or bypasses anyway, and processes without a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median
from typing import Any, NamedTuple

import torch

from .calls import Contenders, cached, make_prompt
from .tables import HEADLINE, Table
from .timing import Contender, Effort, Sample, compete

INACTIVE = "without the extension"
ACTIVE = "with the extension"

# Each fork starts from a process that has torch, as every process of vLLM-Omni has, and nothing of this package.
_PROBE = """
import json, os, sys, time
import torch

def probe():
    start = time.perf_counter_ns()
    from omni_tensor_key.plugin import register
    register()
    took = time.perf_counter_ns() - start
    diffusion = any(name.startswith("vllm_omni.diffusion") for name in sys.modules)
    return {"ns": took, "diffusion": diffusion, "cuda": torch.cuda.is_initialized()}

for _ in range(int(sys.argv[1])):
    sys.stdout.flush()
    if os.fork() == 0:
        print(json.dumps(probe()), flush=True)
        os._exit(0)
    os.wait()
"""


class _PictureLike:
    """An object that upstream cannot key, as a PIL image is."""


def tax_table(contenders: Contenders, effort: Effort) -> Table:
    """Time calls that the extension does nothing for, with and without it."""
    prompt = make_prompt(1, HEADLINE)
    embeds = torch.zeros(1, HEADLINE, 64)
    calls: dict[str, dict[str, Any]] = {
        "a string (hit)": {"prompt_ids": "a photograph of an astronaut riding a horse"},
        f"lists of {HEADLINE:,} tokens (hit)": prompt.lists,
        "a float tensor (bypass)": {"prompt_ids": prompt.ids, "attention_mask": embeds},
        "a picture-like object (bypass)": {"prompt_ids": "a photograph", "attention_mask": _PictureLike()},
        "precomputed embeddings (bypass)": {"prompt_ids": None, "prompt_embeds": embeds, "prompt_embeds_mask": embeds},
    }
    table = Table("tax", "Wrapped calls that the extension does nothing for", "µs", "call", [INACTIVE, ACTIVE])
    for name, arguments in calls.items():
        modules = {INACTIVE: contenders.plain, ACTIVE: contenders.active}
        samples = compete({state: _call(module, arguments) for state, module in modules.items()}, effort)
        table.rows[name] = [samples[INACTIVE], samples[ACTIVE]]
    return table


def _call(module: Any, arguments: dict[str, Any]) -> Contender:
    return Contender("encode(**arguments)", {"encode": cached(module, 1)[0], "arguments": arguments})


class Activation(NamedTuple):
    """The plugin's import and entry point in processes that never import the cache."""

    sample: Sample
    imports_diffusion: bool
    initializes_cuda: bool


def measure_activation(forks: int) -> Activation:
    """Run the entry point in *forks* fresh processes."""
    command = [sys.executable, "-c", _PROBE, str(forks)]
    environment = {**os.environ, "OMNI_TENSOR_KEY": "1"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    probes = [json.loads(line) for line in output.splitlines()]
    times = [float(probe["ns"]) for probe in probes]
    return Activation(
        Sample(min(times), median(times)),
        any(probe["diffusion"] for probe in probes),
        any(probe["cuda"] for probe in probes),
    )
