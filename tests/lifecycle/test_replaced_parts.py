"""Parts of a pipeline that are replaced by others."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from .support import WIDTH, Adapter, Encoder, LoadingEncoder, Tokenizer, installed, is_hit, kept, recomputed

pytestmark = pytest.mark.usefixtures("active")


def other_linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("encoder", [Encoder, LoadingEncoder])
def test_the_text_encoder(call: Any, encoder: Any) -> None:
    pipeline, cache = installed(Adapter(encoder))
    for _ in range(3):
        with recomputed(pipeline, cache, *call):
            pipeline.text_encoder = encoder()


def test_the_text_encoder_behind_the_back_of_setattr(call: Any) -> None:
    pipeline, cache = installed()
    with recomputed(pipeline, cache, *call):
        pipeline._modules["text_encoder"] = Encoder()
    with recomputed(pipeline, cache, *call):
        del pipeline.text_encoder
        pipeline.__dict__["text_encoder"] = Encoder()


def test_the_tokenizer(call: Any) -> None:
    pipeline, cache = installed()
    for shift in (1, 2):
        with recomputed(pipeline, cache, *call):
            pipeline.tokenizer = Tokenizer(shift)


def test_a_part_of_which_nothing_is_left(call: Any) -> None:
    """What is gone and what is set to None must not look alike."""

    class Optional(Adapter):
        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            ids = torch.as_tensor(prompt_ids) + (self.tokenizer.shift if self.tokenizer else 0)
            with torch.no_grad():
                embeds = self.text_encoder.embed(ids)
                for layer in self.text_encoder.layers:
                    embeds = embeds if layer is None else layer(embeds)
                return embeds * 2 if self.text_encoder_2 is None else embeds, attention_mask

    pipeline = Optional()
    pipeline.tokenizer, pipeline.text_encoder_2 = Tokenizer(2), Encoder()
    _, cache = installed(pipeline)
    with recomputed(pipeline, cache, *call):
        pipeline.tokenizer = None
    with recomputed(pipeline, cache, *call):
        pipeline.text_encoder_2 = None
    with recomputed(pipeline, cache, *call):
        pipeline.text_encoder.layers[1] = None


def test_a_processor(call: Any) -> None:
    class WithProcessor(Adapter):
        def __init__(self) -> None:
            super().__init__()
            self.processor = Tokenizer(3)

        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            return Adapter.encode_prompt(self, torch.as_tensor(prompt_ids) + self.processor.shift, attention_mask)

    pipeline, cache = installed(WithProcessor())
    with recomputed(pipeline, cache, *call):
        pipeline.processor = Tokenizer(4)


class WithOptionalEncoder(Adapter):
    """The second encoder adds to the embeddings, where there is one, as with Stable Diffusion 3."""

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        embeds, mask = Adapter.encode_prompt(self, prompt_ids, attention_mask)
        if self.text_encoder_2 is not None:
            with torch.no_grad():
                embeds = embeds + self.text_encoder_2(torch.as_tensor(prompt_ids))
        return embeds, mask


@pytest.mark.parametrize("registered", [False, True])
def test_an_encoder_that_comes_and_goes(call: Any, registered: bool) -> None:
    pipeline = WithOptionalEncoder()
    if registered:
        pipeline.register_module("text_encoder_2", None)
    else:
        pipeline.text_encoder_2 = None
    _, cache = installed(pipeline)
    for part in (Encoder(), None, Encoder(), Encoder(), None):
        with recomputed(pipeline, cache, *call):
            pipeline.text_encoder_2 = part


def test_a_tokenizer_that_is_none_at_first(call: Any) -> None:
    class Late(Adapter):
        def __init__(self) -> None:
            super().__init__()
            self.tokenizer_2: Any = None

        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            shift = self.tokenizer_2.shift if self.tokenizer_2 else 0
            return Adapter.encode_prompt(self, torch.as_tensor(prompt_ids) + shift, attention_mask)

    pipeline, cache = installed(Late())
    for part in (Tokenizer(2), None, Tokenizer(3)):
        with recomputed(pipeline, cache, *call):
            pipeline.tokenizer_2 = part


def test_an_encoder_at_the_address_of_a_freed_one(call: Any) -> None:
    pipeline, cache = installed()
    reused = 0
    for _ in range(200):
        encoder = pipeline.text_encoder
        address, reference = id(encoder), weakref.ref(encoder)
        pipeline.encode_prompt(*call)
        assert is_hit(pipeline, cache, *call)
        pipeline.text_encoder = None
        del encoder
        assert reference() is None
        replacements = [Encoder() for _ in range(8)]
        pipeline.text_encoder = next((e for e in replacements if id(e) == address), replacements[0])
        reused += id(pipeline.text_encoder) == address
        del replacements
        assert not is_hit(pipeline, cache, *call)
    assert reused, "no address came back, so this shows nothing"


def test_a_tokenizer_at_the_address_of_a_freed_one(call: Any) -> None:
    pipeline, cache = installed()
    reused = 0
    for shift in range(200):
        pipeline.encode_prompt(*call)
        address = id(pipeline.tokenizer)
        pipeline.tokenizer = None
        pipeline.tokenizer = Tokenizer(shift)
        reused += id(pipeline.tokenizer) == address
        assert not is_hit(pipeline, cache, *call)
    assert reused, "no address came back, so this shows nothing"


def test_parts_inside_the_text_encoder(call: Any) -> None:
    pipeline, cache = installed()
    encoder = pipeline.text_encoder
    with recomputed(pipeline, cache, *call):
        encoder.layers[0] = other_linear()
    with recomputed(pipeline, cache, *call):
        encoder.layers = nn.ModuleList([other_linear()])
    with recomputed(pipeline, cache, *call):
        encoder.embed = nn.Embedding(16, WIDTH)
    with recomputed(pipeline, cache, *call):
        encoder.layers[0] = nn.Sequential(encoder.layers[0], other_linear())  # as an adapter is put around a layer
    with recomputed(pipeline, cache, *call):
        encoder.layers[0][1] = other_linear()  # in a part that came later


def test_parameters_inside_the_text_encoder(call: Any) -> None:
    pipeline, cache = installed()
    encoder = pipeline.text_encoder
    for layer in (encoder.embed, encoder.layers[1]):
        with recomputed(pipeline, cache, *call):
            layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    with recomputed(pipeline, cache, *call):
        encoder.layers[1].register_parameter("bias", nn.Parameter(torch.ones(WIDTH)))


def test_a_part_that_is_set_to_itself_keeps_the_cache(call: Any) -> None:
    pipeline, cache = installed()
    encoder = pipeline.text_encoder
    with kept(pipeline, cache, *call):
        encoder.layers[0] = encoder.layers[0]
        encoder.embed.weight = encoder.embed.weight
        pipeline.text_encoder = encoder


def test_parts_outside_the_text_encoder_keep_the_cache(call: Any) -> None:
    pipeline, cache = installed()
    pipeline.transformer = nn.Sequential(other_linear())
    with kept(pipeline, cache, *call):
        pipeline.transformer[0] = other_linear()
        pipeline.transformer[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        pipeline.vae.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        Encoder().layers[0] = other_linear()  # somebody else's


def test_an_encode_that_falls_between_the_notice_and_the_assignment(call: Any) -> None:
    """torch says so just before it assigns."""
    pipeline, cache = installed()
    encoder, replacement = pipeline.text_encoder, other_linear()

    def hook(module: nn.Module, name: str, part: Any) -> None:
        if part is replacement:
            pipeline.encode_prompt(*call)

    # It runs after the package's own.
    handle = nn.modules.module.register_module_module_registration_hook(hook)
    try:
        with recomputed(pipeline, cache, *call):
            encoder.layers[0] = replacement
    finally:
        handle.remove()


def test_offloading_keeps_the_cache(call: Any) -> None:
    """The offloaders give each parameter another storage with the same values, at every forward."""
    pipeline, cache = installed()
    with kept(pipeline, cache, *call):
        for parameter in pipeline.text_encoder.parameters():
            parameter.data = parameter.data.clone()
        pipeline.text_encoder.to("cpu")


def test_the_caches_of_other_pipelines_are_left_alone(call: Any) -> None:
    (first, first_cache), (second, second_cache) = installed(), installed()
    first.encode_prompt(*call)
    with recomputed(second, second_cache, *call):
        second.text_encoder = Encoder()
    with recomputed(second, second_cache, *call):
        second.text_encoder.layers[0] = other_linear()
    assert is_hit(first, first_cache, *call)


def test_an_encoder_that_two_pipelines_share(call: Any) -> None:
    (first, first_cache), second = installed(Adapter(LoadingEncoder)), Adapter()
    second.text_encoder = first.text_encoder
    _, second_cache = installed(second)
    for change in (
        lambda: first.text_encoder.load_weights([("embed.weight", torch.randn(16, WIDTH))]),
        lambda: second.load_weights([("text_encoder.embed.weight", torch.randn(16, WIDTH))]),
        lambda: first.text_encoder.load_state_dict({"layers.0.bias": torch.randn(WIDTH)}, strict=False),
        lambda: setattr(first.text_encoder.layers, "0", other_linear()),
    ):
        with recomputed(first, first_cache, *call), recomputed(second, second_cache, *call):
            change()
