"""PEFT tuner layers in a text encoder: their state changes in ways that nothing tells of, so tensors are not cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CALLS, Adapter, identical, installed, is_hit, without_cache

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("active")
CALL = CALLS["tensors"]


def _config(**options: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["layers.0"], init_lora_weights=False, **options)


def _hotswap(encoder: Any, folder: Path) -> None:
    from peft.utils.hotswap import hotswap_adapter

    encoder.save_pretrained(folder)
    hotswap_adapter(encoder, str(folder / "b"), adapter_name="a")


CHANGES: dict[str, Callable[[Any, Path], Any]] = {
    "set_adapter": lambda encoder, folder: encoder.set_adapter("b"),
    "disable_adapter_layers": lambda encoder, folder: encoder.base_model.disable_adapter_layers(),
    "scale_layer": lambda encoder, folder: encoder.base_model.model.layers[0].scale_layer(0.5),
    "delete_adapter": lambda encoder, folder: encoder.delete_adapter("a"),
    "weights": lambda encoder, folder: encoder.base_model.model.layers[0].lora_B["a"].weight.data.mul_(2),
    "hotswap_adapter": _hotswap,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_adapter_is_never_stale(change: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    pipeline, cache = installed()
    torch.manual_seed(3)
    pipeline.text_encoder = peft.get_peft_model(pipeline.text_encoder, _config(), "a")
    pipeline.text_encoder.add_adapter("b", _config())
    before = pipeline.encode_prompt(*CALL)
    change(pipeline.text_encoder, tmp_path)
    expected = without_cache(pipeline, *CALL)
    assert not identical(before, expected), "nothing has changed, so this shows nothing"
    assert identical(pipeline.encode_prompt(*CALL), expected)
    assert cache.stats()["size"] == 0


@contextmanager
def _injected(pipeline: Any) -> Iterator[None]:
    """Layers that are put inside the encoder, which stays the object that it was."""
    encoder = pipeline.text_encoder
    before = encoder.layers[0]
    peft.inject_adapter_in_model(_config(), encoder)
    yield
    encoder.layers[0] = before


def test_layers_inside_an_encoder_that_stays_the_same_object(log: Any) -> None:
    pipeline, cache = installed()
    plain = pipeline.encode_prompt(*CALL)
    for _ in range(2):
        with _injected(pipeline):
            for scale in (1.0, 2.0):
                pipeline.text_encoder.layers[0].scale_layer(scale)
                assert identical(pipeline.encode_prompt(*CALL), without_cache(pipeline, *CALL))
            assert cache.stats()["size"] == 0
        assert identical(pipeline.encode_prompt(*CALL), plain)
        assert is_hit(pipeline, cache, *CALL)
    assert len(log.having("WARNING", "PEFT tuner layers")) == 1


def test_layers_that_are_there_from_the_start_and_those_of_a_transformer() -> None:
    first, second = Adapter(), Adapter()
    first.text_encoder = peft.get_peft_model(first.text_encoder, _config())
    pipeline, cache = installed(first)
    for _ in range(3):
        assert not is_hit(pipeline, cache, *CALL)
    assert cache.stats()["bypassed"] == 3
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["transformer"]), second)
    pipeline, cache = installed(second)
    pipeline.encode_prompt(*CALL)
    assert is_hit(pipeline, cache, *CALL)
