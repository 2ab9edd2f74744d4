"""`omni-tensor-key audit` on the adapters: what it says from the source is what the runs show."""

from __future__ import annotations

import pytest

from omni_tensor_key.audit import Audit, audit

from .checkout import PIPELINES, Adapter, Checkout


def _audit(checkout: Checkout, adapter: Adapter) -> Audit:
    path = checkout.root.joinpath(*adapter.module.split(".")).with_suffix(".py")
    return audit(f"{path}:{adapter.name}")


def test_every_adapter_can_be_read(checkout: Checkout) -> None:
    for adapter in checkout.adapters():
        if adapter.registry == PIPELINES:
            cls = checkout.try_load(adapter)
            result = _audit(checkout, adapter)
            assert bool(result.defined) == hasattr(cls, "encode_prompt"), adapter.title


def test_token_ids_are_keyed_and_nothing_is_hidden(checkout: Checkout) -> None:
    audited = [
        _audit(checkout, adapter)
        for adapter in checkout.adapters()
        if adapter.architecture in ("QwenImagePipeline", "WanPipeline", "QwenImageEditPlusPipeline")
    ]
    assert audited
    for result in audited:
        verdicts = {parameter.name: parameter.verdict for parameter in result.parameters}
        assert (verdicts["prompt_ids"], verdicts["attention_mask"]) == ("keyed", "keyed")
        assert verdicts["prompt_embeds"] == "bypass"
        assert verdicts.get("condition_images", "bypass") == "bypass"
        assert result.warnings == []


def test_hidden_ids_are_found(checkout: Checkout) -> None:
    adapters = [adapter for adapter in checkout.adapters() if adapter.architecture == "MiniMaxH3Pipeline"]
    if not adapters:
        pytest.skip("the checkout has no MiniMax H3 adapter")
    result = _audit(checkout, adapters[0])
    assert "self._h3_prompt_ids" in result.warnings[0]
