"""Whose memory it is, and for how long: cases 18 to 23."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from upstream.fresh_process import FreshProcesses

from .support import IDS, MASK, Pipeline, all_agree, installed, outcome

pytestmark = pytest.mark.usefixtures("active")


def test_case_18_a_clone_hits() -> None:
    ids = [IDS, IDS.clone(), torch.tensor(IDS.tolist()), IDS.to(torch.int32).long(), IDS.detach(), IDS + 0, IDS[:]]
    assert all_agree(*ids)
    assert all_agree(*[(one, MASK.clone()) for one in ids])
    assert len({one.data_ptr() for one in ids}) > 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_case_19_content_decides_after_an_edit_in_place(mode: Any) -> None:
    with mode():
        pipeline, cache = installed()
        ids = torch.arange(8)
        first = pipeline.encode_prompt(ids)
        ids[3] = 100
        assert pipeline.encode_prompt(ids) is not first
        assert outcome(cache) == (0, 2, 0)
        ids[3] = 3
        assert torch.equal(pipeline.encode_prompt(ids), first)
        ids.data[0] = 50  # leaves the version counter alone
        assert not torch.equal(pipeline.encode_prompt(ids), first)
        assert outcome(cache) == (1, 3, 0)


def test_case_19_content_decides_where_an_address_is_used_again() -> None:
    pipeline, cache = installed(max_size=1000)
    addresses = set()
    for value in range(300):
        ids = torch.full((1, 64), value)
        addresses.add(ids.data_ptr())
        pipeline.encode_prompt(ids)
        del ids
    assert len(addresses) < 300, "no address came twice, so this shows nothing"
    assert outcome(cache) == (0, 300, 0)


def test_case_21_nothing_here_keeps_a_pipeline_or_its_caller_alive() -> None:
    class Runner:
        def __init__(self) -> None:
            self.pipeline, self.prompt_embed_cache = installed()

    runner = Runner()
    pipeline, ids = weakref.ref(runner.pipeline), torch.tensor([1, 2, 3])
    runner.pipeline.encode_prompt(ids, attention_mask=torch.ones(3, dtype=torch.bool))
    gone = [weakref.ref(runner), pipeline, weakref.ref(ids)]
    del runner, ids
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]


def test_case_21_nor_does_a_cache_that_outlives_its_pipeline() -> None:
    pipeline, cache = installed()
    pipeline.encode_prompt(IDS)
    gone = weakref.ref(pipeline)
    # The wrapper is the pipeline's own attribute: a cycle, which a collection ends.
    del pipeline
    gc.collect()
    assert gone() is None
    assert cache.stats()["size"] == 1


class ReturnsItsMask(Pipeline):
    def encode_prompt(self, prompt_ids: Any, attention_mask: Any = None) -> Any:
        self.runs += 1
        mask = attention_mask.to("cpu")  # on the same device that is the caller's own tensor
        return {"embeds": torch.full((4,), float(self.runs)), "mask": mask, "views": [(mask[:, :2], mask.T)]}


def test_case_22_a_stored_value_does_not_change_with_the_callers_buffer() -> None:
    pipeline, cache = installed(ReturnsItsMask())
    ids, mask = torch.arange(4).reshape(1, 4), torch.tensor([[1, 1, 0, 0]])
    pipeline.encode_prompt(ids, mask)
    mask.fill_(9)
    ids.fill_(9)
    hit = pipeline.encode_prompt(torch.arange(4).reshape(1, 4), torch.tensor([[1, 1, 0, 0]]))
    assert outcome(cache) == (1, 1, 0)
    assert hit["mask"].tolist() == [[1, 1, 0, 0]]
    assert hit["views"][0][0].tolist() == [[1, 1]]
    assert hit["views"][0][1].tolist() == [[1], [1], [0], [0]]


EDITS_A_HIT = """
import torch
import omni_tensor_key
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream
omni_tensor_key.activate()
class Pipeline:
    def encode_prompt(self, ids):
        return torch.ones(2, 3), torch.zeros(2)
pipeline = Pipeline()
upstream.install_prompt_embed_cache(pipeline)
ids = torch.tensor([1, 2])
pipeline.encode_prompt(ids)
pipeline.encode_prompt(ids)[0].mul_(2)
try:
    print("served", pipeline.encode_prompt(ids)[0].sum().item())
except RuntimeError as error:
    print(error)
"""


def test_case_23_an_edited_value_is_served_and_the_debug_switch_finds_it(fresh: FreshProcesses) -> None:
    assert "served 12.0" in fresh.check(EDITS_A_HIT).output
    found = fresh.check(EDITS_A_HIT, OMNI_TENSOR_KEY_DEBUG="1").output
    assert "output[0] of Pipeline.encode_prompt() was edited in place" in found
    assert "served" not in found
