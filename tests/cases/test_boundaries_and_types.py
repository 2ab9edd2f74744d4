"""Where one argument ends and the next begins, and which types are which: cases 1 to 9."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import omni_tensor_key
from omni_tensor_key import UncacheableTensorError, tensor_key

from .support import IDS, MASK, all_agree, all_bypass, all_differ, calls

pytestmark = pytest.mark.usefixtures("active")


def test_case_01_tensors_in_a_list_keep_their_boundaries() -> None:
    ids = torch.arange(1, 6)
    splits = [[ids[:cut], ids[cut:]] for cut in range(6)]
    nested = [[ids], [[ids]], [[ids[:2]], ids[2:]], [ids[:2], [ids[2:]]]]
    between_arguments = [{"prompt_ids": ids[:cut], "attention_mask": ids[cut:]} for cut in range(6)]
    assert all_differ(*splits, *nested, *between_arguments)


def test_case_02_the_shape_is_part_of_the_key() -> None:
    values = torch.arange(16)
    shapes = [(16,), (4, 4), (1, 16), (16, 1), (2, 8), (1, 4, 4), (4, 1, 4), (4, 4, 1), (2, 2, 2, 2)]
    assert all_differ(*[values.reshape(shape) for shape in shapes])


def test_case_03_numbers_in_lists_are_as_upstream_has_them_and_tensors_are_typed() -> None:
    lists = [[1, 2], [1.0, 2.0], [True, 2], [[1], 2], [1, 2.5], [-0.0], [0], ["1", 2]]
    with_extension = calls(*lists)
    omni_tensor_key.deactivate()
    try:
        assert calls(*lists) == with_extension
    finally:
        omni_tensor_key.activate()
    dtypes = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    assert all_differ([0, 1], *[torch.tensor([0, 1], dtype=dtype) for dtype in dtypes])
    assert all_bypass(torch.tensor([0.0, 1.0]))


def test_case_04_containers_of_the_same_items(active: Any) -> None:
    assert active._hashable([1, 2]) == active._hashable((1, 2)) == ("__seq__", (1, 2))
    assert all_agree([1, 2], ((1, 2),))
    tensor = torch.tensor([1, 2])
    assert all_differ([1, 2], {"prompt_ids": {0: 1, 1: 2}}, tensor, [tensor], {"prompt_ids": {0: tensor}})
    assert all_bypass(range(1, 3), {1, 2})


def test_case_05_what_upstream_does_not_know_has_no_key_whatever_its_repr() -> None:
    class Prompt:
        def __repr__(self) -> str:
            return "Prompt()"

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            return True

    assert all_bypass(Prompt(), [IDS, Prompt()], {"prompt_ids": IDS, "attention_mask": Prompt()})


def test_case_06_every_byte_of_a_large_tensor_counts() -> None:
    ids = torch.zeros(1 << 17, dtype=torch.int64)  # 1 MiB, the most that is keyed
    keys = {tensor_key(ids).digest}
    content = ids.view(torch.uint8)
    positions = sorted(
        {*range(0, 1 << 20, 4093), *(edge + d for edge in (1024, 1 << 19) for d in (-1, 0, 1)), -1 % (1 << 20)}
    )
    for position in positions:
        content[position] = 1
        keys.add(tensor_key(ids).digest)
        content[position] = 0
    assert len(keys) == 1 + len(positions)
    assert all_bypass(torch.zeros((1 << 17) + 1, dtype=torch.int64))
    with pytest.raises(UncacheableTensorError, match="OMNI_TENSOR_KEY_MAX_BYTES"):
        tensor_key(torch.zeros((1 << 17) + 1, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_case_07_every_flip_of_a_mask_counts(dtype: torch.dtype) -> None:
    ids = torch.arange(32).reshape(1, 32)
    masks = [torch.ones(1, 32, dtype=dtype) for _ in range(33)]
    for place in range(32):
        masks[place][0, place] = 0
    assert all_differ((ids,), *[(ids, mask) for mask in masks])


def test_case_08_the_other_arguments_and_the_model_are_part_of_the_key(active: Any) -> None:
    call = {"prompt_ids": IDS, "attention_mask": MASK}
    assert all_differ(
        call,
        call | {"max_sequence_length": 512},
        call | {"num_images_per_prompt": 2},
        call | {"max_sequence_length": 512, "num_images_per_prompt": 2},
    )
    assert all_agree(call, call | {"max_sequence_length": 1024}, (IDS, MASK), (IDS, MASK, 1))
    signature = inspect.signature(lambda prompt_ids: None)
    tags = [active._build_key(signature, tag, (IDS,), {}) for tag in ("QwenImage", "Wan22")]
    assert tags[0] != tags[1]


def test_case_09_a_tensor_without_dimensions_is_keyed() -> None:
    scalars = [torch.tensor(value) for value in (0, 1, True)]
    assert all_differ(*scalars, *[scalar.reshape(1) for scalar in scalars], 0, np.int64(7))
    assert tensor_key(torch.tensor(5)).shape == ()
