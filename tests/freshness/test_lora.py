"""LoRA adapters that are set, changed and removed through vLLM-Omni's real manager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CALLS, identical, is_hit, kept, recomputed, without_cache

from .lora import Adapters, one_rank

pytestmark = [pytest.mark.usefixtures("active"), pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)]


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_rank(tmp_path_factory.mktemp("rendezvous")):
        yield


@pytest.fixture
def text(tmp_path: Path) -> Adapters:
    """A pipeline that lets adapters reach its text encoder, with one that is active."""
    adapters = Adapters(tmp_path, text=True)
    adapters.manager.set_active_adapter(adapters.request("text_encoder"), 1.0)
    return adapters


def _same_id(a: Adapters) -> None:
    """verl-omni uses one constant id: remove, add, and set by the next request."""
    request = a.request("text_encoder", value=3.0)
    a.manager.remove_adapter(1)
    a.manager.add_adapter(request)
    a.manager.set_active_adapter(request, 1.0)


CHANGES: dict[str, Callable[[Adapters], Any]] = {
    "scale": lambda a: a.manager.set_active_adapter(a.request("text_encoder"), 0.5),
    "scale of zero": lambda a: a.manager.set_active_adapter(a.request("text_encoder"), 0.0),
    "none": lambda a: a.manager.set_active_adapter(None),
    "another": lambda a: a.manager.set_active_adapter(a.request("text_encoder", 2, value=2.0), 1.0),
    "removed": lambda a: a.manager.remove_adapter(1),
    "another under the same id": _same_id,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_adapter_of_the_text_encoder_changes(call: Any, text: Adapters, change: Callable[[Adapters], Any]) -> None:
    with recomputed(text.pipeline, text.cache, *call):
        change(text)


def test_setting_it_again_keeps_the_cache(call: Any, text: Adapters) -> None:
    for _ in range(3):
        with kept(text.pipeline, text.cache, *call):
            text.manager.set_active_adapter(text.request("text_encoder"), 1.0)


def test_an_adapter_of_the_transformer_keeps_the_cache(call: Any, tmp_path: Path) -> None:
    image = Adapters(tmp_path, text=False)
    cached, manager = (image.pipeline, image.cache, *call), image.manager
    request = image.request("transformer")
    for scale in (1.0, 1.0, 0.5, 0.0):  # it is set again for every request
        with kept(*cached):
            manager.set_active_adapter(request, scale)
    with kept(*cached):
        manager.set_active_adapter(image.request("transformer", 2, rank=4), 1.0)
    with kept(*cached):
        manager.remove_adapter(2)


def test_it_is_evicted_by_another(call: Any, tmp_path: Path) -> None:
    text = Adapters(tmp_path, text=True, slots=1)
    text.manager.set_active_adapter(text.request("text_encoder"), 1.0)
    with recomputed(text.pipeline, text.cache, *call):
        text.manager.add_adapter(text.request("transformer", 2))


@pytest.mark.parametrize("active_before", [True, False])
def test_an_activation_that_fails_clears(
    call: Any, text: Adapters, active_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights were written, an encode may have seen them, and then the manager resets the layers."""
    if not active_before:
        text.manager.set_active_adapter(None)
    request = text.request("text_encoder", 2, value=2.0)
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


def test_a_manager_of_a_pipeline_without_a_cache(call: Any, tmp_path: Path) -> None:
    from vllm_omni.diffusion.cache.prompt_embed_cache import uninstall_prompt_embed_cache

    text = Adapters(tmp_path, text=True)
    uninstall_prompt_embed_cache(text.pipeline)
    assert text.manager.add_adapter(text.request("text_encoder")) is True
    assert text.manager.remove_adapter(7) is False
    assert isinstance(text.pipeline.encode_prompt(*call)[0], torch.Tensor)
