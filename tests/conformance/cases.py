"""What is sent to each entry point, and what has to come of it where the entry point calls encode_prompt()."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import PIL.Image
import torch

from .calls import Prompt, Request
from .parts import VOCABULARY

Sent = tuple[Request, list[str]]  # a request, and what its calls of encode_prompt() must be with the extension on
_LENGTH = 60  # longer than the template that Qwen-Image's encoders cut off


@dataclass(frozen=True)
class Entry:
    """An entry point of an adapter, with what decides which cases make sense for it."""

    architecture: str
    name: str  # forward or prepare_encode
    batches: bool  # the adapter takes several requests at once

    @property
    def edits(self) -> bool:
        return "Edit" in self.architecture


class Maker:
    """Makes prompts for one test, from one seed."""

    def __init__(self, rng: random.Random, entry: Entry) -> None:
        self._rng = rng
        self._image = PIL.Image.new("RGB", (64, 64), (rng.randrange(256), 40, 90)) if entry.edits else None
        self.entry = entry

    def ids(self, length: int = _LENGTH) -> list[int]:
        return [self._rng.randrange(1000, VOCABULARY) for _ in range(length)]

    def other(self, ids: list[int]) -> list[int]:
        """The same IDs but for one, near the end, where no template hides it."""
        place = len(ids) - 1 - self._rng.randrange(10)
        return [*ids[:place], ids[place] % 1000 + 1, *ids[place + 1 :]]

    def request(self, *prompts: Prompt, **options: Any) -> Request:
        for prompt in prompts:
            prompt.image = prompt.image or self._image
        return Request(list(prompts), **options)


def _repeated(make: Maker) -> list[Sent]:
    ids = make.ids()
    return [(make.request(Prompt(list(ids))), [outcome]) for outcome in ("miss", "hit", "hit")]


def _other_ids(make: Maker) -> list[Sent]:
    ids = make.ids()
    sent = [(ids, "miss"), (make.other(ids), "miss"), (ids[::-1], "miss"), (ids, "hit")]
    return [(make.request(Prompt(each)), [outcome]) for each, outcome in sent]


def _other_length(make: Maker) -> list[Sent]:
    ids = make.ids()
    sent = [(ids, "miss"), (ids[:-1], "miss"), ([*ids, 0], "miss"), (ids[:-1], "hit")]
    return [(make.request(Prompt(each)), [outcome]) for each, outcome in sent]


def _masks(make: Maker) -> list[Sent]:
    ids, full = make.ids(), torch.ones(1, _LENGTH, dtype=torch.bool)
    short = full.clone()
    short[:, -1] = False
    columns = torch.stack([full[0], short[0]], dim=-1)[None, :, 1]  # `short` again, with gaps between its elements
    sent = [(full, "miss"), (short, "miss"), (full, "hit"), (columns, "hit")]
    return [(make.request(Prompt(torch.tensor([ids]), mask)), [outcome]) for mask, outcome in sent]


def _mask_lists(make: Maker) -> list[Sent]:
    ids = make.ids()
    return [(make.request(Prompt(list(ids), [1] * _LENGTH)), [outcome]) for outcome in ("miss", "hit")]


def _multiplicity(make: Maker) -> list[Sent]:
    ids = make.ids()
    sent = [(1, "miss"), (2, "miss"), (1, "hit"), (2, "hit")]
    return [(make.request(Prompt(list(ids)), outputs=outputs), [outcome]) for outputs, outcome in sent]


def _max_length(make: Maker) -> list[Sent]:
    ids = make.ids()
    sent = [(512, "miss"), (8, "miss"), (512, "hit")]
    return [(make.request(Prompt(list(ids)), max_length=length), [outcome]) for length, outcome in sent]


def _negative(make: Maker) -> list[Sent]:
    first, second, negative = make.ids(), make.ids(), make.ids()
    sent = [
        (first, negative, ["miss", "miss"]),
        (second, negative, ["miss", "hit"]),
        (first, make.other(negative), ["hit", "miss"]),
        (second, negative, ["hit", "hit"]),
    ]
    return [(make.request(Prompt(list(ids), negative=list(no))), outcomes) for ids, no, outcomes in sent]


def _negative_as_prompt(make: Maker) -> list[Sent]:
    ids = make.ids()
    return [(make.request(Prompt(list(ids), negative=list(ids))), ["miss", "hit"])]


def _empty_negative(make: Maker) -> list[Sent]:
    ids = make.ids()
    return [
        (make.request(Prompt(list(ids), negative=[])), ["miss", "miss"]),
        (make.request(Prompt(list(ids), negative=[])), ["hit", "hit"]),
    ]


def _tensors(rows: bool) -> Callable[[Maker], list[Sent]]:
    def case(make: Maker) -> list[Sent]:
        ids = make.ids()
        sent = [(ids, "miss"), (make.other(ids), "miss"), (ids, "hit")]
        shaped = [(torch.tensor([each] if rows else each), outcome) for each, outcome in sent]
        return [(make.request(Prompt(tensor)), [outcome]) for tensor, outcome in shaped]

    return case


def _edited_tensor(make: Maker) -> Iterator[Sent]:
    ids = torch.tensor([make.ids()])
    yield make.request(Prompt(ids)), ["miss"]
    ids[0, -1] += 1
    yield make.request(Prompt(ids)), ["miss"]
    ids[0, -1] -= 1
    yield make.request(Prompt(ids)), ["hit"]


def _text(make: Maker) -> list[Sent]:
    texts = [("a red fox in the snow", "miss"), ("a red fox in the sun", "miss"), ("a red fox in the snow", "hit")]
    return [(make.request(Prompt(text=text)), [outcome]) for text, outcome in texts]


def _batches(make: Maker) -> list[Sent]:
    first, second, shorter = make.ids(), make.ids(), make.ids(_LENGTH - 5)
    sent = [
        ([first, second], "miss"),
        ([first, second], "hit"),
        ([second, first], "miss"),
        ([first], "miss"),
        ([first, shorter], "miss"),  # padded to the longer one
        ([first, shorter], "hit"),
        ([first, first], "miss"),
    ]
    return [(make.request(*(Prompt(list(ids)) for ids in batch)), [outcome]) for batch, outcome in sent]


def _precomputed(make: Maker) -> list[Sent]:
    ids = make.ids()
    arguments: dict[str, Any] = {"prompt_embeds": torch.ones(1, _LENGTH, 16)}
    if make.entry.architecture.startswith("Qwen"):
        arguments["prompt_embeds_mask"] = torch.ones(1, _LENGTH, dtype=torch.long)
    if make.entry.architecture == "WanPipeline":
        arguments["init_same_noise"] = False
        return [(make.request(Prompt(), arguments=arguments), ["bypass"]) for _ in range(2)]
    return [(make.request(Prompt(list(ids)), arguments=arguments), ["bypass"]) for _ in range(2)]


def _image(make: Maker) -> list[Sent]:
    ids, picture = make.ids(), PIL.Image.new("RGB", (64, 64))
    outcomes = ["bypass", "bypass"] if make.entry.edits else ["miss", "hit"]
    return [(make.request(Prompt(list(ids), image=picture)), [outcome]) for outcome in outcomes]


ALWAYS = ("the same prompt three times", "other IDs, other order", "negative prompts", "1-D tensors")  # never skipped
CASES: dict[str, Callable[[Maker], Iterable[Sent]]] = {
    "the same prompt three times": _repeated,
    "other IDs, other order": _other_ids,
    "other lengths": _other_length,
    "mask tensors, equal ones and others": _masks,
    "mask as a list": _mask_lists,
    "other multiplicity": _multiplicity,
    "other maximal length": _max_length,
    "negative prompts": _negative,
    "the prompt is the negative prompt": _negative_as_prompt,
    "empty negative prompt": _empty_negative,
    "1-D tensors": _tensors(rows=False),
    "2-D tensors": _tensors(rows=True),
    "a tensor that is edited between the calls": _edited_tensor,
    "raw text": _text,
    "batches of requests": _batches,
    "precomputed embeddings": _precomputed,
    "image condition": _image,
}


def cases_for(entry: Entry) -> list[str]:
    """The cases that an entry point can be sent at all."""
    unfit = set()
    if not entry.batches or entry.name != "forward":
        unfit.add("batches of requests")
    if entry.name != "forward" or entry.architecture in ("StableDiffusion3Pipeline", "LTX2Pipeline"):
        unfit.add("precomputed embeddings")  # they take none from a caller
    if not entry.edits and entry.architecture != "WanPipeline":
        unfit.add("image condition")
    if entry.architecture == "MiniMaxH3Pipeline":
        return ["the same prompt three times"]  # the rest is in test_hidden_state
    return [case for case in CASES if case not in unfit]
