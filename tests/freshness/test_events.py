"""Every event after which a cached embedding would be stale, and every one that must cost no hit, by kind of call."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import (
    CALLS,
    WIDTH,
    Adapter,
    Encoder,
    LoadingEncoder,
    PlainEncoder,
    Tokenizer,
    installed,
    is_hit,
    kept,
    load_into,
    new_weights,
    recomputed,
    without_cache,
)
from torch import nn

import omni_tensor_key

pytestmark = [pytest.mark.usefixtures("active"), pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)]


def _load_pipeline(p: Any) -> None:
    p.load_weights(new_weights(p.text_encoder, "text_encoder."))


def _other_encoder() -> Any:
    torch.manual_seed(7)
    return Encoder()


class Two(Adapter):
    """With a second encoder, tokenizer and processor, each of which it can do without."""

    def __init__(self, encoder: type[Any] = Encoder) -> None:
        super().__init__(encoder)
        self.text_encoder_2, self.tokenizer_2, self.processor = PlainEncoder(3), Tokenizer(1), Tokenizer(1)
        self.clip = nn.Embedding(16, WIDTH).requires_grad_(False)

    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        embeds, mask = super().encode_prompt(prompt_ids, attention_mask)
        ids = torch.as_tensor(prompt_ids)
        for encoder in (self.text_encoder_2, self.clip):
            embeds = embeds if encoder is None else embeds + encoder(ids)
        shift = sum(part.shift for part in (self.tokenizer_2, self.processor) if part is not None)
        return embeds + shift, mask


SECOND = ("text_encoder_2", "tokenizer_2", "processor", "clip")  # the last one has a name that nobody knows
SECOND_CHANGES: dict[str, Callable[[Any, str], Any]] = {
    "replaced": lambda p, name: setattr(
        p,
        name,
        {"clip": nn.Embedding(16, WIDTH).requires_grad_(False)}.get(name)
        or (PlainEncoder(7) if "encoder" in name else Tokenizer(5)),
    ),
    "none": lambda p, name: setattr(p, name, None),
    "none in the dictionary": lambda p, name: (p._modules if name in p._modules else vars(p)).update({name: None}),
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("change", SECOND_CHANGES)
def test_each_of_several_parts_counts(call: Any, name: str, change: str) -> None:
    pipeline, cache = installed(Two())
    with recomputed(pipeline, cache, *call):
        SECOND_CHANGES[change](pipeline, name)


def _twice(p: Any) -> None:
    """The second weight may lie where the first one lay."""
    for seed in (1, 2):
        p.text_encoder.embed.weight = nn.Parameter(torch.full((16, WIDTH), float(seed)))


def _register(p: Any) -> None:
    p.text_encoder.register_parameter("extra", None)
    p.text_encoder.layers[0].weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


CHANGES: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
    "load_weights of the pipeline": (Encoder, _load_pipeline),
    "load_weights of the encoder": (LoadingEncoder, lambda p: p.text_encoder.load_weights(new_weights(p.text_encoder))),
    "load_state_dict of the encoder": (Encoder, lambda p: load_into(p.text_encoder)),
    "load_state_dict of a part": (Encoder, lambda p: load_into(p.text_encoder.layers[1])),
    "load_state_dict of the pipeline": (Encoder, load_into),
    "load_state_dict called on the class": (
        Encoder,
        lambda p: nn.Module.load_state_dict(p.text_encoder, Encoder().state_dict()),
    ),
    "encoder replaced": (Encoder, lambda p: setattr(p, "text_encoder", _other_encoder())),
    "encoder replaced in _modules": (Encoder, lambda p: p._modules.update(text_encoder=_other_encoder())),
    "encoder registered": (Encoder, lambda p: p.register_module("text_encoder", _other_encoder())),
    "encoder deleted and set": (
        Encoder,
        lambda p: (delattr(p, "text_encoder"), setattr(p, "text_encoder", _other_encoder())),
    ),
    "encoder shadowed": (Encoder, lambda p: object.__setattr__(p, "text_encoder", _other_encoder())),
    "encoder in __dict__": (Encoder, lambda p: vars(p).update(text_encoder=_other_encoder())),
    "plain encoder replaced": (PlainEncoder, lambda p: setattr(p, "text_encoder", PlainEncoder(1))),
    "plain encoder becomes a module": (
        PlainEncoder,
        lambda p: (delattr(p, "text_encoder"), setattr(p, "text_encoder", _other_encoder())),
    ),
    "tokenizer replaced": (Encoder, lambda p: setattr(p, "tokenizer", Tokenizer(1))),
    "module inside replaced": (
        Encoder,
        lambda p: p.text_encoder.layers.__setitem__(0, nn.Linear(WIDTH, WIDTH, bias=False)),
    ),
    "module inside added": (Encoder, lambda p: p.text_encoder.layers.append(nn.Linear(WIDTH, WIDTH))),
    "parameter assigned": (
        Encoder,
        lambda p: setattr(p.text_encoder.layers[1], "bias", nn.Parameter(torch.ones(WIDTH))),
    ),
    "parameter assigned twice": (Encoder, _twice),
    "parameter registered": (Encoder, _register),
    "buffer assigned": (Encoder, lambda p: setattr(p.text_encoder, "scale", torch.tensor(3.0))),
}
KEPT: dict[str, Callable[[Any], Any]] = {
    "request attribute": lambda p: setattr(p, "_tokenizer_output", object()),
    "request attribute that comes and goes": lambda p: (setattr(p, "now", 1), delattr(p, "now")),
    "processor's output": lambda p: setattr(p, "processor_output", {"ids": 1}),
    "new module of a request": lambda p: setattr(p, "guider", nn.Identity()),
    "alias of the transformer": lambda p: setattr(p, "current_model", p.transformer),
    "plain alias of the transformer": lambda p: object.__setattr__(p, "current_model", p.transformer),
    "transformer replaced": lambda p: setattr(p, "transformer", nn.Linear(WIDTH, WIDTH)),
    "load_state_dict of the transformer": lambda p: load_into(p.transformer),
    "parameter of the transformer assigned": lambda p: setattr(p.vae, "bias", nn.Parameter(torch.ones(WIDTH))),
    "child of the encoder that comes and goes": lambda p: (
        p.text_encoder.add_module("tmp", nn.Identity()),
        delattr(p.text_encoder, "tmp"),
    ),
    "another generator at each request": lambda p: setattr(
        p, "current_model", p.vae if getattr(p, "current_model", None) is p.transformer else p.transformer
    ),
    "the same encoder set again": lambda p: setattr(p, "text_encoder", p.text_encoder),
    "the same parameter set again": lambda p: setattr(p.text_encoder.embed, "weight", p.text_encoder.embed.weight),
    "eval and to": lambda p: (p.text_encoder.eval(), p.text_encoder.to("cpu")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_never_stale(call: Any, change: str) -> None:
    encoder, apply = CHANGES[change]
    pipeline, cache = installed(Adapter(encoder))
    with recomputed(pipeline, cache, *call):
        apply(pipeline)
    assert pipeline.runs == 3  # at first, once after the change, and once by recomputed() itself


@pytest.mark.parametrize("event", KEPT)
def test_an_event_that_changes_nothing_costs_no_hit(call: Any, event: str) -> None:
    pipeline, cache = installed()
    for _ in range(3):  # as at each request
        with kept(pipeline, cache, *call):
            KEPT[event](pipeline)


def test_an_encoder_that_hides_a_registered_one_is_replaced(call: Any) -> None:
    pipeline = Adapter()
    object.__setattr__(pipeline, "text_encoder", Encoder())
    pipeline, cache = installed(pipeline)
    for _ in range(2):
        with recomputed(pipeline, cache, *call):
            object.__setattr__(pipeline, "text_encoder", Encoder())


def test_a_child_that_stays_costs_one_clear(call: Any) -> None:
    pipeline, cache = installed()
    pipeline.encode_prompt(*call)
    pipeline.text_encoder.add_module("stays", nn.Identity())
    assert not is_hit(pipeline, cache, *call)
    assert all(is_hit(pipeline, cache, *call) for _ in range(5))


def test_any_load_of_the_pipeline_empties_the_cache(call: Any) -> None:
    """A pipeline may keep what it has derived from an embedding, whatever the names of the weights."""
    pipeline, cache = installed()
    pipeline.encode_prompt(*call)
    pipeline.load_weights(new_weights(pipeline.transformer, "transformer."))
    assert not is_hit(pipeline, cache, *call)
    assert omni_tensor_key.stats()["cleared"]["Adapter"]["load_weights"] >= 1


def test_what_is_encoded_while_weights_load_does_not_stay(call: Any) -> None:
    pipeline, cache = installed()

    def weights() -> Any:
        for item in new_weights(pipeline.text_encoder, "text_encoder."):
            pipeline.encode_prompt(*call)
            assert cache.stats()["size"] == 0
            yield item

    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(weights())


def test_a_load_that_raises_half_way_leaves_nothing(call: Any) -> None:
    pipeline, cache = installed()

    def weights() -> Any:
        yield new_weights(pipeline.text_encoder, "text_encoder.")[0]
        raise OSError("mine")

    with recomputed(pipeline, cache, *call), pytest.raises(OSError, match="mine"):
        pipeline.load_weights(weights())


def test_a_load_during_a_call_keeps_its_result_out(call: Any) -> None:
    class Loading(Adapter):
        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            found = super().encode_prompt(prompt_ids, attention_mask)
            if self.runs == 1:
                _load_pipeline(self)
            return found

    pipeline, cache = installed(Loading())
    pipeline.encode_prompt(*call)
    assert cache.stats()["size"] == 0
    assert torch.equal(pipeline.encode_prompt(*call)[0], without_cache(pipeline, *call)[0])
    assert is_hit(pipeline, cache, *call)


class Assigning(Encoder):
    """Assigns a module and a parameter while it runs, as FSDP does, and can fail after it."""

    fails = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.rotary = nn.Identity()
        self.embed.weight = nn.Parameter(self.embed.weight.detach().clone())
        if self.fails:
            raise RuntimeError("mine")
        return super().forward(ids)


def test_an_encoder_that_assigns_while_it_runs_is_cached(call: Any) -> None:
    pipeline, cache = installed(Adapter(Assigning))
    pipeline.encode_prompt(*call)
    for change in (lambda: None, lambda: pipeline.encode_prompt(*call, 1, None, torch.ones(1)), lambda: fail(pipeline)):
        change()
        assert is_hit(pipeline, cache, *call)
    with recomputed(pipeline, cache, *call):  # while what others assign counts
        pipeline.text_encoder.embed.weight = nn.Parameter(torch.ones(16, WIDTH))


class Growing(Encoder):
    """Makes a layer when it runs for the first time."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "last"):
            self.last = nn.Linear(WIDTH, WIDTH)
        return self.last(super().forward(ids))


def test_what_an_encoder_has_made_while_it_ran_is_a_part_of_it(call: Any) -> None:
    pipeline, cache = installed(Adapter(Growing))
    with recomputed(pipeline, cache, *call):
        load_into(pipeline.text_encoder.last)
    with recomputed(pipeline, cache, *call):
        pipeline.text_encoder.last.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def fail(pipeline: Any) -> None:
    pipeline.text_encoder.fails = True
    with pytest.raises(RuntimeError, match="mine"):
        pipeline.encode_prompt(torch.tensor([[1, 2]]))
    pipeline.text_encoder.fails = False


def test_an_encoder_that_comes_with_the_first_call(call: Any) -> None:
    class Lazy(Adapter):
        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            if self.text_encoder is None:
                self.text_encoder = _other_encoder()
            return super().encode_prompt(prompt_ids, attention_mask)

    pipeline, cache = installed(Lazy(lambda: None))  # type: ignore[arg-type]
    pipeline.encode_prompt(*call)
    pipeline.encode_prompt(*call)
    assert is_hit(pipeline, cache, *call)
    with recomputed(pipeline, cache, *call):
        load_into(pipeline.text_encoder)


def test_other_pipelines_may_end_while_weights_load(call: Any) -> None:
    class Collecting(LoadingEncoder):
        def modules(self) -> Any:
            gc.collect()
            return super().modules()

    pipeline, cache = installed(Adapter(Collecting))
    with recomputed(pipeline, cache, *call):
        gc.disable()
        try:
            for _ in range(20):  # each is a cycle, which only a collection ends
                installed()[0].encode_prompt(*call)
            pipeline.text_encoder.load_weights(new_weights(pipeline.text_encoder))
        finally:
            gc.enable()


def test_two_pipelines_with_one_encoder(call: Any) -> None:
    first, second = installed(), installed()
    second[0].text_encoder = first[0].text_encoder
    for pipeline, cache in (first, second):
        pipeline.encode_prompt(*call)
        assert is_hit(pipeline, cache, *call)
    load_into(first[0].text_encoder)
    for pipeline, cache in (first, second):
        assert not is_hit(pipeline, cache, *call)


def test_peft_layers_come_and_go(call: Any, log: Any) -> None:
    peft = pytest.importorskip("peft")
    pipeline, cache = installed()
    pipeline.encode_prompt(*call)
    plain, config = pipeline.text_encoder, peft.LoraConfig(r=2, target_modules=["layers.0"], init_lora_weights=False)
    has_tensors = any(isinstance(argument, torch.Tensor) for argument in call)
    for name in ("first", "second"):
        pipeline.text_encoder = peft.get_peft_model(plain, config, name)
        assert not is_hit(pipeline, cache, *call)
        with pipeline.text_encoder.disable_adapter():  # nothing tells of this
            assert has_tensors != is_hit(pipeline, cache, *call)
        pipeline.text_encoder = pipeline.text_encoder.unload()
        pipeline.encode_prompt(*call)
        assert is_hit(pipeline, cache, *call)
    assert len(log.having("WARNING", "PEFT tuner layers")) == 1
    if has_tensors:
        assert omni_tensor_key.stats()["not_stored"]["Adapter"]["peft"] >= 2
    counts = cache.stats()
    assert counts["hits"] + counts["misses"] + counts["bypassed"] == pipeline.runs + counts["hits"]


def test_a_guarded_encoder_is_pickled_and_copied_as_without_a_guard(call: Any) -> None:
    pipeline, cache = installed(Adapter(LoadingEncoder))
    pipeline.encode_prompt(*call)
    file = io.BytesIO()
    torch.save(pipeline.text_encoder, file)
    assert b"omni_tensor_key" not in file.getvalue() + pickle.dumps(pipeline.text_encoder)
    copied = copy.deepcopy(pipeline.text_encoder)
    with kept(pipeline, cache, *call):
        copied.load_weights(new_weights(copied))


def test_a_module_under_a_name_of_its_own_that_comes_later(call: Any) -> None:
    class Named(Adapter):
        def __init__(self) -> None:
            super().__init__()
            self.llm = self.current = None

        def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
            self.llm = self.llm or _other_encoder()
            self.text_encoder = self.llm
            return super().encode_prompt(prompt_ids, attention_mask)

    pipeline, cache = installed(Named())
    pipeline.encode_prompt(*call)
    pipeline.encode_prompt(*call)
    with recomputed(pipeline, cache, *call):
        load_into(pipeline.llm)
    with recomputed(pipeline, cache, *call):
        pipeline.llm = Encoder()
    for model in (pipeline.transformer, pipeline.vae):  # as at each request
        with kept(pipeline, cache, *call):
            pipeline.current = model


def test_ranks_without_the_encoder_decide_as_the_one_that_has_it(call: Any) -> None:
    ranks = [installed(Adapter(encoder)) for encoder in (Encoder, PlainEncoder)]
    for pipeline, cache in ranks:
        pipeline.encode_prompt(*call)
        pipeline.transformer.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        assert is_hit(pipeline, cache, *call)


def test_tensors_of_a_guarded_encoder_can_be_swapped(call: Any) -> None:
    """FSDP2 and wrapper subclasses move so, and torch refuses it where a weak reference to a tensor exists."""
    pipeline, cache = installed()
    pipeline.encode_prompt(*call)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        pipeline.text_encoder.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert is_hit(pipeline, cache, *call)


def test_a_setting_of_a_request_does_not_cost_a_snapshot(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline has many of them, and all are None at first."""
    pipeline = Adapter()
    pipeline._guidance_scale = None
    pipeline, cache = installed(pipeline)
    pipeline.encode_prompt(*call)
    monkeypatch.setattr("omni_tensor_key.freshness.guard.PartsSnapshot", None)  # nobody makes one
    for scale in (3.5, 4.0, None):
        pipeline._guidance_scale = scale
        assert is_hit(pipeline, cache, *call)
