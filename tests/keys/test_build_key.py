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
from .support import SEED, agree, fuzz, outcome, pristine, same, upstream

PRECOMPUTED = list(upstream._PRECOMPUTED_EMBED_ARGS)
NAMES = ["prompt", "prompt_ids", "attention_mask", "a", "B", "_", "é", "self", "args", "kwargs", "signature", "z9"]


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

    agree(active, inspect.signature(encode), (), {strategies.Text(name): 1})


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
    for _ in range(3):
        rng.shuffle(made)
        for signature in made:
            agree(active, signature, (), {"q": [3]})


def test_a_new_signature_at_the_address_of_a_freed_one(active: Any) -> None:
    rng = random.Random(SEED)
    seen: set[int] = set()
    reused = 0
    for i in range(1000):
        names = rng.sample("abcdefghij", 3)
        signature = Signature([Parameter(name, 1, default=i) for name in names])
        reused += id(signature) in seen
        seen.add(id(signature))
        agree(active, signature, (1,), {names[2]: 2})
        del signature
    assert reused, "no address came back, so this shows nothing"


def test_parameters_in_an_order_that_inspect_does_not_check(active: Any) -> None:
    given: dict[str, Any] = {"own": 1}
    for kinds in itertools.product(range(5), repeat=3):
        named = [Parameter(f"p{i}{kind}", Parameter("p", kind).kind) for i, kind in enumerate(kinds)]
        signature = Signature(named, __validate_parameters__=False)
        for args, kwargs in (((), {}), ((given, 2), {}), ((given,), {"x": 5}), ((), {"p01": 1, "p13": 3, "x": 5})):
            agree(active, signature, args, kwargs)
        assert given == {"own": 1}


def test_subclasses_of_inspects_types(active: Any) -> None:
    class Mine(Parameter):
        pass

    class Twice(Signature):
        def bind_partial(self, *args: Any, **kwargs: Any) -> Any:
            return super().bind_partial(*args, *args, **kwargs)

    agree(active, Signature([Mine("prompt", 1), Mine("n", 1, default=1)]), ("a",), {})
    signature = Twice([Parameter("a", 1), Parameter("b", 1)])
    assert active._build_key(signature, "tag", (1,), {}) == ("tag", (("a", 1), ("b", 1)))


@pytest.mark.parametrize("default", [[], {}, {"a": [1]}, strategies.Text("a"), object(), ((1,),)])
def test_nothing_is_kept_of_a_signature_whose_default_may_lead_to_a_pipeline(active: Any, default: Any) -> None:
    signature = Signature([Parameter("prompt", 1), Parameter("option", 1, default=default)])
    before = sys.getrefcount(signature), sys.getrefcount(default)
    agree(active, signature, ("a",), {"option": [1]})
    assert (sys.getrefcount(signature), sys.getrefcount(default)) == before
