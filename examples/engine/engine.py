"""One engine of vLLM-Omni, and what a trainer does with it: rollouts, weight syncs, sleep and wake-up."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

HERE = Path(__file__).resolve().parent
ADAPTER = "adapter.EarlyTensorPipeline"
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial"
    " relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def prepare_environment() -> None:
    """Set what the engine's processes read when they start; call it before vLLM-Omni is imported.

    The workers find the adapter, the worker extension and, where there is no accelerator, the CPU platform on
    PYTHONPATH. torch gets as many threads as there are idle cores, unless OMP_NUM_THREADS says otherwise.
    """
    folders = [str(HERE)]
    if not torch.accelerator.is_available():
        folders.append(str(HERE / "cpu"))
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    idle = len(os.sched_getaffinity(0)) - round(os.getloadavg()[0])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, idle)))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@dataclass
class Rollout:
    """The samples of one rollout, prompt by prompt, and what they cost on the first rank."""

    images: list[Image] = field(repr=False)
    bits: list[bytes] = field(repr=False)  # of each sample: its image, and latents and log-probabilities if returned
    runs: int  # of the text encoder
    hits: int
    misses: int
    bypassed: int
    seconds: float  # in the text encoder

    def counts(self) -> tuple[int, ...]:
        """Encoder runs, hits, misses, bypassed."""
        return self.runs, self.hits, self.misses, self.bypassed


class Engine:
    """AsyncOmni with the prompt cache on, an adapter and RolloutWorker; *arguments* go to AsyncOmni."""

    def __init__(self, model: str, adapter: str = ADAPTER, **arguments: Any) -> None:
        from transformers import AutoTokenizer
        from vllm_omni.entrypoints import AsyncOmni

        defaults: dict[str, Any] = {
            "enable_prompt_embed_cache": True,
            "prompt_embed_cache_size": 256,
            "enforce_eager": True,
            "num_gpus": 1,
            "distributed_executor_backend": "mp",
            "worker_extension_cls": "worker.RolloutWorker",
            "custom_pipeline_args": {"pipeline_class": adapter},
        }
        self._omni = AsyncOmni(model=model, **(defaults | arguments))
        self._tokenizer = AutoTokenizer.from_pretrained(model, subfolder="tokenizer")
        self._requests = 0

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every rank's worker; return the ranks' answers.

        Raises RuntimeError where a worker has no such method.
        """
        (answers,) = await self._omni.collective_rpc(method, args=args, kwargs=kwargs)  # one stage
        answers = answers if isinstance(answers, list) else [answers]
        for answer in answers:
            if isinstance(answer, dict) and answer.get("supported") is False:
                raise RuntimeError(f"{method}: {answer}")
        return answers

    async def rollout(
        self, prompts: list[str], n: int, size: int = 64, steps: int = 2, on_sample: Callable[[], object] = lambda: None
    ) -> Rollout:
        """Sample each prompt *n* times with seeds 0 to n - 1, all requests at once."""
        (before, *_) = await self.call("counts")
        ids = [self._tokenizer(TEMPLATE.format(prompt)).input_ids for prompt in prompts]
        samples = (self._sample(each, seed, size, steps, on_sample) for each in ids for seed in range(n))
        outputs = await asyncio.gather(*samples)
        (after, *_) = await self.call("counts")
        cost = {name: after[name] - before[name] for name in ("runs", "hits", "misses", "bypassed", "seconds")}
        return Rollout([output.images[0] for output in outputs], [_bits(output) for output in outputs], **cost)

    async def _sample(self, ids: list[int], seed: int, size: int, steps: int, on_sample: Callable[[], object]) -> Any:
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        self._requests += 1
        parameters = OmniDiffusionSamplingParams(
            height=size, width=size, num_inference_steps=steps, seed=seed, true_cfg_scale=1.0
        )
        request = {"prompt": {"prompt_token_ids": ids}, "sampling_params_list": [parameters]}
        async for output in self._omni.generate(request_id=f"sample-{self._requests}", **request):
            last = output
        on_sample()
        return last

    async def sleep(self) -> None:
        """Put the workers to sleep, and wake them up."""
        await self.call("sleep", level=1)
        await self.call("wake_up", tags=["weights"])

    def close(self) -> None:
        """End the workers."""
        self._omni.shutdown()


def _bits(output: Any) -> bytes:
    tensors = [getattr(output, name, None) for name in ("trajectory_latents", "trajectory_log_probs")]
    parts = [output.images[0].tobytes(), *(tensor.numpy().tobytes() for tensor in tensors if tensor is not None)]
    return b"".join(parts)
