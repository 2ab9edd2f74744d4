"""Arguments whose own code runs in the middle of a key: no crash, the right key or none, never an unfinished one."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_tensor_key import tensor_key

from .support import tensor_keys_in


def encode(a: Any = None, m: Any = None, z: Any = None, options: Any = []) -> None:  # noqa: B006
    """Keyed in the order a, m, z: an argument m runs between two tensors."""


def plain(a: Any = None, m: Any = None, z: Any = None) -> None: ...


# With a plan of its own, and through upstream's builder, which alone binds where a default is no constant.
SIGNATURES = [pytest.param(inspect.signature(plain), id="plan"), pytest.param(inspect.signature(encode), id="upstream")]


def as_dict(action: Callable[[], Any]) -> Any:
    class Runs(dict):  # type: ignore[type-arg]
        def keys(self) -> Any:
            action()
            return []

    return Runs()


def as_list(action: Callable[[], Any]) -> Any:
    class Runs(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            action()
            return iter(())

    return Runs()


def as_scalar(action: Callable[[], Any]) -> Any:
    class Runs:
        def item(self) -> int:
            action()
            return 1

    Runs.__module__ = "numpy.imitation"
    return Runs()


def as_key(action: Callable[[], Any]) -> Any:
    todo = [action]  # upstream asks for the repr twice

    class Key:
        def __repr__(self) -> str:
            if todo:
                todo.pop()()
            return "key"

    return {Key(): 1}


RUNNERS = [as_dict, as_list, as_scalar, as_key]


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("runs", RUNNERS)
def test_another_encode_prompt(active: Any, signature: inspect.Signature, runs: Any) -> None:
    made: list[Any] = []
    inner = ids(7, 8, 9)
    nested = runs(lambda: made.append(active._build_key(signature, "inner", (inner, [inner.bool()]), {})))
    key = active._build_key(signature, "tag", (ids(1, 2), nested, ids(3)), {})
    assert tensor_keys_in(key) == [tensor_key(ids(1, 2)), tensor_key(ids(3))]
    assert tensor_keys_in(made[0]) == [tensor_key(inner), tensor_key(inner.bool())]
    assert active.states == 2


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("runs", RUNNERS)
def test_hashable_in_the_middle(active: Any, signature: inspect.Signature, runs: Any) -> None:
    made: list[Any] = []
    call = (ids(1), runs(lambda: made.append(active._hashable([ids(5)]))), ids(3))
    key = active._build_key(signature, "tag", call, {})
    assert tensor_keys_in(key) == [tensor_key(ids(1)), tensor_key(ids(3))]
    assert len(made) == 1
    assert active._hashable(ids(5)) == tensor_key(ids(5))


def test_hashable_while_the_state_is_asked_for(active: Any) -> None:
    made: list[Any] = []
    active.state = lambda: made.append(active._hashable("text")) or ("state",)
    key = active._build_key(inspect.signature(plain), "tag", (ids(1), 2, [ids(3)]), {})
    assert tensor_keys_in(key) == [tensor_key(ids(1)), tensor_key(ids(3))]
    assert made == ["text"]


@pytest.mark.parametrize("change", ["edit", "free"])
def test_the_state_is_asked_for_before_a_tensor_is_described(active: Any, change: str) -> None:
    first, second = torch.arange(1000), torch.arange(64)[::2]

    def edit() -> tuple[str]:
        first.fill_(7) if change == "edit" else first.untyped_storage().resize_(0)
        second.fill_(8)
        return ("state",)

    active.state = edit
    key = active._build_key(inspect.signature(plain), "tag", (first, None, [second]), {})
    if change == "edit":
        assert tensor_keys_in(key) == [tensor_key(torch.full((1000,), 7)), tensor_key(torch.full((32,), 8))]
    else:
        assert key is None
        assert active.bypasses == [("tag", "a", "storage")]


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("runs", RUNNERS)
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_the_content_of_a_tensor(active: Any, signature: inspect.Signature, runs: Any, nested: bool) -> None:
    first, last = ids(1, 2), ids(3, 4)

    def edit() -> None:
        first.fill_(8)
        last.fill_(9)

    call = ([first, (first,)], runs(edit), [last]) if nested else (first, runs(edit), last)
    key = active._build_key(signature, "tag", call, {})
    found = tensor_keys_in(key)
    assert set(found[:-1]) in ({tensor_key(ids(1, 2))}, {tensor_key(ids(8, 8))})
    assert found[-1] == tensor_key(ids(9, 9))


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "grown": lambda t: t.resize_(100_000),
    "shrunk": lambda t: t.resize_(1),
    "no storage": lambda t: t.untyped_storage().resize_(0),
    "more storage": lambda t: t.untyped_storage().resize_(1 << 24),
    "other storage": lambda t: t.set_(torch.arange(5)),
    "other data": lambda t: setattr(t, "data", torch.full((64,), 5)),
    "other strides": lambda t: t.as_strided_((32,), (2,)),
    "other shape": lambda t: t.unsqueeze_(0),
    "other dtype": lambda t: setattr(t, "data", torch.full((64,), 5, dtype=torch.int32)),
}


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("runs", RUNNERS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tensor_changes_its_storage(
    active: Any, signature: inspect.Signature, runs: Any, change: Callable[[torch.Tensor], Any]
) -> None:
    for position in (0, 2):
        tensor = torch.arange(64)
        call: list[Any] = [ids(1), None, ids(3)]
        call[position] = tensor
        call[1] = runs(lambda tensor=tensor: change(tensor))
        key = active._build_key(signature, "tag", tuple(call), {})
        if key is not None:
            found = tensor_keys_in(key)
            assert len(found) == 2
            assert found[position // 2] in (tensor_key(torch.arange(64)), tensor_key(tensor))


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("runs", RUNNERS)
def test_the_containers_of_the_call(active: Any, signature: inspect.Signature, runs: Any) -> None:
    items: list[Any] = [ids(1), None, ids(3)]
    kwargs: dict[str, Any] = {"a": items, "m": None, "z": [ids(4)]}

    def empty() -> None:
        items.clear()
        kwargs.clear()

    items[1] = runs(empty)
    key = active._build_key(signature, "tag", (), kwargs)
    assert key is None or all(len(found.hexdigest) == 32 for found in tensor_keys_in(key))
    items[:] = [ids(1), runs(lambda: items.extend([ids(9)] * 1000)), ids(3)]
    kwargs.update(a=items, m=None, z=[ids(4)])
    key = active._build_key(signature, "tag", (), kwargs)
    assert key is None or all(len(found.hexdigest) == 32 for found in tensor_keys_in(key))


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("runs", RUNNERS)
def test_an_exception_in_the_middle(active: Any, signature: inspect.Signature, runs: Any) -> None:
    def fail() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        active._build_key(signature, "tag", (ids(1), runs(fail), ids(3)), {})
    assert active._hashable(ids(5)) == tensor_key(ids(5))
    key = active._build_key(signature, "tag", (ids(1), 2, ids(3)), {})
    assert tensor_keys_in(key) == [tensor_key(ids(1)), tensor_key(ids(3))]


@pytest.mark.parametrize("where", ["call_state", "on_bypass"])
def test_an_exception_of_what_was_handed_in(active: Any, where: str) -> None:
    def fail(*told: Any) -> None:
        raise LookupError("mine")

    argument: Any = ids(1)
    if where == "call_state":
        active.state = fail
    else:
        active.bypasses = type("Fails", (), {"append": fail})
        argument = object()
    with pytest.raises(LookupError, match="mine"):
        active._build_key(inspect.signature(plain), "tag", (argument,), {})


def test_no_unfinished_tuple_can_be_found(active: Any) -> None:
    held: list[Any] = []

    class Key:
        def __repr__(self) -> str:
            held.append([list(each) for each in gc.get_objects() if type(each) is tuple])
            return "key"

    key = active._hashable([ids(1), {Key(): 1}, "x"])
    assert key == ("__seq__", (tensor_key(ids(1)), ("__dict__", (("key", 1),)), "x"))
    assert held
