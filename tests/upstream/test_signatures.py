"""Which signatures are bound natively, which plans are kept, and signatures that nobody has in earnest."""

from __future__ import annotations

import itertools
import random
import sys
from inspect import Parameter, Signature
from typing import Any

import pytest
import torch

from . import strategies
from .support import SEED, agree, pristine, same

pytestmark = pytest.mark.usefixtures("active")

CONSTANTS = (None, True, 1, 2.5, "text", b"bytes", torch.float32, torch.device("cpu"), (), (1, ("a", (torch.int8,))))
# A list or a dict may be filled with something that leads to the pipeline; a tuple may be long.
OTHERS = (
    [],
    {},
    ([1],),
    {"a": [1]},
    strategies.Text("a"),
    object(),
    agree,
    1j,
    set(),
    (strategies.Text("a"),),
    (1,) * 100,
)


def held(active: Any, default: Any) -> bool:
    """Whether the builder keeps a signature with this default, which is what makes the next call fast."""
    signature = Signature([Parameter("prompt", 1), Parameter("option", 1, default=default)])
    before = sys.getrefcount(signature)
    agree(active, signature, ("a",), {})
    agree(active, signature, ("a",), {"option": [1]})
    return sys.getrefcount(signature) > before


@pytest.mark.parametrize("default", CONSTANTS, ids=repr)
def test_signatures_with_constant_defaults_are_kept(active: Any, default: Any) -> None:
    assert held(active, default)


@pytest.mark.parametrize("default", OTHERS, ids=repr)
def test_nothing_is_kept_of_signatures_with_other_defaults(active: Any, default: Any) -> None:
    references = sys.getrefcount(default)
    assert not held(active, default)
    assert sys.getrefcount(default) == references


@pytest.mark.parametrize(
    "parameters",
    [
        [Parameter("prompt", 1), Parameter("n", 3, default=1)],
        [Parameter("prompt", 0), Parameter("n", 0, default=1), Parameter("more", 4)],
        [Parameter("prompt", 1), Parameter("more", 2), Parameter("n", 3, default=[1])],
        [Parameter("prompt", 1), Parameter("n", 1, default=strategies.Level.LOW)],
    ],
    ids=str,
)
def test_what_is_bound_without_inspect(active: Any, monkeypatch: Any, parameters: list[Parameter]) -> None:
    """Binding is most of the time that upstream's function takes: it makes up for what we do at each lookup."""
    signature = Signature(parameters)
    expected = pristine()._build_key(signature, "tag", ("a",), {})
    monkeypatch.delattr(Signature, "bind_partial")
    for _ in range(2):
        assert same(active._build_key(signature, "tag", ("a",), {}), expected)


def test_a_default_that_is_deeply_nested(active: Any) -> None:
    default: Any = ()
    for _ in range(100):
        default = (default,)
    assert not held(active, default)


def test_more_signatures_than_plans_are_kept(active: Any) -> None:
    rng = random.Random(SEED)
    made = [Signature([Parameter(f"p{i}", 1, default=i), Parameter("q", 1, default=(i,))]) for i in range(200)]
    for _ in range(5):
        rng.shuffle(made)
        for signature in made:
            agree(active, signature, (), {"q": [3]})


def test_a_new_signature_at_the_address_of_a_freed_one(active: Any) -> None:
    rng = random.Random(SEED)
    seen: dict[int, int] = {}
    reused = 0
    for i in range(1000):
        names = rng.sample("abcdefghij", 3)
        signature = Signature([Parameter(name, 1, default=i) for name in names])
        reused += id(signature) in seen
        seen[id(signature)] = i
        agree(active, signature, (1,), {names[2]: 2})
        del signature
    assert reused, "no address came back, so this shows nothing"


def test_parameters_in_an_order_that_inspect_does_not_check(active: Any) -> None:
    given: dict[str, Any] = {"own": 1}
    for kinds in itertools.permutations(range(5), 3):
        named = [Parameter(f"p{kind}", Parameter("p", kind).kind) for kind in kinds]
        signature = Signature(named, __validate_parameters__=False)
        for args, kwargs in (((), {}), ((given, 2), {}), ((given,), {"x": 5}), ((), {"p1": 1, "p3": 3, "x": 5})):
            agree(active, signature, args, kwargs)
        assert given == {"own": 1}


class Parameters(dict[str, Any]):
    """Not the mapping that a signature has, unless somebody puts it there."""

    def __init__(self, length: int, listed: int, **items: Any) -> None:
        super().__init__(items)
        self.length, self.listed = length, listed

    def __len__(self) -> int:
        return self.length

    def values(self) -> Any:
        return list(super().values())[: self.listed]


@pytest.mark.parametrize(("length", "listed"), [(2, 2), (2, 0), (0, 2), (70, 2)])
def test_parameters_that_somebody_has_replaced(active: Any, length: int, listed: int) -> None:
    signature = Signature()
    items = {"a": Parameter("a", 1), "b": Parameter("b", 1, default=2)}
    signature._parameters = Parameters(length, listed, **items)  # type: ignore[attr-defined]
    agree(active, signature, ("x",), {})


@pytest.mark.parametrize("kind", ["a", 1.0, 2**70, -1, 5])
def test_a_kind_that_is_none_of_inspects(active: Any, kind: Any) -> None:
    parameter = Parameter("a", 1)
    parameter._kind = kind  # type: ignore[attr-defined]
    agree(active, Signature([parameter], __validate_parameters__=False), ("x",), {})


def test_subclasses_of_inspects_types(active: Any) -> None:
    class Mine(Parameter):
        pass

    class Twice(Signature):
        def bind_partial(self, *args: Any, **kwargs: Any) -> Any:
            return super().bind_partial(*args, *args, **kwargs)

    agree(active, Signature([Mine("prompt", 1), Mine("n", 1, default=1)]), ("a",), {})
    agree(active, Twice([Parameter("prompt", 1), Parameter("n", 1)]), ("a",), {})
    signature = Twice([Parameter("a", 1), Parameter("b", 1)])
    assert active._build_key(signature, "tag", (1,), {}) == ("tag", (("a", 1), ("b", 1)))
