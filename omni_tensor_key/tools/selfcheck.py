"""Three calls with tensors through the real cache, in this process; `doctor` runs it in one of its own."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

# What precedes the one line of output that is read: libraries and sitecustomize print what they like.
ANSWER = "omni_tensor_key answers: "
EXPECTED = {"hits": 1, "misses": 2, "bypassed": 0}
TENSOR_BYTES = 24  # of each tensor of these calls


def _calls(device: str) -> dict[str, int]:
    import torch
    from vllm_omni.diffusion.cache import prompt_embed_cache

    class Pipeline:
        def encode_prompt(self, prompt_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return prompt_ids * attention_mask

    pipeline = Pipeline()
    cache = prompt_embed_cache.install_prompt_embed_cache(pipeline, max_size=4)
    mask = torch.ones(1, 3, dtype=torch.int64, device=device)
    for last in (7, 7, 8):
        pipeline.encode_prompt(torch.tensor([[5, 6, last]], device=device), attention_mask=mask)
    return {name: cache.stats()[name] for name in EXPECTED}


def run() -> dict[str, Any]:
    """Load the plugins as vLLM-Omni does and make the calls.

    Returns the counters of the cache under "seen", by device, and the lines that this package logged under "log".
    """
    import torch
    from vllm_omni.plugins import load_omni_general_plugins

    log = io.StringIO()
    logging.getLogger("vllm_omni.omni_tensor_key").addHandler(logging.StreamHandler(log))
    load_omni_general_plugins()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return {"seen": {device: _calls(device) for device in devices}, "log": log.getvalue().splitlines()}


if __name__ == "__main__":
    print(f"\n{ANSWER}{json.dumps(run())}")
