"""Calls without tensors get the keys that upstream's own builder makes, or bypass where it bypasses."""

from __future__ import annotations

import collections
import inspect
import itertools
import random
import sys
import types
from inspect import Parameter, Signature
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from . import strategies
from .support import SEED, fuzz, outcome, pristine, same, upstream

pytestmark = pytest.mark.usefixtures("active")

PRECOMPUTED = list(upstream._PRECOMPUTED_EMBED_ARGS)
NAMES = ["prompt", "prompt_ids", "attention_mask", "a", "B", "_", "é", "self", "args", "kwargs", "signature", "z9"]


def agree(active: Any, signature: Any, args: Any, kwargs: Any, tag: Any = "tag") -> None:
    expected = outcome(pristine()._build_key, signature, tag, args, kwargs)
    for _ in range(2):  # a signature's plan is made at its first call
        got = outcome(active._build_key, signature, tag, args, kwargs)
        assert same(got, expected), f"{signature} called with {args} {kwargs}: {got!r}, but upstream: {expected!r}"


defaults = (
    st.just(Parameter.empty) | st.none() | strategies.keyable | strategies.nested | st.just([]) | strategies.anything
)


@st.composite
def signatures(draw: st.DrawFn, most: int = 6) -> Signature:
    """Parameters of every kind, in the order that inspect wants, with defaults where it allows them."""
    names = draw(st.lists(st.sampled_from(NAMES + PRECOMPUTED), unique=True, max_size=most))
    possible = draw(st.sampled_from([[0, 1, 1, 1, 3], [1, 1, 3]]))
    kinds = sorted(draw(st.sampled_from(possible)) for _ in names)
    parameters, optional = [], False
    for name, kind in zip(names, kinds, strict=True):
        default = draw(st.none() if name in PRECOMPUTED and draw(st.booleans()) else defaults)
        if kind != Parameter.KEYWORD_ONLY:
            if optional and default is Parameter.empty:
                default = None
            optional = default is not Parameter.empty
        parameters.append(Parameter(name, Parameter(name, kind).kind, default=default))
    more, rest = draw(st.lists(st.sampled_from(["more", "rest", "prompt_embeds"]), min_size=2, max_size=2, unique=True))
    if more not in names and draw(st.integers(0, 3)) == 3:
        first_keyword = sum(kind < Parameter.VAR_POSITIONAL for kind in kinds)
        parameters.insert(first_keyword, Parameter(more, Parameter.VAR_POSITIONAL))
    if rest not in names and draw(st.integers(0, 3)) == 3:
        parameters.append(Parameter(rest, Parameter.VAR_KEYWORD))
    return Signature(parameters)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Signature, tuple[Any, ...], dict[str, Any]]:
    """Mostly calls that bind."""
    signature = draw(signatures())
    names = [p.name for p in signature.parameters.values() if p.kind in (0, 1)]
    values = st.one_of(*[strategies.keyable] * 6, strategies.nested, strategies.anything)
    takes_more = any(p.kind == 2 for p in signature.parameters.values())
    spare = draw(st.sampled_from([0, 1, 2] if takes_more else [0] * 6 + [1, 2]))
    args = tuple(draw(st.lists(values, max_size=len(names) + spare)))
    taken = names[: len(args)]
    free = [p.name for p in signature.parameters.values() if p.kind == 3 or (p.kind == 1 and p.name not in taken)]
    chosen = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    takes_any = any(p.kind == 4 for p in signature.parameters.values())
    for _ in range(draw(st.sampled_from([0, 1, 2] if takes_any else [0] * 6 + [1]))):
        chosen.append(draw(st.sampled_from([*list(signature.parameters) * 4, *NAMES, "rest", "unknown"])))
    nothing = {name for name in chosen if name in PRECOMPUTED and draw(st.booleans())}
    return signature, args, {name: draw(st.none() if name in nothing else values) for name in chosen}


@fuzz(2500)
@given(calls(), st.none() | st.text(max_size=3) | st.integers())
def test_any_call(active: Any, call: Any, tag: Any) -> None:
    signature, args, kwargs = call
    kind, key = outcome(pristine()._build_key, signature, tag, args, kwargs)
    hypothesis.event("bypasses" if kind == "returns" and key is None else kind)
    agree(active, signature, args, kwargs, tag)


def function(prompt, ids=(1, 2), /, mask=None, *, n=1, dtype=torch.float32, device=torch.device("cpu")):  # noqa: B008
    """Every kind of parameter."""


class Word(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (("a",), {}),
        (("a", [1], [2]), {"n": 2}),
        (("a", [1], [2], 3), {}),  # too many
        (("a",), {"unknown": 1}),
        (("a", [1], [2]), {"mask": 3}),  # doubled
        (("a",), {"ids": [1]}),  # positional only
        ((), {"prompt": "a"}),
        (("a",), {1: 2}),
        (("a",), {None: 2}),
        (("a",), {"": 2}),
        (("a",), {"mask": object()}),
        (["a", [1]], {"n": 2}),
        ("ab", {}),
        (range(2), {}),
        (iter(("a",)), {}),
        (None, {}),
        (3, {}),
        (("a",), None),
        (("a",), [("n", 2)]),
        (("a",), collections.OrderedDict(n=2)),
        (("a",), collections.defaultdict(int, n=2)),
        (("a",), types.MappingProxyType({"n": 2})),
        (collections.namedtuple("Args", "x")("a"), {}),
        (("a",), {"n": np.int64(3), "device": torch.device("cuda:1"), "dtype": torch.bfloat16}),
    ],
    ids=repr,
)
def test_calls_of_note(active: Any, args: Any, kwargs: Any) -> None:
    if isinstance(args, collections.abc.Iterator):
        args = list(args)
    agree(active, inspect.signature(function), args, kwargs)


def one(a, /, **rest): ...
def two(a, b=1, /, **rest): ...
def three(a, b=1, /, c=2, *more, **rest): ...
def no_rest(a, b=1, /, c=2): ...


@pytest.mark.parametrize("encode", [one, two, three, no_rest])
@pytest.mark.parametrize("names", [(), *itertools.combinations("abcx", 1), *itertools.combinations("abcx", 2)], ids=str)
def test_positional_only_parameters_by_name(active: Any, encode: Any, names: tuple[str, ...]) -> None:
    for count in range(4):
        agree(active, inspect.signature(encode), tuple(range(count)), dict.fromkeys(names, "given"))


@pytest.mark.parametrize("name", ["mask", "prompt", "unknown"])
def test_a_keyword_of_a_subclass_of_str(active: Any, name: str) -> None:
    def encode(prompt: Any, mask: Any = None) -> None: ...

    agree(active, inspect.signature(encode), (), {Word(name): 1})


def test_wrong_numbers_of_arguments_and_wrong_signatures(active: Any) -> None:
    signature = inspect.signature(function)
    for args in ((), (signature,), (signature, "tag", ("a",)), (signature, "tag", ("a",), {}, 1)):
        assert outcome(active._build_key, *args) == outcome(pristine()._build_key, *args) == ("raises", TypeError)
    for wrong in (None, "text", function, object()):
        agree(active, wrong, ("a",), {})


def test_by_keyword(active: Any) -> None:
    call = {"signature": inspect.signature(function), "model_tag": "tag", "args": ("a",), "kwargs": {}}
    assert same(active._build_key(**call), pristine()._build_key(**call))


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 70])
def test_many_parameters(active: Any, count: int) -> None:
    rng = random.Random(SEED + count)
    names = [f"p{i}" for i in range(count)]
    rng.shuffle(names)
    signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=(name,)) for name in names])
    agree(active, signature, (), {})
    agree(active, signature, tuple(range(count)), {})
    agree(active, signature, tuple(range(count // 2)), {name: [name, None] for name in names[count // 2 :]})
    agree(active, signature, tuple(range(count + 1)), {})


def test_a_default_that_is_changed_between_calls(active: Any) -> None:
    default: list[Any] = [1]
    options = {"a": default}
    image = np.zeros(())

    def encode(prompt: Any, ids: Any = default, options: Any = options, image: Any = image) -> None: ...

    signature = inspect.signature(encode)
    agree(active, signature, ("a",), {})
    before = active._build_key(signature, "tag", ("a",), {})
    default.append(2)
    image[()] = 7.0
    agree(active, signature, ("a",), {})
    assert active._build_key(signature, "tag", ("a",), {}) != before
    options["b"] = object()
    assert active._build_key(signature, "tag", ("a",), {}) is None


CONSTANTS = (None, True, 1, 2.5, "text", b"bytes", torch.float32, torch.device("cpu"), (), (1, ("a", (torch.int8,))))
# A list or a dict may be filled with something that leads to the pipeline; a tuple may be long.
OTHERS = ([], {}, ([1],), {"a": [1]}, Word("a"), object(), function, 1j, set(), (Word("a"),), (1,) * 100)


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


@pytest.mark.parametrize("name", PRECOMPUTED)
@pytest.mark.parametrize("value", [0, False, "", (), "x"])
def test_precomputed_embeddings_bypass(active: Any, name: str, value: Any) -> None:
    for default in (None, value):
        signature = Signature([Parameter("prompt", 1), Parameter(name, 3, default=default)])
        for kwargs in ({}, {name: None}, {name: value}):
            agree(active, signature, ("a",), kwargs)
            expected = kwargs.get(name, default) is not None
            assert (active._build_key(signature, "tag", ("a",), kwargs) is None) == expected


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
        names = rng.sample(NAMES, 3)
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
