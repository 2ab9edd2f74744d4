"""Outputs that are edited after they were cached. Run as a script: prints what becomes of each, as JSON."""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch

Pair = namedtuple("Pair", "embeds mask")


def first(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: torch.ones(2, 3).to(dtype)


OUTPUTS: dict[str, Callable[[], Any]] = {
    "float32": first(torch.float32),
    "float64": first(torch.float64),
    "bfloat16": first(torch.bfloat16),
    "float16": first(torch.float16),
    "float8": first(torch.float8_e4m3fn),
    "bool": first(torch.bool),
    "int64": first(torch.int64),
    "uint8": first(torch.uint8),
    "complex64": first(torch.complex64),
    "scalar": lambda: torch.tensor(1.0),
    "strided": lambda: torch.ones(4, 4)[:, 1:3],
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(2, dtype=torch.complex64).imag.neg(),
    "empty": lambda: torch.empty(0, 4),
    "none": lambda: None,
    "number": lambda: 3,
    "tuple": lambda: (torch.zeros(2), torch.ones(2)),
    "nested": lambda: [torch.zeros(2), {"a": (None, torch.ones(2)), "b": 3}],
    "namedtuple": lambda: Pair(torch.zeros(2), torch.ones(2)),
    "list": lambda: [torch.zeros(2), torch.ones(2)],
    "dict": lambda: {"a": torch.zeros(2)},
}


def set_first(tensor: torch.Tensor) -> None:
    view = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    view[(0,) * view.dim()] = 0


# What is done to the value that a hit returns.
EDITS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{name: (name, set_first) for name in list(OUTPUTS)[:11]},
    "tuple, second": ("tuple", lambda value: value[1].zero_()),
    "deep inside": ("nested", lambda value: value[1]["a"][1].add_(1)),
    "namedtuple, first": ("namedtuple", lambda value: value.embeds.fill_(2)),
    "through a view": ("strided", lambda value: value.t()[0].zero_()),
    "through .data": ("float32", lambda value: value.data.zero_()),
    "sign of zero": ("tuple", lambda value: value[0].neg_()),
    "other shape": ("float32", lambda value: value.resize_(3, 2)),
    "other tensor": ("list", lambda value: value.__setitem__(0, torch.ones(2))),
    "one more": ("list", lambda value: value.append(torch.ones(2))),
    "one less": ("list", lambda value: value.pop()),
    "one more in a dict": ("dict", lambda value: value.update(b=torch.ones(2))),
}
HARMLESS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the same value": ("float32", lambda value: value.fill_(1)),
    "out of place": ("float32", lambda value: (value + 1, value * 2, value.repeat(2, 1))),
    "read": ("nested", lambda value: value[1]["a"][1].sum().item()),
}


class Pipeline:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        return self.make()


def outcome(make: Callable[[], Any], edit: Callable[[Any], Any] | None, prompt: Any, by: str = "hit") -> str:
    from vllm_omni.diffusion.cache.prompt_embed_cache import install_prompt_embed_cache

    pipeline = Pipeline(make)
    cache = install_prompt_embed_cache(pipeline, max_size=2)
    value = pipeline.encode_prompt(prompt)
    if by == "hit":
        value = pipeline.encode_prompt(prompt)
    if edit is not None:
        edit(value)
    try:
        pipeline.encode_prompt(prompt)
        pipeline.encode_prompt(prompt)
    except RuntimeError as error:
        return str(error)
    assert cache.stats()["hits"] >= 2
    return ""


# Outputs that are the caller's own tensor, or a view of it.
ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda ids: ids,
    "view": lambda ids: ids[1:],
    "tuple": lambda ids: (torch.ones(2), ids.t()),
    "namedtuple": lambda ids: Pair(torch.ones(2), ids.view(-1)),
    "nested": lambda ids: [{"mask": (ids.unsqueeze(0), None)}],
    "other dtype": lambda ids: ids.view(torch.int32),
}


def reused_input(alias: Callable[[torch.Tensor], Any]) -> str:
    """The caller writes into the tensor that it has handed over and got back."""
    from vllm_omni.diffusion.cache.prompt_embed_cache import install_prompt_embed_cache

    class Returning:
        def encode_prompt(self, prompt_ids: Any) -> Any:
            return alias(prompt_ids)

    pipeline = Returning()
    cache = install_prompt_embed_cache(pipeline)
    buffer = torch.tensor([3, 5, 7])
    pipeline.encode_prompt(buffer)
    buffer.zero_()
    try:
        value = pipeline.encode_prompt(torch.tensor([3, 5, 7]))
    except RuntimeError as error:
        return str(error)
    assert cache.stats()["hits"] == 1
    return "" if repr(value) == repr(alias(torch.tensor([3, 5, 7]))) else f"the hit is {value}"


def kept_by_hits() -> str:
    """An entry that would have been dropped, had it not been asked for; then edited."""
    from vllm_omni.diffusion.cache.prompt_embed_cache import install_prompt_embed_cache

    pipeline = Pipeline(OUTPUTS["tuple"])
    cache = install_prompt_embed_cache(pipeline, max_size=3)
    for number in (0, 1, 2, 0, 3, 0, 4):
        value = pipeline.encode_prompt(torch.tensor([number]))
        if number == 0:
            oldest = value
    oldest[1].zero_()
    try:
        pipeline.encode_prompt(torch.tensor([0]))
    except RuntimeError as error:
        return str(error)
    assert cache.stats()["hits"] == 3
    return ""


def churn() -> dict[str, Any]:
    """Far more keys than entries, an edit of one that was dropped, and a cleared cache."""
    from vllm_omni.diffusion.cache.prompt_embed_cache import install_prompt_embed_cache

    pipeline = Pipeline(OUTPUTS["tuple"])
    cache = install_prompt_embed_cache(pipeline, max_size=4)
    for number in range(300):
        value = pipeline.encode_prompt(torch.tensor([number % 90]))
        for near in (number, number - 1):
            pipeline.encode_prompt(torch.tensor([near % 90]))
    hits = cache.stats()["hits"]
    value[1].zero_()
    for number in range(400, 410):
        pipeline.encode_prompt(torch.tensor([number]))
    pipeline.encode_prompt(torch.tensor([299 % 90]))  # encoded again
    cache.clear()
    for number in range(400, 410):
        pipeline.encode_prompt(torch.tensor([number]))
        pipeline.encode_prompt(torch.tensor([number]))
    sizes = []
    if "omni_tensor_key.upstream" in sys.modules:
        from omni_tensor_key import plugin

        fingerprints = plugin._state.doors[plugin.modules.CACHE]._fingerprints
        sizes = [len(stored) for stored in fingerprints._of.values()] if fingerprints else []
    return {"hits": hits, "most": max(sizes, default=0)}


def main() -> None:
    import omni_tensor_key

    omni_tensor_key.activate()
    prompts = {"tensor": torch.tensor([3, 5]), "list": [3, 5]}
    report: dict[str, Any] = {}
    for kind, prompt in prompts.items():
        report[f"unedited, {kind}"] = {name: outcome(make, None, prompt) for name, make in OUTPUTS.items()}
        for group, edits in {"edited": EDITS, "harmless": HARMLESS}.items():
            report[f"{group}, {kind}"] = {
                name: outcome(OUTPUTS[output], edit, prompt) for name, (output, edit) in edits.items()
            }
    report["reused input"] = {name: reused_input(alias) for name, alias in ALIASES.items()}
    report["edited by the caller of the miss"] = outcome(OUTPUTS["tuple"], lambda v: v[0].add_(1), [1], by="miss")
    report["edited after it was kept by hits"] = kept_by_hits()
    report["churn"] = churn()
    print("REPORT", json.dumps(report))


if __name__ == "__main__":
    main()
