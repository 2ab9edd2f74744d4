"""Which adapters the checkout has, and what is done with each."""

from __future__ import annotations

from .checkout import PIPELINES, STAGES, Adapter, Checkout, own_entry_points, takes_batches
from .pipelines import BUILDERS


def _note(checkout: Checkout, adapter: Adapter) -> str:
    """Why an adapter, or an entry point of it, is not run; "" if it is run whole."""
    if adapter.registry == STAGES:
        return "describes the stages of an autoregressive model; no diffusion pipeline, no encode_prompt()"
    if adapter.registry != PIPELINES:
        return "UNKNOWN: it registers nowhere that these tests know"
    cls = checkout.try_load(adapter)
    if isinstance(cls, str):
        return cls
    if not hasattr(cls, "encode_prompt"):
        return "has no encode_prompt(), so vLLM-Omni installs no cache"
    if adapter.architecture not in BUILDERS:
        return f"UNKNOWN: these tests have no pipeline for the architecture {adapter.architecture}"
    notes = []
    if "prepare_encode" not in own_entry_points(cls) and hasattr(cls, "prepare_encode"):
        notes.append("`prepare_encode` is vLLM-Omni's own, which does not call this encode_prompt() as it is declared")
    if not takes_batches(cls):
        notes.append("batches: supports_request_batch is false, so verl-omni starts its engine with max_num_seqs=1")
    return "; ".join(notes)


def test_every_adapter_is_accounted_for(checkout: Checkout) -> None:
    adapters = checkout.adapters()
    notes = {adapter.title: note for adapter in adapters if (note := _note(checkout, adapter))}
    print(notes)
    assert not [note for note in notes.values() if "UNKNOWN" in note], notes
    run = [adapter for adapter in adapters if adapter.architecture in BUILDERS]
    assert {"QwenImagePipeline", "WanPipeline"} <= {adapter.architecture for adapter in run}
    assert any(not isinstance(checkout.try_load(adapter), str) for adapter in run), notes


def test_imports_leave_no_placeholders(checkout: Checkout) -> None:
    import sys

    for adapter in checkout.adapters():
        checkout.try_load(adapter)
    assert not [name for name, module in sys.modules.items() if type(module).__name__ == "_Placeholder"]
