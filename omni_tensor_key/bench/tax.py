"""What those pay who gain nothing: calls that upstream keys or bypasses anyway, and processes without a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

import torch

from .calls import Contenders, cached, make_prompt
from .tables import HEADLINE, Table
from .timing import Contender, Effort, Sample, compete
from .upstream import ObjectDefaultPipeline, OneParameterPipeline, Pipeline

INACTIVE = "without the extension"
ACTIVE = "with the extension"
BOTH = "both"
ELAPSED = "elapsed"

_ONE_PARAMETER = "a string, the only parameter (hit)"
_OBJECT_DEFAULT = "a string, a parameter's default an object (hit)"
_PIPELINES = {_ONE_PARAMETER: OneParameterPipeline, _OBJECT_DEFAULT: ObjectDefaultPipeline}

# Torch first, as in every process of vLLM-Omni. Not in forks of one process: there, copied pages would be timed too.
_PROBE = """
import json, sys, time
import torch
clocks = time.perf_counter_ns, time.process_time_ns
start = [clock() for clock in clocks]
from omni_tensor_key.plugin import register
imported = [clock() for clock in clocks]
register()
end = [clock() for clock in clocks]
print(json.dumps({
    "import": [b - a for a, b in zip(start, imported)],
    "entry point": [b - a for a, b in zip(imported, end)],
    "both": [b - a for a, b in zip(start, end)],
    "diffusion": any(name.startswith("vllm_omni.diffusion") for name in sys.modules),
    "cuda": torch.cuda.is_initialized(),
}))
"""


class _PictureLike:
    """An object that upstream cannot key, as a PIL image is."""


def tax_table(contenders: Contenders, effort: Effort) -> Table:
    """Time calls that the extension does nothing for, with and without it."""
    prompt = make_prompt(1, HEADLINE)
    text = {"prompt_ids": "a photograph of an astronaut riding a horse"}
    embeds = torch.zeros(1, HEADLINE, 64)
    calls: dict[str, dict[str, Any]] = {
        "a string (hit)": text,
        _ONE_PARAMETER: text,
        _OBJECT_DEFAULT: text,
        f"lists of {HEADLINE:,} tokens (hit)": prompt.lists,
        "a float tensor (bypass)": {"prompt_ids": prompt.ids, "attention_mask": embeds},
        "a picture-like object (bypass)": {"prompt_ids": "a photograph", "attention_mask": _PictureLike()},
        "precomputed embeddings (bypass)": {"prompt_ids": None, "prompt_embeds": embeds, "prompt_embeds_mask": embeds},
    }
    table = Table("tax", "Wrapped calls that the extension does nothing for", "µs", "call", [INACTIVE, ACTIVE])
    for name, arguments in calls.items():
        make = _PIPELINES.get(name, Pipeline)
        modules = {INACTIVE: contenders.plain, ACTIVE: contenders.active}
        samples = compete({state: _call(module, make, arguments) for state, module in modules.items()}, effort)
        table.rows[name] = [samples[INACTIVE], samples[ACTIVE]]
    return table


def _call(module: Any, make: type[Pipeline], arguments: dict[str, Any]) -> Contender:
    return Contender("encode(**arguments)", {"encode": cached(module, 1, make)[0], "arguments": arguments})


def activation_table(processes: int) -> Table:
    """Time the plugin's import and entry point in new processes that never import the cache."""
    environment = {**os.environ, "OMNI_TENSOR_KEY": "1"}
    command = [sys.executable, "-c", _PROBE]
    runs = [subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment) for _ in range(processes)]
    probes = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    title = "The plugin in a process that never imports the cache"
    table = Table("activation", title, "ms", "what", [ELAPSED, "processor time"])
    for part in ("import", "entry point", BOTH):
        by_clock = zip(*(probe[part] for probe in probes), strict=True)
        table.rows[part] = [Sample(min(times), median(times)) for times in by_clock]
    diffusion = "imported" if any(probe["diffusion"] for probe in probes) else "not imported"
    cuda = "initialized" if any(probe["cuda"] for probe in probes) else "not initialized"
    table.notes.append(f"vllm_omni.diffusion: {diffusion}; CUDA: {cuda}. Torch is imported before the clock starts.")
    return table
