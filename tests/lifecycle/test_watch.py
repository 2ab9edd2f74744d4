"""What a watch must notice beside new weights: parts that come late, and calls and changes that meet."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

from .conftest import Log
from .support import CALLS, WIDTH, Adapter, Encoder, Tokenizer, installed, is_hit, recomputed

pytestmark = pytest.mark.usefixtures("active")

PATIENCE = 10.0  # seconds until something that hangs counts as hanging


class Plain:
    """As diffusers' pipelines: no module itself."""

    def __init__(self) -> None:
        self.text_encoder: Any = None

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        ids = torch.as_tensor(prompt_ids)
        shift = self.tokenizer_2.shift if hasattr(self, "tokenizer_2") else 0
        with torch.no_grad():
            return ids + shift if self.text_encoder is None else self.text_encoder(ids) + shift


def test_an_encoder_that_comes_late(call: Any) -> None:
    pipeline, cache = installed(Plain())
    for _ in range(2):
        with recomputed(pipeline, cache, *call):
            pipeline.text_encoder = Encoder()
    with recomputed(pipeline, cache, *call):
        pipeline.text_encoder.load_state_dict(Encoder().state_dict())


def test_an_attribute_that_was_not_there(call: Any) -> None:
    pipeline, cache = installed(Plain())
    for shift in (1, 2):
        with recomputed(pipeline, cache, *call):
            pipeline.tokenizer_2 = Tokenizer(shift)


def test_a_tokenizer_that_is_made_when_it_is_needed(call: Any) -> None:
    class Lazy(Plain):
        @functools.cached_property
        def tokenizer_2(self) -> Any:
            return Tokenizer(3)

    pipeline, cache = installed(Lazy())
    pipeline.encode_prompt(*call)
    with recomputed(pipeline, cache, *call):
        pipeline.tokenizer_2 = Tokenizer(4)


def test_other_attributes_that_come_and_go_keep_the_cache(call: Any) -> None:
    pipeline, cache = installed(Plain())
    pipeline.encode_prompt(*call)
    for _ in range(3):
        pipeline.guidance_scale = 3.0
        assert is_hit(pipeline, cache, *call)
        del pipeline.guidance_scale
        assert is_hit(pipeline, cache, *call)


def new_tokenizer(pipeline: Any, call: Any) -> None:
    pipeline.tokenizer = Tokenizer(5)


def new_layer(pipeline: Any, call: Any) -> None:
    """With a call between its announcement and the assignment, whose result is stored and wrong."""
    encode = lambda module, name, part: pipeline.encode_prompt(*call) and None  # noqa: E731
    handle = nn.modules.module.register_module_module_registration_hook(encode)
    pipeline.text_encoder.layers[0] = nn.Linear(WIDTH, WIDTH)
    handle.remove()


@pytest.mark.parametrize("change", [new_tokenizer, new_layer])
def test_a_second_caller_does_not_overtake_the_clearing(
    call: Any, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, _ = installed()
    pipeline.encode_prompt(*call)
    change(pipeline, call)
    clearing, go_on, answers = threading.Event(), threading.Event(), []
    clear = upstream.PromptEmbedCache.clear

    def slow_clear(self: Any) -> None:
        clearing.set()
        go_on.wait(PATIENCE)
        clear(self)

    monkeypatch.setattr(upstream.PromptEmbedCache, "clear", slow_clear)
    threads = [
        threading.Thread(target=lambda: answers.append(pipeline.encode_prompt(*call)[0]), daemon=True) for _ in range(2)
    ]
    threads[0].start()
    assert clearing.wait(PATIENCE)
    threads[1].start()
    threads[1].join(0.2)  # it would be through by now if it did not wait
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    expected = Adapter.encode_prompt(pipeline, *call)[0]
    assert len(answers) == 2
    assert all(torch.equal(answer, expected) for answer in answers)


def test_a_part_that_is_swapped_and_swapped_back(call: Any) -> None:
    """As for an average of weights that is put in for an evaluation."""
    pipeline, cache = installed()
    layers = pipeline.text_encoder.layers
    for _ in range(3):
        own = layers[0]
        layers[0] = nn.Linear(WIDTH, WIDTH)
        layers[0] = own
    assert not is_hit(pipeline, cache, *call)
    assert is_hit(pipeline, cache, *call)


def test_an_announced_part_keeps_nothing_alive() -> None:
    pipeline, _ = installed()
    encoder = pipeline.text_encoder
    encoder.layers[0] = nn.Linear(WIDTH, WIDTH)
    found = [weakref.ref(encoder), weakref.ref(encoder.layers[0].weight)]
    pipeline.text_encoder = None
    del encoder
    assert [reference() for reference in found] == [None, None]


def test_a_finalizer_of_what_is_evicted_changes_the_encoder() -> None:
    """It runs inside the cache's own put()."""

    class Changes(float):
        def __del__(self) -> None:
            pipeline.text_encoder.layers[0] = nn.Linear(WIDTH, WIDTH)

    class Answering(Adapter):
        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            return Adapter.encode_prompt(self, prompt_ids)[0], Changes(1)

    pipeline, _ = installed(Answering(), max_size=1)

    def run() -> None:
        for first in range(3):
            pipeline.encode_prompt([[first, 2]])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    for first in range(3):
        expected = Adapter.encode_prompt(pipeline, [[first, 2]])[0]
        assert torch.equal(pipeline.encode_prompt([[first, 2]])[0], expected)


def test_a_call_of_an_earlier_installation(call: Any) -> None:
    pipeline, _ = installed()
    earlier = pipeline.encode_prompt
    before = earlier(*call)[0]
    upstream.uninstall_prompt_embed_cache(pipeline)
    installed(pipeline)
    pipeline.text_encoder.load_state_dict(Encoder().state_dict())
    assert not torch.equal(earlier(*call)[0], before)


def test_a_copy_of_a_pipeline_gets_a_cache_of_its_own(call: Any) -> None:
    pipeline, cache = installed(Plain())
    pipeline.text_encoder = Encoder()
    other = copy.copy(pipeline)
    upstream.uninstall_prompt_embed_cache(other)
    installed(other)
    for _ in range(2):
        with recomputed(pipeline, cache, *call):
            pipeline.text_encoder.load_state_dict(Encoder().state_dict())
    with recomputed(other, other._prompt_embed_cache, *call):
        other.text_encoder.load_state_dict(Encoder().state_dict())


def test_a_new_encoder_that_cannot_be_watched(log: Log) -> None:
    pipeline, cache = installed()
    pipeline.text_encoder_2 = Encoder()
    call = CALLS["tensors"]
    pipeline.encode_prompt(*call)
    pipeline.text_encoder = torch.jit.script(nn.Embedding(16, WIDTH))
    for _ in range(2):
        assert torch.equal(pipeline.encode_prompt(*call)[0], Adapter.encode_prompt(pipeline, *call)[0])
    assert cache.stats()["size"] == 0
    (line,) = log.having("WARNING")
    assert "cannot be watched for changed weights" in line
