"""`load_weights()` of pipelines that are built in unusual ways."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader

from .conftest import Log
from .support import WIDTH, Adapter, Encoder, LoadingEncoder, installed, is_hit, kept, new_weights, recomputed

pytestmark = pytest.mark.usefixtures("active")


def image(pipeline: Any) -> list[tuple[str, torch.Tensor]]:
    return new_weights(pipeline.transformer, "transformer.")


def test_a_loader_from_outside_vllm_omni_always_clears(call: Any, log: Log) -> None:
    class Routing(Adapter):
        """Writes weights that are named after the transformer into the text encoder."""

        def load_weights(self, weights: Any) -> set[str]:
            renamed = [(name.replace("transformer.", "text_encoder.layers.0."), weight) for name, weight in weights]
            return AutoWeightsLoader(self).load_weights(renamed)

    pipeline, cache = installed(Routing())
    for seed, container in enumerate((list, iter), 1):
        with recomputed(pipeline, cache, *call):
            pipeline.load_weights(container(new_weights(pipeline.transformer, "transformer.", seed)))
    assert log.having("DEBUG", "Routing", "cleared", "load_weights")


def test_a_loader_put_on_the_object_always_clears(call: Any) -> None:
    pipeline = Adapter()

    def load(weights: Any) -> None:
        pipeline.text_encoder.embed.weight.data.fill_(7)

    pipeline.load_weights = load
    installed(pipeline)
    with recomputed(pipeline, pipeline._prompt_embed_cache, *call):
        pipeline.load_weights(image(pipeline))


def test_anima_replaces_its_encoder_whatever_the_names_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real load_weights() and encode_prompt(); only what they read from the disk is made up."""
    pipeline_anima: Any = pytest.importorskip("vllm_omni.diffusion.models.anima.pipeline_anima")

    class Model(Encoder):
        dtype, device = torch.float32, torch.device("cpu")

        def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
            with torch.no_grad():
                return SimpleNamespace(last_hidden_state=super().forward(input_ids))

    def tokenize(prompts: list[str], **_: Any) -> Any:
        ids = torch.tensor([[ord(letter) % 16 for letter in prompt.ljust(4)[:4]] for prompt in prompts])
        return SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids))

    class Tiny(pipeline_anima.AnimaPipeline):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.od_config, self.device, self._profiler_initialized = None, torch.device("cpu"), True
            self.load_weights(None)

        def _load_native_denoiser_components(self, state_dict: Any) -> Any:
            return nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def _load_outer_components(self) -> Any:
            return Model(), tokenize, tokenize, nn.Linear(1, 1), None

    monkeypatch.setattr(pipeline_anima, "_anima_vae_scale_factor_from_vae", lambda vae: 8)
    # It sets a global that only the real components read.
    monkeypatch.setattr(pipeline_anima, "set_current_diffusion_config", lambda config: torch.no_grad())
    pipeline, cache = installed(Tiny())
    for weights in ([("transformer.weight", torch.ones(1))], None, iter([("transformer.weight", torch.ones(1))])):
        before = pipeline.encode_prompt("a cat")["qwen_prompt_embeds"]
        assert is_hit(pipeline, cache, "a cat")
        pipeline.load_weights(weights)
        now = pipeline.encode_prompt("a cat")["qwen_prompt_embeds"]
        expected = Tiny.encode_prompt(pipeline, "a cat")["qwen_prompt_embeds"]
        torch.testing.assert_close(now, expected, rtol=0, atol=0)
        assert not torch.equal(now, before)
        assert is_hit(pipeline, cache, "a cat")


def test_an_encoder_that_loads_itself(call: Any) -> None:
    pipeline, cache = installed(Adapter(LoadingEncoder))
    for seed, container in enumerate((list, iter, tuple), 1):
        with recomputed(pipeline, cache, *call):
            loaded = pipeline.text_encoder.load_weights(container(new_weights(pipeline.text_encoder, seed=seed)))
        assert loaded == {name for name, _ in pipeline.text_encoder.named_parameters()}
    weights = [*new_weights(pipeline.text_encoder, seed=9), ("unknown", torch.ones(1))]
    with recomputed(pipeline, cache, *call), pytest.raises(KeyError):
        pipeline.text_encoder.load_weights(iter(weights))


def test_a_part_of_an_encoder_that_loads_itself(call: Any) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = LoadingEncoder()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.inner(ids)

    pipeline, cache = installed(Adapter(Outer))
    with recomputed(pipeline, cache, *call):
        pipeline.text_encoder.inner.load_weights(new_weights(pipeline.text_encoder.inner))
    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(new_weights(pipeline.text_encoder, "text_encoder.", seed=2))
    assert "load_weights" not in vars(pipeline.text_encoder)


class Delegating(nn.Module):
    """Hands every attribute on to the module inside, as a compiled module does."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = LoadingEncoder()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(ids)


@pytest.mark.parametrize("wrap", [Delegating, lambda: torch.compile(LoadingEncoder(), backend="eager")])
def test_an_encoder_behind_a_wrapper_that_hands_on(call: Any, wrap: Any) -> None:
    pipeline, cache = installed(Adapter(wrap))
    inner = pipeline.text_encoder._orig_mod
    with recomputed(pipeline, cache, *call):
        pipeline.text_encoder.load_weights(new_weights(inner))
    with recomputed(pipeline, cache, *call):
        inner.load_weights(new_weights(inner, seed=2))


def test_a_module_in_both_the_transformer_and_the_text_encoder(call: Any) -> None:
    pipeline = Adapter()
    pipeline.transformer = nn.Sequential(pipeline.text_encoder.layers[0])
    _, cache = installed(pipeline)
    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(image(pipeline))


def test_a_parameter_in_both_the_transformer_and_the_text_encoder(call: Any) -> None:
    pipeline = Adapter()
    pipeline.transformer.weight = pipeline.text_encoder.layers[1].weight
    _, cache = installed(pipeline)
    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(iter(image(pipeline)))
    with kept(pipeline, cache, *call):
        pipeline.load_weights([("vae.weight", torch.ones(WIDTH, WIDTH))])


def _direct(self: Any, embeds: torch.Tensor) -> torch.Tensor:
    return self.transformer(embeds)


def _in_a_method(self: Any, embeds: torch.Tensor) -> torch.Tensor:
    return self.refine(embeds)


def _in_a_comprehension(self: Any, embeds: torch.Tensor) -> torch.Tensor:
    return torch.stack([self.transformer(row) for row in embeds])


def _in_a_lambda(self: Any, embeds: torch.Tensor) -> torch.Tensor:
    return (lambda: self.transformer(embeds))()


def _by_name(self: Any, embeds: torch.Tensor) -> torch.Tensor:
    return getattr(self, "transformer")(embeds)  # noqa: B009 - that is the case


def _by_a_property(self: Any, embeds: torch.Tensor) -> torch.Tensor:
    return self.refiner(embeds)


@pytest.mark.parametrize("decorator", [lambda f: f, torch.no_grad(), torch.inference_mode()], ids=["", "grad", "mode"])
@pytest.mark.parametrize("use", [_direct, _in_a_method, _in_a_comprehension, _in_a_lambda, _by_name, _by_a_property])
def test_an_encode_prompt_from_outside_that_uses_the_transformer(call: Any, use: Any, decorator: Any) -> None:
    class Mixed(Adapter):
        refine = _direct
        refiner = property(lambda self: self.transformer)
        combine = decorator(use)

        @decorator
        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            with torch.no_grad():
                return self.combine(self.text_encoder(torch.as_tensor(prompt_ids))), attention_mask

    pipeline, cache = installed(Mixed())
    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(image(pipeline))
    with kept(pipeline, cache, *call):
        pipeline.load_weights([("vae.weight", torch.ones(WIDTH, WIDTH))])


def test_a_pipeline_with_nothing_but_a_transformer(call: Any) -> None:
    class Single(Adapter):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.transformer = Encoder()

        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            (model,) = self.children()  # its name stands nowhere here
            return model(torch.as_tensor(prompt_ids)), attention_mask

    pipeline, cache = installed(Single())
    with torch.no_grad(), recomputed(pipeline, cache, *call):
        pipeline.load_weights(image(pipeline))


def test_a_text_model_under_an_unknown_name(call: Any) -> None:
    class Unusual(Adapter):
        def __init__(self) -> None:
            super().__init__()
            self.condition_model = Encoder()

        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            with torch.no_grad():
                return self.condition_model(torch.as_tensor(prompt_ids)), attention_mask

    pipeline, cache = installed(Unusual())
    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(new_weights(pipeline.condition_model, "condition_model."))


def test_a_generator_that_the_pipeline_declares(call: Any) -> None:
    class Declared(Adapter):
        _dit_modules = ("image_model",)
        _vae_modules = ("image_codec",)

        def __init__(self) -> None:
            super().__init__()
            self.image_model, self.image_codec, self.other = (nn.Linear(1, 1) for _ in range(3))

    pipeline, cache = installed(Declared())
    for name in ("image_model", "image_codec"):
        with kept(pipeline, cache, *call):
            pipeline.load_weights([(f"{name}.weight", torch.ones(1, 1))])
    pipeline.load_weights([("other.weight", torch.ones(1, 1))])
    assert not is_hit(pipeline, cache, *call)
