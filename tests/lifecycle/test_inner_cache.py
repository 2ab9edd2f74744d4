"""LingBotWorld's second cache of text embeddings, below encode_prompt()."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import omni_tensor_key
from omni_tensor_key import inner_cache

from .support import Adapter, identical, installed, is_hit, new_weights

OTHER = ([[7, 7]], [[1, 1]])


class LingBotLike(Adapter):
    """Looks and writes as LingBotWorldPipeline._encode_text_prompt does, whose module needs torchvision."""

    __module__ = inner_cache._MODULE

    def __init__(self) -> None:
        super().__init__()
        self._prompt_embeds_cache: OrderedDict[str, Any] = OrderedDict()
        self.after_look: Callable[[], object] | None = None
        self.after_encode: Callable[[], object] | None = None

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None, extra: Any = 1) -> Any:
        key = str(prompt_ids)
        cached = self._prompt_embeds_cache.get(key)
        self._do("after_look")
        if cached is not None:
            self._prompt_embeds_cache.move_to_end(key)
            return cached
        output = Adapter.encode_prompt(self, prompt_ids, attention_mask)
        self._do("after_encode")
        self._prompt_embeds_cache[key] = output
        if len(self._prompt_embeds_cache) > 4:
            self._prompt_embeds_cache.popitem(last=False)
        if extra == "fails":
            raise ValueError(extra)
        return output

    def _do(self, name: str) -> None:
        do = getattr(self, name)
        setattr(self, name, None)
        if do is not None:
            do()


def fresh(pipeline: Any, *call: Any) -> Any:
    """What the text encoder makes of a call now."""
    return Adapter.encode_prompt(pipeline, *call[:2])


def change(pipeline: Any, seed: int = 1) -> None:
    pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder.", seed))


@pytest.fixture(autouse=True)
def _inactive_afterwards() -> Iterator[None]:
    yield
    if omni_tensor_key.is_active():
        omni_tensor_key.deactivate()


def test_upstream_has_it_under_this_name() -> None:
    spec = importlib.util.find_spec("vllm_omni")
    assert spec
    assert spec.submodule_search_locations
    if Version(version("vllm-omni")) < Version("0.30"):
        pytest.skip("it came with 0.30")
    parts = inner_cache._MODULE.split(".")[1:]
    source = Path(spec.submodule_search_locations[0], *parts).with_suffix(".py")
    lines = [line for line in source.read_text().splitlines() if f"self.{inner_cache._ATTRIBUTE}" in line]
    assert [line for line in lines if line.endswith("= OrderedDict()")]
    uses = ("= OrderedDict()", ".get(key)", ".move_to_end(key)", "[key] =", "len(", ".popitem(last=False)")
    assert not [line for line in lines if not any(use in line for use in uses)]


def test_new_weights(call: Any) -> None:
    omni_tensor_key.activate()
    pipeline, cache = installed(LingBotLike())
    for seed in range(1, 4):
        assert identical(pipeline.encode_prompt(*call), fresh(pipeline, *call))
        assert is_hit(pipeline, cache, *call)
        cache.clear()  # what is below is still there
        change(pipeline, seed)


def test_other_pipelines_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LingBotLike, "__module__", "elsewhere")
    omni_tensor_key.activate()
    pipeline, _ = installed(LingBotLike())
    pipeline.encode_prompt(*OTHER)
    assert len(pipeline._prompt_embeds_cache) == 1


def test_it_is_there_again_after_a_deactivation() -> None:
    pipeline, _ = installed(LingBotLike())
    omni_tensor_key.activate()
    pipeline.encode_prompt(*OTHER)
    pipeline.encode_prompt(*OTHER)
    omni_tensor_key.deactivate()
    runs = pipeline.runs
    pipeline.encode_prompt(torch.tensor(OTHER[0]))
    pipeline.encode_prompt(torch.tensor(OTHER[0]))  # bypasses, and is found below
    assert pipeline.runs == runs + 1
    assert type(pipeline._prompt_embeds_cache) is OrderedDict


def test_it_is_exchanged_between_two_looks_of_a_call(call: Any) -> None:
    pipeline, cache = installed(LingBotLike())
    pipeline._prompt_embeds_cache[str(call[0])] = expected = fresh(pipeline, *call)

    def switch() -> None:
        omni_tensor_key.activate()
        pipeline.encode_prompt(*OTHER)

    pipeline.after_look = switch
    assert identical(pipeline.encode_prompt(*call), expected)
    change(pipeline)
    assert identical(pipeline.encode_prompt(*call), fresh(pipeline, *call))
    assert is_hit(pipeline, cache, *call)


EXTRAS = {"is stored": 1, "bypasses": object(), "raises": "fails"}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("begins", ["on", "off"])
def test_what_a_call_leaves_there_that_began_before_the_weights_changed(call: Any, begins: str, extra: Any) -> None:
    pipeline, cache = installed(LingBotLike())
    if begins == "on":
        omni_tensor_key.activate()

    def switch_and_change() -> None:
        omni_tensor_key.activate()
        pipeline.encode_prompt(*OTHER)
        change(pipeline)

    pipeline.after_encode = switch_and_change
    try:
        pipeline.encode_prompt(*call, extra)
    except ValueError:
        assert extra == "fails"
    for _ in range(2):
        assert identical(pipeline.encode_prompt(*call), fresh(pipeline, *call))
    assert is_hit(pipeline, cache, *call)


def test_calls_that_overlap_without_end() -> None:
    """A change keeps what was running then from being stored, not all that follows."""
    omni_tensor_key.activate()
    pipeline, cache = installed(LingBotLike())
    depth = 0

    def overlap() -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            change(pipeline)
        if depth < 20:
            pipeline.after_encode = overlap
            pipeline.encode_prompt([[depth % 2]], [[1]])

    pipeline.after_encode = overlap
    pipeline.encode_prompt([[0]], [[1]])
    assert is_hit(pipeline, cache, [[0]], [[1]])
    assert is_hit(pipeline, cache, [[1]], [[1]])
