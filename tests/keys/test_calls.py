"""The keys of calls with tensors, against upstream's own functions with the oracle's keys; why calls bypass."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from reference import Reference, TensorKey

from omni_tensor_key import tensor_key

from . import strategies
from .support import STATE, Active, fuzz, load_upstream, outcome, pristine, same, tensor_keys_in
from .test_build_key import signatures

IDS, MASK = torch.arange(6).reshape(1, 6), torch.ones(1, 6, dtype=torch.bool)


def encode(a: Any = None, m: Any = None, prompt_embeds: Any = None, z: Any = None) -> None: ...
def with_rest(a: Any = None, m: Any = None, prompt_embeds: Any = None, z: Any = None, **rest: Any) -> None: ...
def exotic(a: Any = None, m: Any = None, prompt_embeds: Any = None, z: Any = [], /) -> None: ...  # noqa: B006


# Ordinary signatures have a plan; the last is bound by upstream's own function.
ORDINARY = [inspect.signature(encode), inspect.signature(with_rest)]
SIGNATURES = [*ORDINARY, inspect.signature(exotic)]


class Ids(torch.Tensor):
    pass


def freed() -> torch.Tensor:
    tensor = torch.ones(8, dtype=torch.int64)
    tensor.untyped_storage().resize_(0)
    return tensor


def array_of(item: Any) -> Any:
    """An object array of one item, which upstream unpacks."""
    array = np.empty((), dtype=object)
    array[()] = item
    return array


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "float": (lambda: torch.ones(2), "dtype"),
    "int4": (lambda: torch.empty(2, dtype=torch.int4), "dtype"),
    "meta": (lambda: IDS.to("meta"), "unexportable"),
    "sparse": (lambda: IDS.to_sparse(), "unexportable"),
    "too large": (lambda: torch.zeros((1 << 20) + 1, dtype=torch.uint8), "size"),
    "no storage": (freed, "storage"),
    "subclass": (lambda: IDS.as_subclass(Ids), "subclass"),
    "PIL image": (lambda: Image.new("RGB", (2, 2)), "type"),
    "numpy array": (lambda: np.arange(2), "type"),
    "object array of a tensor": (lambda: array_of(MASK), "type"),
    "object array of a list of tensors": (lambda: array_of([MASK]), "type"),
    "object array of a float tensor": (lambda: array_of(torch.ones(2)), "type"),
    "set": (lambda: {1}, "type"),
    "object": (object, "type"),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "alone": lambda value: value,
    "in a list": lambda value: [MASK, value],
    "deep": lambda value: [{"a": (MASK, [value])}],
}


def matches(got: Any, expected: Any) -> bool:
    """Whether a key is the oracle's, with the native TensorKey in the place of the reference's."""
    if type(expected) is TensorKey:
        return type(got).__name__ == "TensorKey" and repr(got) == repr(expected) and hash(got) == hash(expected)
    if type(got) is tuple and type(expected) is tuple:
        return len(got) == len(expected) and all(map(matches, got, expected))
    return same(got, expected)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from([torch.int64, torch.int64, torch.bool, torch.int32, torch.uint8, torch.float32]))
    shape = draw(st.sampled_from([(), (0,), (3,), (1, 5), (2, 3)]))
    tensor = torch.tensor(draw(st.integers(0, 3))).expand(shape).to(dtype)
    return draw(st.sampled_from([tensor, tensor.clone(), torch.nn.Parameter(tensor.clone(), requires_grad=False)]))


values = st.recursive(
    st.one_of(*[tensors()] * 3, strategies.keyable),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3) | inner.map(array_of),
    max_leaves=5,
)  # fmt: skip


@fuzz(1000)
@given(st.data(), st.booleans())
def test_any_call_with_tensors(data: st.DataObject, tensors_only: bool) -> None:
    signature = data.draw(signatures(most=4))
    names = [p.name for p in signature.parameters.values() if p.kind in (1, 3)]
    args = tuple(data.draw(st.lists(values, max_size=3)))
    kwargs = {name: data.draw(values) for name in names[len(args) :] if data.draw(st.booleans())}
    active, reference = Active(tensors_only), Reference(load_upstream("reference_prompt_embed_cache"))
    expected = outcome(reference.build_key, signature, "tag", args, kwargs, STATE)
    got = outcome(active._build_key, signature, "tag", args, kwargs)
    hypothesis.event("keyed" if expected[1] is not None else "bypasses")
    assert got[0] == expected[0]
    assert matches(got[1], expected[1]), f"{got!r}, but the oracle: {expected!r}"
    assert (len(active.bypasses) == 1) is (got == ("returns", None))


@pytest.mark.parametrize("signature", SIGNATURES)
def test_the_state_is_the_last_item_and_is_asked_for_once(active: Active, signature: inspect.Signature) -> None:
    key = active._build_key(signature, "tag", (IDS, [MASK, {"x": IDS}], None, (IDS,)), {})
    items = tuple((name, value) for name, value in key[1] if name != "rest")
    assert (key[0], key[2], active.states) == ("tag", STATE, 1)
    assert items == (
        ("a", tensor_key(IDS)),
        ("m", ("__seq__", (tensor_key(MASK), ("__dict__", (("'x'", tensor_key(IDS)),))))),
        ("prompt_embeds", None),
        ("z", ("__seq__", (tensor_key(IDS),))),
    )
    assert active._build_key(signature, "tag", ("text", [1]), {}) == pristine()._build_key(
        signature, "tag", ("text", [1]), {}
    )
    assert (active.states, active.bypasses) == (1, [])
    active.state = ("another",)
    assert active._build_key(signature, "tag", (IDS,), {}) != key


@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_state_that_is_a_text_is_the_reason_to_bypass(active: Active, signature: inspect.Signature) -> None:
    active.state = "tracing"
    assert active._build_key(signature, "tag", (1, [IDS], None, torch.ones(2)), {}) is None
    assert active.bypasses == [("tag", "m" if signature in ORDINARY else "", "tracing")]
    assert active._build_key(signature, "tag", ("text",), {}) is not None
    assert active._hashable(IDS) is active._NOT_HASHABLE


@pytest.mark.parametrize("tensors_only", [False, True])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_bypasses_with_its_reason(name: str, place: Callable[[Any], Any], tensors_only: bool) -> None:
    make, reason = REFUSED[name]
    active = Active(tensors_only)
    for signature in SIGNATURES:
        assert active._build_key(signature, "tag", (IDS, place(make()), None, IDS), {}) is None
        argument = "m" if signature in ORDINARY and not tensors_only else ""
        assert active.bypasses.pop() == ("tag", argument, reason)
    assert active.bypasses == []
    assert active._hashable(place(make())) is active._NOT_HASHABLE


def test_the_first_refusal_in_name_order_is_the_reason(active: Active) -> None:
    floats, large = torch.ones(2), torch.zeros(1 << 21, dtype=torch.uint8)
    for args, told in (
        ((floats, large), ("a", "dtype")),
        ((large, None, None, floats), ("a", "size")),
        ((IDS, [IDS, large], None, floats), ("m", "size")),
        # What has no key whatever its content is found before any tensor is looked at.
        ((floats, object()), ("m", "type")),
        ((floats, 1, None, IDS.as_subclass(Ids)), ("z", "subclass")),
        ((object(), floats, None, IDS.as_subclass(Ids)), ("a", "type")),
    ):
        assert active._build_key(ORDINARY[0], "tag", args, {}) is None
        assert active.bypasses.pop()[1:] == told


def test_precomputed_embeddings_and_what_does_not_bind_bypass_first(active: Active) -> None:
    class Raises(dict):  # type: ignore[type-arg]
        def keys(self) -> Any:
            raise ValueError("walked")

    for signature in ORDINARY:
        for value in (torch.ones(2), IDS, torch.empty(0), 0, "x"):
            assert active._build_key(signature, "tag", (IDS, Raises(), value), {}) is None
            assert active.bypasses.pop() == ("tag", "prompt_embeds", "precomputed")
        assert active._build_key(signature, "tag", (IDS,) * 5, {}) is None
        assert active.bypasses.pop() == ("tag", "", "binding")
    assert active.states == 0
    assert active._build_key(SIGNATURES[2], "tag", (IDS, 1, 0), {}) is None
    assert active.bypasses == [("tag", "", "upstream")]


def test_nothing_after_an_argument_that_upstream_refuses_is_walked(active: Active) -> None:
    class Raises:
        def __repr__(self) -> str:
            raise ValueError("walked")

    assert active._build_key(ORDINARY[0], "tag", (object(), {Raises(): 1}), {}) is None
    with pytest.raises(ValueError, match="walked"):
        active._build_key(ORDINARY[0], "tag", (IDS, {Raises(): 1}), {})


# The IDs lie in a page of memory that cannot be read: whoever reads it ends the process.
UNREADABLE = """
import ctypes, mmap, sys
sys.path.insert(0, sys.argv[1])
import torch
from keys.support import Active
from keys.test_calls import ORDINARY, REFUSED

memory = mmap.mmap(-1, mmap.PAGESIZE)
ids = torch.frombuffer(memory, dtype=torch.int64)
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(ids.data_ptr()), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
active = Active()
for make, _ in REFUSED.values():
    assert active._build_key(ORDINARY[0], "tag", (ids, [ids[::2]], None, make()), {}) is None
    assert active._hashable([ids, make()]) is active._NOT_HASHABLE
active.state = "tracing"
assert active._build_key(ORDINARY[0], "tag", (ids,), {}) is None
print("nothing was read", flush=True)
active.state = ()
active._build_key(ORDINARY[0], "tag", (ids,), {})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="page protection is set with Linux's mprotect")
def test_no_byte_is_read_of_a_call_that_bypasses(run_python: Callable[..., Any], root: Path) -> None:
    result = run_python(UNREADABLE, str(root / "tests"))
    assert "nothing was read" in result.stdout, result.stderr[-2000:]
    assert result.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3], [True], [[1, 2]], 1, True])
def test_no_tensor_key_equals_a_list_key(active: Active, values: Any) -> None:
    key = active._hashable(torch.tensor(values))
    for other in (values, [values], repr(key), key.digest, key.hexdigest, None):
        assert key != pristine()._hashable(other)
    assert active._hashable([torch.tensor(values)]) != active._hashable(values)


def test_where_lists_of_tensors_are_cut_counts(active: Active) -> None:
    pairs = [(range(2), range(2, 5)), (range(3), range(3, 5)), (range(0), range(5)), (range(5), range(0))]
    keys = {active._hashable([torch.tensor(list(part), dtype=torch.int64) for part in pair]) for pair in pairs}
    assert len(keys) == len(pairs)
    assert active._hashable((IDS, MASK)) == active._hashable([IDS.clone(), MASK.clone()])


def test_one_tensor_in_many_places(active: Active) -> None:
    key = active._build_key(ORDINARY[0], "tag", (IDS, [IDS] * 1000, None, {str(n): IDS for n in range(100)}), {})
    assert tensor_keys_in(key) == [tensor_key(IDS)] * 1101


def test_positional_and_keyword_arguments_meet(active: Active) -> None:
    key = active._build_key(ORDINARY[0], "tag", (IDS, MASK), {})
    assert key == active._build_key(ORDINARY[0], "tag", (), {"m": MASK.clone(), "z": None, "a": IDS.clone()})
    assert key != active._build_key(ORDINARY[0], "tag", (MASK, IDS), {})
    assert key != active._build_key(ORDINARY[0], "another", (IDS, MASK), {})


def test_where_upstream_keys_tensors_itself_ours_take_their_place() -> None:
    """As a release with the proposal to key tensors would."""
    module = load_upstream("keys_tensors_prompt_embed_cache")
    own = module._hashable

    def hashable(obj: Any) -> Any:
        return ("__torch_tensor__", str(obj.dtype)) if isinstance(obj, torch.Tensor) else own(obj)

    module._hashable = hashable
    assert module._build_key(ORDINARY[0], "tag", (torch.ones(2),), {}) is not None
    active = Active(tensors_only=True, module=module)
    for refused in (torch.ones(2), IDS.as_subclass(Ids), torch.zeros(1 << 21, dtype=torch.uint8)):
        assert active._build_key(ORDINARY[0], "tag", (IDS, [refused]), {}) is None
    key = active._build_key(ORDINARY[0], "tag", (IDS, [MASK]), {})
    assert tensor_keys_in(key) == [tensor_key(IDS), tensor_key(MASK)]
    assert key[2] == STATE
