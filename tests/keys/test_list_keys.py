"""Values without tensors get the keys that upstream's own function makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from .strategies import HasItem, Items, Level, Mapping, Pair, Point, anything, exact_scalars, nested
from .support import fuzz, outcome, pristine, same


def agree(active: Any, value: Any) -> None:
    expected = outcome(pristine()._hashable, value)
    got = outcome(active._hashable, value)
    assert same(got, expected), f"{value!r}: {got!r}, but upstream: {expected!r}"


@fuzz(2000)
@given(anything)
def test_any_value(active: Any, value: Any) -> None:
    agree(active, value)


@fuzz(1500)
@given(nested)
def test_values_that_upstream_keys(active: Any, value: Any) -> None:
    agree(active, value)


@fuzz(500)
@given(exact_scalars)
def test_a_scalar_is_its_own_key(active: Any, value: Any) -> None:
    assert active._hashable(value) is value


SEQUENCES = [[], (), [1], [[[]]], [1, "a", None, 2.5, b"b", True], list(range(1024)), [1, [2, [3, [4]]], 5]]
SUBCLASSES = [Items([1, [2]]), Pair((1, [2])), Point(1, [2]), torch.Size([1, 2]), Mapping(a=[1]), Level.HIGH]
NUMBERS = [1, 1.0, True, np.int64(1), np.array(1), np.array([1]), [1], [1.0], [True], (1,), {1: 1}, {1.0: 1}]


@pytest.mark.parametrize("value", SEQUENCES + SUBCLASSES + NUMBERS)
def test_values_of_note(active: Any, value: Any) -> None:
    agree(active, value)
    agree(active, [value, (value, {"name": value})])


def test_a_refused_item_refuses_the_whole(active: Any) -> None:
    for refused in (object(), {1}, np.arange(2), range(2), torch.ones(2), 1j):
        assert active._hashable(refused) is active._NOT_HASHABLE
        for value in ([1, refused], (1, [refused]), {"a": [1, refused]}, [[[refused], 1], 1], HasItem([refused])):
            assert active._hashable(value) is active._NOT_HASHABLE


def test_the_argument_is_not_changed(active: Any) -> None:
    inner: list[Any] = [1, 2]
    value = [inner, (inner,), {"b": inner, "a": 1}]
    active._hashable(value)
    assert value == [[1, 2], ([1, 2],), {"b": [1, 2], "a": 1}]
    assert value[0] is inner
    assert list(value[2]) == ["b", "a"]


def test_a_later_change_of_a_list_does_not_change_its_key(active: Any) -> None:
    inner = [1, 2]
    key = active._hashable([inner, 3])
    inner.append(9)
    assert key == ("__seq__", (("__seq__", (1, 2)), 3))


def deep(levels: int, kinds: str) -> Any:
    value: Any = 1
    for level in range(levels):
        wrap = kinds[level % len(kinds)]
        value = [value] if wrap == "l" else (value,) if wrap == "t" else {"a": value}
    return value


@pytest.mark.parametrize("kinds", ["l", "t", "d", "ltd"])
def test_deep_nesting(active: Any, kinds: str) -> None:
    agree(active, deep(150, kinds))


@pytest.mark.parametrize("kinds", ["l", "t", "d", "ltd"])
def test_absurd_nesting_is_a_recursion_error(active: Any, kinds: str) -> None:
    value = deep(100_000, kinds)
    assert outcome(active._hashable, value) == ("raises", RecursionError)
    agree(active, [1, [2]])  # still works
    while value != 1:  # taken apart by hand: freeing it in one go would recurse too
        value = value["a"] if type(value) is dict else value[0]


def test_containers_that_hold_themselves(active: Any) -> None:
    loop: list[Any] = [1]
    loop.append((loop,))
    mapping: dict[str, Any] = {}
    mapping["self"] = [mapping]
    for value in (loop, mapping, np.longdouble(1)):  # the item() of a longdouble is itself
        agree(active, value)
        assert outcome(active._hashable, value) == ("raises", RecursionError)
    loop.clear()


def test_an_exception_of_the_argument_goes_through(active: Any) -> None:
    class Broken(dict):  # type: ignore[type-arg]
        def keys(self) -> Any:
            raise KeyError("mine")

    class Interrupted(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise KeyboardInterrupt

    agree(active, [Broken(a=1)])
    agree(active, HasItem(ValueError))
    agree(active, [HasItem(RuntimeError)])
    with pytest.raises(KeyboardInterrupt):
        active._hashable([Interrupted([1])])
    agree(active, [1, [2]])
