"""`load_state_dict()`, which nothing in vLLM-Omni calls after loading, but anybody can."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from .support import Adapter, LoadingEncoder, installed, is_hit, kept, new_weights, recomputed

pytestmark = pytest.mark.usefixtures("active")


def changed(module: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    return dict(new_weights(module, prefix))


@pytest.mark.parametrize("assign", [False, True])
class TestTheTextEncoderIsReached:
    def test_through_the_pipeline(self, call: Any, assign: bool) -> None:
        pipeline, cache = installed()
        with recomputed(pipeline, cache, *call):
            pipeline.load_state_dict(changed(pipeline), assign=assign)

    def test_directly(self, call: Any, assign: bool) -> None:
        pipeline, cache = installed()
        with recomputed(pipeline, cache, *call):
            pipeline.text_encoder.load_state_dict(changed(pipeline.text_encoder), assign=assign)

    def test_through_a_part_of_it(self, call: Any, assign: bool) -> None:
        pipeline, cache = installed()
        for part in (pipeline.text_encoder.layers, pipeline.text_encoder.layers[1], pipeline.text_encoder.embed):
            with recomputed(pipeline, cache, *call):
                part.load_state_dict(changed(part), assign=assign)

    def test_by_one_name(self, call: Any, assign: bool) -> None:
        pipeline, cache = installed()
        weights = {"text_encoder.layers.0.bias": torch.ones(4)}
        with recomputed(pipeline, cache, *call):
            pipeline.load_state_dict(weights, strict=False, assign=assign)

    def test_with_a_strict_failure_at_the_end(self, call: Any, assign: bool) -> None:
        """torch raises it when everything else has been written."""
        pipeline, cache = installed()
        for module, prefix in ((pipeline.text_encoder, ""), (pipeline, "text_encoder.")):
            weights = changed(pipeline.text_encoder, prefix) | {"unknown": torch.ones(1)}
            with recomputed(pipeline, cache, *call), pytest.raises(RuntimeError, match="unknown"):
                module.load_state_dict(weights, assign=assign)
            pipeline.text_encoder.embed.weight.data.zero_()
            cache.clear()

    def test_with_a_wrong_shape_among_others(self, call: Any, assign: bool) -> None:
        pipeline, cache = installed()
        weights = changed(pipeline.text_encoder) | {"layers.1.bias": torch.ones(5)}
        with recomputed(pipeline, cache, *call), pytest.raises(RuntimeError, match="size mismatch"):
            pipeline.text_encoder.load_state_dict(weights, assign=assign)

    def test_in_a_replaced_encoder(self, call: Any, assign: bool) -> None:
        pipeline, cache = installed()
        pipeline.text_encoder = LoadingEncoder()
        pipeline.encode_prompt(*call)
        with recomputed(pipeline, cache, *call):
            pipeline.text_encoder.layers[0].load_state_dict(changed(pipeline.text_encoder.layers[0]), assign=assign)


def test_the_transformers_own_keeps_the_cache(call: Any) -> None:
    pipeline, cache = installed()
    with kept(pipeline, cache, *call):
        pipeline.transformer.load_state_dict(changed(pipeline.transformer))


def test_the_pipelines_clears_even_with_names_of_the_transformer_only(call: Any) -> None:
    """torch does not say which names were there."""
    pipeline, cache = installed()
    pipeline.encode_prompt(*call)
    pipeline.load_state_dict(changed(pipeline.transformer, "transformer."), strict=False)
    assert not is_hit(pipeline, cache, *call)


def test_it_returns_what_torch_returns() -> None:
    pipeline, _ = installed()
    result = pipeline.load_state_dict({"unknown": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["unknown"]
    assert len(result.missing_keys) == len(list(pipeline.named_parameters()))


def duplicated(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, duplicated])
def test_a_copy_of_an_encoder_is_its_own(call: Any, duplicate: Any) -> None:
    """As an average of the weights over time needs it."""
    pipeline, cache = installed(Adapter(LoadingEncoder))
    pipeline.encode_prompt(*call)
    encoder = pipeline.text_encoder
    before = {name: parameter.detach().clone() for name, parameter in encoder.named_parameters()}
    twin = duplicate(encoder)
    weights = new_weights(encoder)
    twin.load_weights(weights)
    for name, weight in weights:
        torch.testing.assert_close(twin.get_parameter(name).data, weight, rtol=0, atol=0)
        torch.testing.assert_close(encoder.get_parameter(name).data, before[name], rtol=0, atol=0)
    twin.load_state_dict(before)
    assert is_hit(pipeline, cache, *call)
    with recomputed(pipeline, cache, *call):
        encoder.load_weights(weights)
    with recomputed(pipeline, cache, *call):
        encoder.load_state_dict(before)
