"""Requests, the entry points that take them, and a record of what they hand to encode_prompt()."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm_omni.diffusion.cache.prompt_embed_cache import _PRECOMPUTED_EMBED_ARGS
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.diffusion.worker.utils import StepRequestState
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from .parts import runs
from .pipelines import EndOfEncoding, one_process


@dataclass
class Prompt:
    """One prompt. IDs and masks are what verl-omni sends: lists, or what a caller may send: tensors."""

    ids: Any = None
    mask: Any = None
    negative: Any = None
    negative_mask: Any = None
    text: str | None = None
    negative_text: str | None = None
    image: Any = None


@dataclass
class Request:
    """One call of an entry point."""

    prompts: list[Prompt]
    outputs: int = 1
    max_length: int = 512
    arguments: dict[str, Any] = field(default_factory=dict)  # further ones of forward()


def payload(architecture: str, prompt: Prompt) -> dict[str, Any]:
    """The prompt as verl-omni's server sends it to a pipeline."""
    sent = {
        "prompt_token_ids": prompt.ids,
        "prompt_mask": prompt.mask,
        "negative_prompt_ids": prompt.negative,
        "negative_prompt_mask": prompt.negative_mask,
        "prompt": prompt.text,
        "negative_prompt": prompt.negative_text,
    }
    if architecture == "StableDiffusion3Pipeline":
        for name, ids in (("extra_prompt_ids", prompt.ids), ("negative_extra_prompt_ids", prompt.negative)):
            sent[name] = None if ids is None else {"clip": ids, "t5": ids}
    if architecture == "MiniMaxH3Pipeline":
        sent["prompt"] = prompt.text or "a text that the adapter replaces"
    if prompt.image is not None:
        sent["multi_modal_data"] = {"image": [prompt.image] if "Edit" in architecture else prompt.image}
        if "Edit" in architecture:
            sent["additional_information"] = {"vae_images": [None], "vae_image_sizes": [(1024, 1024)]}
    return {name: value for name, value in sent.items() if value is not None}


def requests_for(architecture: str, request: Request) -> list[OmniDiffusionRequest]:
    guided = any(prompt.negative is not None or prompt.negative_text is not None for prompt in request.prompts)
    size = 1024 if "Edit" in architecture else 64
    return [
        OmniDiffusionRequest(
            prompt=payload(architecture, prompt),
            sampling_params=OmniDiffusionSamplingParams(
                seed=0,
                height=size,
                width=size,
                num_frames=121,
                num_inference_steps=2,
                num_outputs_per_prompt=request.outputs,
                max_sequence_length=request.max_length,
                true_cfg_scale=4.0 if guided else 1.0,
                guidance_scale=4.0 if guided else 1.0,
                extra_args={"global_steps": 1, "minimax_h3_token_id_native": True, "aspect_ratio": "16:9"},
            ),
            request_id=f"request-{number}",
        )
        for number, prompt in enumerate(request.prompts)
    ]


def send(pipeline: Any, architecture: str, entry: str, request: Request) -> str:
    """Call an entry point as vLLM-Omni's runner does; return "" at the end of encoding, or how else it ended."""
    requests = requests_for(architecture, request)
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


class Uncacheable(Exception):
    """A value that must not be part of a key."""


def content(value: Any) -> Any:
    """All that a key may depend on, written down independently of both implementations."""
    if isinstance(value, torch.Tensor):
        if value.numel() and (value.is_floating_point() or value.is_complex()):
            raise Uncacheable(f"{value.dtype} tensor")
        return ("tensor", str(value.dtype), tuple(value.shape), str(value.device), str(value.tolist()))
    if isinstance(value, list | tuple):
        return ("list", tuple(content(item) for item in value))
    if isinstance(value, dict):
        return ("dict", tuple((key, content(item)) for key, item in sorted(value.items())))
    if value is None or isinstance(value, str | int | float | bool):
        return (type(value).__name__, value)
    if isinstance(value, torch.device | torch.dtype):
        return str(value)
    raise Uncacheable(type(value).__name__)


def has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return any(map(has_tensor, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def copied(value: Any) -> Any:
    """A copy of everything that tells whether somebody has written to a value."""
    if isinstance(value, torch.Tensor):
        return (value.data_ptr(), value.stride(), value.dtype, value.clone())
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value


def identical(a: Any, b: Any) -> bool:
    """Whether two values agree in structure, dtype, device, shape and every element."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
            and torch.equal(a, b)
        )
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    return bool(a is b or a == b)


@dataclass
class Call:
    """One call of encode_prompt()."""

    key: Any  # the content of its arguments, or None with a reason for a bypass
    reason: str
    tensors: bool
    outcome: str  # hit, miss, bypass; "" without a cache
    output: Any
    encoder_ran: bool
    before: Any
    after: Any


class Recorder:
    """Stands in front of a pipeline's encode_prompt() and of the cache before it."""

    def __init__(self, pipeline: Any, cache: Any) -> None:
        self._pipeline = pipeline
        self._cache = cache
        self._encode = pipeline.encode_prompt
        self._signature = inspect.signature(self._encode)
        self.calls: list[Call] = []
        object.__setattr__(pipeline, "encode_prompt", self._record)

    def _stats(self) -> dict[str, int]:
        return {} if self._cache is None else self._cache.stats()

    def _record(self, *args: Any, **kwargs: Any) -> Any:
        key, reason = None, ""
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
            bound.apply_defaults()
            given = [name for name in _PRECOMPUTED_EMBED_ARGS if bound.arguments.get(name) is not None]
            if given:
                raise Uncacheable(given[0])
            key = content(bound.arguments)
        except Uncacheable as error:
            reason = str(error)
        except TypeError:
            reason = "the arguments do not fit"
        stats, ran, before = self._stats(), runs(self._pipeline), copied((args, kwargs))
        call = Call(key, reason, has_tensor((args, kwargs)), "", None, False, before, None)
        self.calls.append(call)
        try:
            call.output = self._encode(*args, **kwargs)
        finally:
            changed = [name for name, count in self._stats().items() if count != stats[name] and name != "size"]
            call.outcome = {"hits": "hit", "misses": "miss", "bypassed": "bypass", "": ""}["".join(changed)]
            call.encoder_ran = runs(self._pipeline) > ran
            call.after = copied((args, kwargs))
        return call.output
