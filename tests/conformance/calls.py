"""Requests, the entry points that take them, and a record of what they make of encode_prompt()."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.diffusion.worker.utils import StepRequestState
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from .pipelines import EndOfEncoding, one_process


@dataclass
class Prompt:
    """One prompt. IDs and masks are what verl-omni sends: lists, or what a caller may send: tensors."""

    ids: Any = None
    mask: Any = None
    negative: Any = None
    text: str | None = None

    def payload(self) -> dict[str, Any]:
        """The prompt as verl-omni's server sends it to a pipeline."""
        sent = {
            "prompt_token_ids": self.ids,
            "prompt_mask": self.mask,
            "negative_prompt_ids": self.negative,
            "prompt": self.text,
        }
        return {name: value for name, value in sent.items() if value is not None}


@dataclass
class Request:
    """One call of an entry point."""

    prompts: list[Prompt]
    outputs: int = 1
    max_length: int = 512
    arguments: dict[str, Any] = field(default_factory=dict)  # further ones of forward()


def _requests(request: Request) -> list[OmniDiffusionRequest]:
    scale = 4.0 if any(prompt.negative is not None for prompt in request.prompts) else 1.0
    return [
        OmniDiffusionRequest(
            prompt=prompt.payload(),
            sampling_params=OmniDiffusionSamplingParams(
                seed=0,
                height=64,
                width=64,
                num_frames=121,
                num_inference_steps=2,
                num_outputs_per_prompt=request.outputs,
                max_sequence_length=request.max_length,
                true_cfg_scale=scale,
                guidance_scale=scale,
                extra_args={"global_steps": 1},
            ),
            request_id=f"request-{number}",
        )
        for number, prompt in enumerate(request.prompts)
    ]


def send(pipeline: Any, entry: str, request: Request) -> str:
    """Call an entry point as vLLM-Omni's runner does; return "" at the end of encoding, or how else it ended."""
    requests = _requests(request)
    try:
        with torch.inference_mode(), one_process():
            if entry == "forward":
                pipeline.forward(DiffusionRequestBatch(requests=requests), **request.arguments)
            else:
                (only,) = requests
                state = StepRequestState(only.request_id, only.sampling_params, prompt=only.prompt)
                pipeline.prepare_encode(state, **request.arguments)
    except EndOfEncoding:
        return ""
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return "returns without encoding"


@dataclass
class Call:
    """One call of encode_prompt()."""

    outcome: str  # hit, miss, bypass; "" without a cache
    output: Any
    encoder_ran: bool


class Recorder:
    """Stands in front of a pipeline's encode_prompt() and of the cache before it."""

    def __init__(self, pipeline: Any, cache: Any) -> None:
        self._pipeline = pipeline
        self._cache = cache
        self._encode = pipeline.encode_prompt
        self.calls: list[Call] = []
        object.__setattr__(pipeline, "encode_prompt", self._record)

    def _counts(self) -> dict[str, int]:
        stats = {} if self._cache is None else self._cache.stats()
        names = {"hits": "hit", "misses": "miss", "bypassed": "bypass"}
        return {outcome: stats[name] for name, outcome in names.items() if name in stats}

    def _record(self, *args: Any, **kwargs: Any) -> Any:
        before, ran = self._counts(), self._pipeline.text_encoder.runs
        output = self._encode(*args, **kwargs)
        changed = [outcome for outcome, count in self._counts().items() if count != before[outcome]]
        self.calls.append(Call("".join(changed), output, self._pipeline.text_encoder.runs > ran))
        return output
