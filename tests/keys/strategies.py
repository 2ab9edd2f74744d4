"""Hypothesis strategies for arguments without tensors, from the ordinary to the absurd."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import types
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Real(float):
    pass


class Raw(bytes):
    pass


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Flag(enum.IntFlag):
    A = 1
    B = 2


class Colour(str, enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: Any
    y: Any


class Items(list):
    pass


class Pair(tuple):
    __slots__ = ()


class Mapping(dict):
    pass


class PretendsToBeAList:
    """isinstance() believes it, iteration does not work."""

    __class__ = property(lambda self: list)  # type: ignore[assignment]


class HasItem:
    """Looks like a numpy scalar to upstream."""

    __module__ = "numpy.imitation"

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        if isinstance(self.value, type) and issubclass(self.value, Exception):
            raise self.value("no item")
        return self.value


@dataclasses.dataclass
class Config:
    size: int = 1


# Surrogates too: st.text() leaves them out by default.
text = st.text(st.characters(exclude_categories=()), max_size=8)
integers = st.integers() | st.sampled_from([0, -1, 2**63, -(2**64), 10**300])
floats = st.floats() | st.sampled_from([0.0, -0.0, float("nan"), 1.0])

exact_scalars = st.none() | st.booleans() | integers | floats | text | st.binary(max_size=8)

scalar_subclasses = (
    st.builds(Text, text)
    | st.builds(Whole, integers)
    | st.builds(Real, floats)
    | st.builds(Raw, st.binary(max_size=4))
    | st.sampled_from([Level.LOW, Level.HIGH, Flag.A | Flag.B, Colour.RED])
)

devices = st.sampled_from([torch.device("cpu"), torch.device("cuda"), torch.device("cuda:1"), torch.device("meta")])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
torch_constants = devices | dtypes

numpy_scalars = (
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1))
    | st.builds(np.uint8, st.integers(0, 255))
    | st.builds(np.float64, floats)
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(np.bool_, st.booleans())
    | st.builds(np.str_, text)
    | st.builds(np.bytes_, st.binary(max_size=4))
    | st.builds(np.datetime64, st.integers(0, 2**40), st.sampled_from(["D", "s", "ns"]))
    | st.builds(np.timedelta64, st.integers(0, 2**40), st.sampled_from(["D", "ns"]))
    | st.builds(np.complex128, st.complex_numbers())
    | st.builds(np.longdouble, st.integers(0, 3))  # its item() is itself
    | st.builds(np.array, integers | floats | text)  # 0-d
    | st.builds(lambda value: np.array([[value]]), st.integers(0, 9) | st.floats())
    | st.builds(lambda size: np.arange(size), st.integers(0, 3))
    | st.builds(lambda size: np.array((size, b"x"), dtype=[("a", "i4"), ("b", "S2")]), st.integers(0, 9))
    | st.sampled_from([np.dtype("int32"), np.int64, np.array(None, dtype=object), np.random.default_rng(0)])
)

others = st.builds(
    lambda make: make(),
    st.sampled_from(
        [
            object,
            set,
            frozenset,
            bytearray,
            complex,
            Config,
            PretendsToBeAList,
            lambda: {1, "a"},
            lambda: range(3),
            lambda: (i for i in range(3)),
            lambda: collections.deque([1]),
            lambda: decimal.Decimal("1.0"),
            lambda: types.MappingProxyType({"a": 1}),
            lambda: types.SimpleNamespace(a=1),
            lambda: collections.UserDict(a=1),
            lambda: memoryview(b"a"),
            lambda: int,
            lambda: len,
            lambda: ...,
            lambda: NotImplemented,
            lambda: HasItem(ValueError),
            lambda: HasItem(TypeError),
            lambda: HasItem(KeyError),
            lambda: HasItem([1, (2,)]),
        ]
    ),
)

keys = exact_scalars | scalar_subclasses | st.tuples(integers, text) | st.builds(object) | torch_constants


def _containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(values, max_size=4)
    dicts = st.dictionaries(keys, values, max_size=3)

    def zero_dimensional(value: Any) -> np.ndarray[Any, Any]:
        array = np.empty((), dtype=object)
        array[()] = value
        return array

    return (
        lists
        | lists.map(tuple)
        | lists.map(Items)
        | lists.map(Pair)
        | st.builds(Point, values, values)
        | st.lists(st.integers(0, 2**40), max_size=5).map(torch.Size)
        | dicts
        | dicts.map(Mapping)
        | dicts.map(collections.OrderedDict)
        | dicts.map(lambda d: collections.defaultdict(list, d))
        | st.builds(zero_dimensional, values)
        | st.builds(HasItem, values)
    )


keyable = exact_scalars | scalar_subclasses | torch_constants
# Mostly what has a key: one refusal anywhere makes the whole value refused.
leaves = st.one_of(*[keyable] * 8, numpy_scalars, others)
nested = st.recursive(keyable, _containers, max_leaves=8)
anything = st.recursive(leaves, _containers, max_leaves=8)
