"""LoRA adapters that are set, changed and removed through vLLM-Omni's real manager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .lora import Adapters, one_rank
from .support import identical, is_hit, kept, recomputed, without_cache

pytestmark = pytest.mark.usefixtures("active")


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("rendezvous")):
        yield


@pytest.fixture
def image(tmp_path: Path) -> Adapters:
    """As in vLLM-Omni's own pipelines: adapters reach the transformer only."""
    return Adapters(tmp_path, text=False)


@pytest.fixture
def text(tmp_path: Path) -> Adapters:
    """A pipeline that lets adapters reach its text encoder."""
    return Adapters(tmp_path, text=True)


def transformed(lora: Adapters) -> torch.Tensor:
    with torch.no_grad():
        return lora.pipeline.transformer(torch.tensor([1])).clone()


def test_an_adapter_of_the_transformer_keeps_the_cache(call: Any, image: Adapters) -> None:
    before, manager, cached = transformed(image), image.manager, (image.pipeline, image.cache, *call)
    request = image.request("transformer")
    with kept(*cached):
        manager.add_adapter(request)
    for _ in range(2):  # it is set again for every request
        with kept(*cached):
            manager.set_active_adapter(request, 1.0)
    assert not torch.equal(transformed(image), before)
    for scale in (0.5, 0.0, 1.0):
        with kept(*cached):
            manager.set_active_adapter(request, scale)
    with kept(*cached):
        manager.set_active_adapter(None)
    with kept(*cached):
        manager.set_active_adapter(image.request("transformer", 2, rank=4), 1.0)
    with kept(*cached):
        manager.remove_adapter(2)
    torch.testing.assert_close(transformed(image), before)


def test_any_adapter_clears_where_the_text_encoder_can_have_one(call: Any, text: Adapters) -> None:
    """The manager does not say which of a pipeline's layers an adapter touches."""
    request = text.request("transformer")
    for change in (
        lambda: text.manager.add_adapter(request),
        lambda: text.manager.set_active_adapter(request, 1.0),
        lambda: text.manager.remove_adapter(1),
    ):
        text.pipeline.encode_prompt(*call)
        change()
        assert not is_hit(text.pipeline, text.cache, *call)
        assert identical(text.pipeline.encode_prompt(*call), without_cache(text.pipeline, *call))


def test_an_adapter_of_the_text_encoder_is_set(call: Any, text: Adapters) -> None:
    with recomputed(text.pipeline, text.cache, *call):
        text.manager.set_active_adapter(text.request("text_encoder"), 1.0)


def test_setting_it_again_keeps_the_cache(call: Any, text: Adapters) -> None:
    request = text.request("text_encoder")
    text.manager.set_active_adapter(request, 1.0)
    for _ in range(3):
        with kept(text.pipeline, text.cache, *call):
            text.manager.set_active_adapter(request, 1.0)


def test_its_scale_changes(call: Any, text: Adapters) -> None:
    request = text.request("text_encoder")
    text.manager.set_active_adapter(request, 1.0)
    for scale in (0.5, 0.25, 0.0, 1.0):
        with recomputed(text.pipeline, text.cache, *call):
            text.manager.set_active_adapter(request, scale)


def test_it_is_switched_off_and_on_again(call: Any, text: Adapters) -> None:
    request = text.request("text_encoder")
    text.manager.set_active_adapter(request, 1.0)
    for wanted in (None, request, None):
        with recomputed(text.pipeline, text.cache, *call):
            text.manager.set_active_adapter(wanted, 1.0)


def test_another_one_is_set(call: Any, text: Adapters) -> None:
    requests = [text.request("text_encoder", number, value=number) for number in (1, 2)]
    text.manager.set_active_adapter(requests[0], 1.0)
    for request in (requests[1], requests[0]):
        with recomputed(text.pipeline, text.cache, *call):
            text.manager.set_active_adapter(request, 1.0)


def test_it_is_removed(call: Any, text: Adapters) -> None:
    text.manager.set_active_adapter(text.request("text_encoder"), 1.0)
    with recomputed(text.pipeline, text.cache, *call):
        text.manager.remove_adapter(1)


def test_it_is_evicted_by_another(call: Any, tmp_path: Path) -> None:
    text = Adapters(tmp_path, text=True, slots=1)
    text.manager.set_active_adapter(text.request("text_encoder"), 1.0)
    with recomputed(text.pipeline, text.cache, *call):
        text.manager.add_adapter(text.request("transformer", 2))


def test_another_one_comes_under_the_same_id(call: Any, text: Adapters) -> None:
    """verl-omni uses one constant id: remove, add, and set by the next request."""
    text.manager.set_active_adapter(text.request("text_encoder", value=1), 1.0)
    for value in (2.0, 3.0):
        request = text.request("text_encoder", value=value)
        with recomputed(text.pipeline, text.cache, *call):
            text.manager.remove_adapter(1)
            text.manager.add_adapter(request)
            text.manager.set_active_adapter(request, 1.0)


def test_another_one_is_put_in_the_place_of_the_active_one(
    call: Any, text: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an adapter that is loaded anew in place would be: its id and its scale stay."""
    requests = [text.request("text_encoder", number, value=number) for number in (1, 2)]
    for request in requests:
        text.manager.add_adapter(request)
    text.manager.set_active_adapter(requests[0], 1.0)
    adapters, bind = text.manager._registered_adapters, getattr(text.manager, text.binding)

    def reload(number: int, scale: float) -> None:
        adapters[number] = adapters[2]
        if text.takes_number:
            text.manager._active_adapter_id = None  # or it would do nothing
        bind(number if text.takes_number else adapters[number], scale)

    monkeypatch.setattr(text.manager, "_activate_adapter", reload)
    with recomputed(text.pipeline, text.cache, *call):
        text.manager.set_active_adapter(requests[0], 1.0)


def test_what_is_encoded_between_these_steps_does_not_stay(call: Any, text: Adapters) -> None:
    manager, cached = text.manager, (text.pipeline, text.cache, *call)
    manager.set_active_adapter(text.request("text_encoder", value=1), 1.0)
    request = text.request("text_encoder", value=2)
    with recomputed(*cached):
        manager.remove_adapter(1)
    manager.add_adapter(request)
    assert identical(text.pipeline.encode_prompt(*call), without_cache(text.pipeline, *call))
    with recomputed(*cached):
        manager.set_active_adapter(request, 1.0)


def test_an_activation_that_fails_clears(call: Any, text: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights were written, an encode may have seen them, and then the manager resets the layers."""
    request = text.request("text_encoder")
    text.manager.add_adapter(request)
    bind = getattr(text.manager, text.binding)

    def fail(*args: Any, **kwargs: Any) -> None:
        bind(*args, **kwargs)
        text.pipeline.encode_prompt(*call)
        raise RuntimeError("mine")

    monkeypatch.setattr(text.manager, text.binding, fail)
    with pytest.raises(RuntimeError, match="mine"):
        text.manager.set_active_adapter(request, 1.0)
    assert not is_hit(text.pipeline, text.cache, *call)
    assert identical(text.pipeline.encode_prompt(*call), without_cache(text.pipeline, *call))


def test_an_activation_that_fails_after_another_adapter_clears(
    call: Any, text: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text.takes_number:
        pytest.skip("before vllm-omni 0.28, an activation that fails leaves the layers as they were")
    text.manager.set_active_adapter(text.request("text_encoder"), 1.0)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("mine")

    monkeypatch.setattr(text.manager, text.binding, fail)
    with recomputed(text.pipeline, text.cache, *call), pytest.raises(RuntimeError, match="mine"):
        text.manager.set_active_adapter(text.request("text_encoder", 2), 1.0)


def test_an_adapter_that_cannot_be_read_keeps_what_is_right(call: Any, text: Adapters) -> None:
    text.pipeline.encode_prompt(*call)
    request = text.request("text_encoder", r="no number")
    with pytest.raises(TypeError, match="str"):
        text.manager.set_active_adapter(request, 1.0)
    assert identical(text.pipeline.encode_prompt(*call), without_cache(text.pipeline, *call))


def test_a_manager_of_another_kind_clears_at_each_change(call: Any, text: Adapters) -> None:
    text.manager.set_active_adapter(text.request("text_encoder"), 1.0)
    text.pipeline.encode_prompt(*call)
    del text.manager._adapter_scales
    with pytest.raises(AttributeError):
        text.manager.set_active_adapter(text.request("text_encoder"), 0.5)
    assert not is_hit(text.pipeline, text.cache, *call)


def test_the_manager_of_a_pipeline_without_a_cache(tmp_path: Path) -> None:
    from vllm_omni.diffusion.cache.prompt_embed_cache import uninstall_prompt_embed_cache

    text = Adapters(tmp_path, text=True)
    uninstall_prompt_embed_cache(text.pipeline)
    assert text.manager.add_adapter(text.request("text_encoder")) is True
    assert text.manager.remove_adapter(7) is False
