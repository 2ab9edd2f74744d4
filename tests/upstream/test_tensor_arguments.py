"""Calls with token-ID and mask tensors hit, miss and return what the encoder would, through upstream's own cache."""

from __future__ import annotations

import inspect
import itertools
import random
from typing import Any

import pytest
import torch

from omni_tensor_key import tensor_key

from .support import SEED, Pipeline, counts, identical, installed, pristine, tensor_keys_in, upstream

pytestmark = pytest.mark.usefixtures("active")

IDS = [101, 2023, 2003, 1037, 3231, 102, 0, 0]
MASK = [1, 1, 1, 1, 1, 1, 0, 0]


def ids(values: Any = IDS, **options: Any) -> torch.Tensor:
    return torch.tensor(values, **options)


def call() -> dict[str, Any]:
    """The call of a rollout adapter, with new tensors every time."""
    return {"prompt_ids": ids([IDS]), "attention_mask": ids([MASK]), "num_images_per_prompt": 1}


def test_sixteen_samples_of_a_prompt_run_the_encoder_once() -> None:
    pipeline, cache = installed()
    outputs = [pipeline.encode_prompt(**call()) for _ in range(16)]
    assert counts(cache) == (15, 1, 0)
    assert pipeline.runs == 1
    assert all(identical(output, Pipeline().encode_prompt(**call())) for output in outputs)


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (8,), (1, 8), (4, 2), (2, 1, 2)])
def test_every_keyed_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pipeline, cache = installed()
    tensor = torch.arange(64)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    for expected in ((0, 1, 0), (1, 1, 0)):
        pipeline.encode_prompt(tensor.clone())
        assert counts(cache) == expected
    pipeline.encode_prompt(torch.nn.Parameter(tensor.clone(), requires_grad=False))
    assert counts(cache) == (2, 1, 0)
    pipeline.encode_prompt(tensor.reshape(1, *shape))
    assert counts(cache) == (2, 2, 0)


def test_equal_bytes_do_not_make_equal_keys(active: Any) -> None:
    """Compared directly: in a dictionary, another hash() hides a comparison that is wrong."""
    zeros = [torch.zeros(shape, dtype=torch.int64) for shape in ((), (1, 1), (1, 1, 1))]
    zeros += [torch.zeros(8 // dtype.itemsize, dtype=dtype) for dtype in (*INTEGERS, torch.bool)]
    empty = [torch.empty(shape) for shape in ((0,), (2, 0), (0, 2))] + [torch.empty(0, dtype=torch.int64)]
    for tensors in (zeros, empty):
        for one, other in itertools.combinations(map(active._hashable, tensors), 2):
            assert one != other
            assert (one == other) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64, torch.bfloat16, torch.bool])
def test_an_empty_prompt(dtype: torch.dtype) -> None:
    pipeline, cache = installed()
    for _ in range(2):
        pipeline.encode_prompt(torch.empty(0, dtype=dtype))
    assert counts(cache) == (1, 1, 0)
    pipeline.encode_prompt(torch.empty((2, 0), dtype=dtype))
    assert counts(cache) == (1, 2, 0)


def test_positional_and_keyword_arguments_meet() -> None:
    pipeline, cache = installed()
    pipeline.encode_prompt(ids(), ids(MASK), 2)
    pipeline.encode_prompt(ids(), attention_mask=ids(MASK), num_images_per_prompt=2)
    pipeline.encode_prompt(num_images_per_prompt=2, attention_mask=ids(MASK), prompt_ids=ids())
    pipeline.encode_prompt(
        max_sequence_length=1024, num_images_per_prompt=2, attention_mask=ids(MASK), prompt_ids=ids()
    )
    assert counts(cache) == (3, 1, 0)


MASKS = [None, ids(MASK), ids(MASK).bool(), ids(MASK).int(), ids([MASK]), MASK, (*MASK,), [bool(m) for m in MASK]]


def test_calls_that_differ_in_one_argument_do_not_meet() -> None:
    pipeline, cache = installed(max_size=64)
    base = {"prompt_ids": ids(), "attention_mask": ids(MASK)}
    prompts = [ids(IDS[::-1]), ids([*IDS[:-1], 1]), ids([IDS]), ids().int(), IDS]
    calls = [base | {"attention_mask": mask} for mask in MASKS[:6]]
    calls += [base | {"max_sequence_length": length} for length in (512, 4)]
    calls += [base | {"num_images_per_prompt": count} for count in (2, 3)]
    calls += [base | {"prompt_ids": prompt} for prompt in prompts]
    for arguments in calls:
        pipeline.encode_prompt(**arguments)
    assert counts(cache) == (0, len(calls), 0)
    for arguments in calls:
        expected = tuple(tensor.detach() for tensor in Pipeline().encode_prompt(**arguments))
        assert identical(pipeline.encode_prompt(**arguments), expected)
    assert counts(cache) == (len(calls), len(calls), 0)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{type(mask).__name__}-{getattr(mask, 'dtype', '')}")
@pytest.mark.parametrize("prompt", [ids([IDS]), ids([IDS]).int(), [IDS], ([*IDS],)], ids=lambda p: type(p).__name__)
def test_miss_hit_and_disabled_cache_agree(mask: Any, prompt: Any) -> None:
    pipeline, cache = installed()
    miss, hit = (pipeline.encode_prompt(prompt, mask) for _ in range(2))
    assert counts(cache) == (1, 1, 0)
    cache.enabled = False
    disabled = pipeline.encode_prompt(prompt, mask)
    assert counts(cache) == (1, 1, 0)
    assert identical(miss, disabled)
    assert identical(hit, disabled)
    assert miss[0].requires_grad
    assert not hit[0].requires_grad


def test_another_model_tag_does_not_meet() -> None:
    signature = inspect.signature(Pipeline().encode_prompt)
    a, again, b = (upstream._build_key(signature, tag, (ids(),), {}) for tag in "AAB")
    assert a == again
    assert a != b


@pytest.mark.parametrize("mask", [ids(MASK * 4), ids(MASK * 4).bool(), ids(MASK * 4, dtype=torch.uint8)])
def test_every_flip_of_a_mask_misses(mask: torch.Tensor) -> None:
    pipeline, cache = installed(max_size=64)
    prompt = ids(IDS * 4)
    pipeline.encode_prompt(prompt, mask)
    for position in range(len(mask)):
        flipped = mask.clone()
        flipped[position] = 1 - flipped[position].int()
        pipeline.encode_prompt(prompt, flipped)
        assert counts(cache) == (0, position + 2, 0)


def test_a_single_bit_in_a_long_prompt_misses() -> None:
    rng = random.Random(SEED)
    pipeline, cache = installed(max_size=1000)
    prompt = torch.tensor([rng.randrange(4096) for _ in range(4096)])
    pipeline.encode_prompt(prompt)
    positions = {0, 1, 127, 128, 129, 4094, 4095} | set(rng.sample(range(4096), 100))
    for seen, position in enumerate(positions):
        other = prompt.clone()
        other[position] ^= 1 << rng.randrange(12)
        pipeline.encode_prompt(other)
        assert counts(cache) == (0, seen + 2, 0)
    pipeline.encode_prompt(prompt.clone())
    assert cache.hits == 1


def test_layouts_of_the_same_values_meet() -> None:
    pipeline, cache = installed()
    wide = torch.arange(64).reshape(4, 16)
    pipeline.encode_prompt(wide[:, 3:9].clone())
    for view in (wide[:, 3:9], wide.t().contiguous().t()[:, 3:9], wide.flip(1).flip(1)[:, 3:9]):
        pipeline.encode_prompt(view)
    assert counts(cache) == (3, 1, 0)
    ones = torch.ones(1, dtype=torch.int64).expand(4, 6)
    pipeline.encode_prompt(wide[:, 3:9], ones)
    pipeline.encode_prompt(wide[:, 3:9], torch.ones(4, 6, dtype=torch.int64))
    assert counts(cache) == (4, 2, 0)


def test_an_edit_in_place_misses() -> None:
    pipeline, cache = installed()
    buffer = ids()
    first = pipeline.encode_prompt(buffer)
    with torch.inference_mode():
        buffer[2] = 7
    edited = pipeline.encode_prompt(buffer)
    assert counts(cache) == (0, 2, 0)
    assert not torch.equal(first[0], edited[0])
    buffer[2] = IDS[2]
    assert identical(pipeline.encode_prompt(buffer), tuple(tensor.detach() for tensor in first))
    assert counts(cache) == (1, 2, 0)


def test_new_content_at_the_address_of_a_freed_tensor_misses() -> None:
    pipeline, cache = installed(max_size=1000)
    addresses: set[int] = set()
    reused = 0
    for content in range(1, 300):
        tensor = torch.full((1, 64), content)
        reused += tensor.data_ptr() in addresses
        addresses.add(tensor.data_ptr())
        embeds, _ = pipeline.encode_prompt(tensor)
        assert torch.equal(embeds, Pipeline().encode_prompt(tensor)[0])
        del tensor
    assert counts(cache) == (0, 299, 0)
    assert reused, "no address came back, so this shows nothing"


NESTINGS = [
    lambda a, b: [a, b],
    lambda a, b: (a, b),
    lambda a, b: [[a], b],
    lambda a, b: [a, [b]],
    lambda a, b: {"x": a, "y": b},
    lambda a, b: {"x": b, "y": a},
    lambda a, b: [{"x": (a,)}, b],
]


def test_tensors_in_containers_are_items_of_their_own(active: Any) -> None:
    pairs = [(ids([1, 2]), ids([3, 4, 5])), (ids([1, 2, 3]), ids([4, 5])), (ids([]).long(), ids([1, 2, 3, 4, 5]))]
    for nest in NESTINGS:
        for a, b in pairs:
            key = active._hashable(nest(a, b))
            assert sorted(map(repr, tensor_keys_in(key))) == sorted(map(repr, (tensor_key(a), tensor_key(b))))
            assert key == active._hashable(nest(a.clone(), b.clone()))
    # As upstream keys lists and tuples of the same items.
    made = [active._hashable(nest(a, b)) for nest in (NESTINGS[0], *NESTINGS[2:]) for a, b in pairs]
    for one, other in itertools.combinations(made, 2):
        assert one != other
    assert active._hashable([ids([1, 2]), ids([3])]) == active._hashable((ids([1, 2]), ids([3])))
    assert active._hashable(ids([1, 2, 3])) != active._hashable([ids([1, 2, 3])])


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3], [True], [[1, 2]], 1, True], ids=repr)
def test_no_tensor_key_equals_a_list_key(active: Any, values: Any) -> None:
    key = active._hashable(torch.tensor(values))
    for other in (values, [values], repr(key), key.digest, key.hexdigest, None):
        assert key != pristine()._hashable(other)
    pipeline, cache = installed()
    for argument in (torch.tensor(values), [torch.tensor(values)], values):
        pipeline.encode_prompt([1], condition_images=argument)
    assert counts(cache) == (0, 3, 0)
