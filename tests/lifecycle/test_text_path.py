"""Which parts of a pipeline encode text: of pipelines that make it hard to tell."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from omni_tensor_key import text_path

from .support import WIDTH, Adapter, Encoder, installed, kept, recomputed

pytestmark = pytest.mark.usefixtures("active")


@pytest.fixture
def _busy_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_busy_threads")
@pytest.mark.parametrize("look", [text_path.children, text_path.text_tools])
def test_attributes_that_another_thread_sets_meanwhile(look: Callable[[Any], dict[str, Any]]) -> None:
    pipeline = types.SimpleNamespace(tokenizer=object(), encoder=nn.Linear(1, 1))
    vars(pipeline).update({f"option_{i}": i for i in range(200)})
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for i in range(50):
                setattr(pipeline, f"new_{i}", i)
            for i in range(50):
                delattr(pipeline, f"new_{i}")

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(3000):
            assert len(look(pipeline)) == 1
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("name", ["_dit_modules", "_vae_modules"])
def test_no_declared_generators(name: str, call: Any) -> None:
    pipeline = Adapter()
    setattr(pipeline, name, None)
    _, cache = installed(pipeline)
    with kept(pipeline, cache, *call):
        pipeline.transformer.load_state_dict(nn.Linear(WIDTH, WIDTH).state_dict())
    with recomputed(pipeline, cache, *call):
        pipeline.text_encoder = Encoder()


def referring_to_each_other() -> tuple[Any, Any]:
    def encode_prompt(self: Any, prompt_ids: Any, attention_mask: Any = None) -> Any:
        return again(self, prompt_ids) if prompt_ids is None else self.text_encoder(torch.as_tensor(prompt_ids))

    def again(self: Any, prompt_ids: Any) -> Any:
        return encode_prompt(self, self.transformer(prompt_ids))

    return encode_prompt, again


def test_functions_that_refer_to_each_other(call: Any) -> None:
    class Mutual(Adapter):
        encode_prompt, _again = referring_to_each_other()

    pipeline, cache = installed(Mutual())
    assert "transformer" not in text_path.generator_names(pipeline)
    with recomputed(pipeline, cache, *call):
        pipeline.text_encoder = Encoder()
