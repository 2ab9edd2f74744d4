"""Arguments whose own code runs in the middle of a key: no crash, the right key or none, never an unfinished one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_tensor_key import activate, deactivate, tensor_key

from .fresh_process import FreshProcesses
from .support import counts, installed, outcome, tensor_keys_in

pytestmark = pytest.mark.usefixtures("active")


def encode(a: Any = None, m: Any = None, z: Any = None, **options: Any) -> None:
    """Keyed in the order a, m, z: an argument m runs between two tensors."""


def plain(a: Any = None, m: Any = None, z: Any = None) -> None: ...


# With a plan of its own, and through upstream's builder, which alone binds **options.
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


def finished(key: Any) -> bool:
    """Whether every tensor key in a key has its content; asking an unfinished one raises."""
    return all(len(found.hexdigest) == 32 and hash(found) is not None for found in tensor_keys_in(key))


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("runs", RUNNERS)
def test_another_encode_prompt(active: Any, signature: inspect.Signature, runs: Any) -> None:
    pipeline, cache = installed()
    inner = ids(7, 8, 9)
    outer = (ids(1, 2), runs(lambda: pipeline.encode_prompt(inner, inner.bool())), ids(3))
    key = active._build_key(signature, "tag", outer, {})
    assert counts(cache) == (0, 1, 0)
    assert tensor_keys_in(key) == [tensor_key(ids(1, 2)), tensor_key(ids(3))]
    pipeline.encode_prompt(inner, inner.bool())
    assert counts(cache) == (1, 1, 0)


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("runs", RUNNERS)
def test_hashable_in_the_middle(active: Any, signature: inspect.Signature, runs: Any) -> None:
    made: list[Any] = []
    call = (ids(1), runs(lambda: made.append(active._hashable([ids(5)]))), ids(3))
    key = active._build_key(signature, "tag", call, {})
    assert tensor_keys_in(key) == [tensor_key(ids(1)), tensor_key(ids(3))]
    assert finished(tuple(made))
    assert tensor_keys_in(tuple(made)) == [tensor_key(ids(5))]


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
    assert key is None or finished(key)
    items[:] = [ids(1), runs(lambda: items.extend([ids(9)] * 1000)), ids(3)]
    kwargs.update(a=items, m=None, z=[ids(4)])
    key = active._build_key(signature, "tag", (), kwargs)
    assert key is None or finished(key)


@pytest.mark.parametrize("runs", RUNNERS)
def test_a_call_that_is_refused_after_all_leaves_no_usable_key(active: Any, runs: Any) -> None:
    made: list[Any] = []
    call = (ids(1), runs(lambda: made.append(active._hashable(ids(5)))), object())
    assert active._build_key(inspect.signature(plain), "tag", call, {}) is None
    for key in made:  # finished, or of no use: its comparison raises
        kind, value = outcome(lambda key=key: key == tensor_key(ids(5)))
        assert (kind, value) in [("returns", True), ("raises", RuntimeError)]


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("runs", RUNNERS)
def test_an_exception_in_the_middle(active: Any, signature: inspect.Signature, runs: Any) -> None:
    def fail() -> None:
        raise LookupError("mine")

    pipeline, cache = installed()
    with pytest.raises(LookupError, match="mine"):
        active._build_key(signature, "tag", (ids(1), runs(fail), ids(3)), {})
    with pytest.raises(LookupError, match="mine"):
        pipeline.encode_prompt(ids(1), runs(fail))
    assert counts(cache) == (0, 0, 0)
    assert active._hashable(ids(5)) == tensor_key(ids(5))
    assert finished(active._build_key(signature, "tag", (ids(1), 2, ids(3)), {}))


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("runs", RUNNERS)
def test_the_extension_is_switched_in_the_middle(active: Any, signature: inspect.Signature, runs: Any) -> None:
    def switch() -> None:
        deactivate()
        activate()

    for action in (deactivate, switch):
        key = active._build_key(signature, "tag", (ids(1), runs(action), ids(3)), {})
        activate()
        expected = [tensor_key(ids(1)), tensor_key(ids(3))]
        keys = [] if key is None else tensor_keys_in(key)
        assert [(key.digest, key.shape) for key in keys] in ([], [(key.digest, key.shape) for key in expected])
        assert not [key for key in keys if key in expected]  # made by a builder that is closed


# Code that runs inside torch's own calls, and so in the middle of the reading of a tensor. In a process of its own:
# what goes wrong here reads memory that has been freed.
DURING_TORCH = """
import inspect
import torch
from torch.overrides import TorchFunctionMode
from omni_tensor_key import activate, tensor_key
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

activate()
first, second, third = torch.arange(100_000), torch.arange(64)[::2], torch.arange(3)
expected = [tensor_key(tensor) for tensor in (first, second, third)]
made, taken = [], []

class Runs(TorchFunctionMode):
    inside = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not self.inside:
            self.inside = True
            ACTION
            taken.extend(torch.full((100_000,), -1) for _ in range(4))  # memory that was freed now holds this
            self.inside = False
        return func(*args, **(kwargs or {}))

signature = inspect.signature(lambda a, b, c: None)
with Runs():
    key = upstream._build_key(signature, "tag", (first, second, third), {})
"""


@pytest.mark.parametrize("action", ["first.set_()", "first.untyped_storage().resize_(8)", "second.set_()"])
def test_a_tensor_loses_its_storage_inside_torch(fresh: FreshProcesses, action: str) -> None:
    check = """
if key is not None:
    for (_, found), tensor, before in zip(key[1], (first, second, third), expected):
        assert found in (before, tensor_key(tensor)), (found, before)
"""
    fresh.check(DURING_TORCH.replace("ACTION", action) + check)


def test_hashable_inside_torch(fresh: FreshProcesses) -> None:
    action = "made.extend(upstream._hashable(torch.arange(n)) for n in range(1, 200))"
    check = """
for found in made:
    try:
        found.digest
    except RuntimeError:
        continue  # unfinished, and of no use to anybody
    assert found == tensor_key(torch.arange(found.shape[0])), found
assert key is None or [found for _, found in key[1]] == expected
"""
    fresh.check(DURING_TORCH.replace("ACTION", action) + check)


@pytest.mark.parametrize(
    "what", ["gc.get_objects()", "[list(each) for each in gc.get_objects() if type(each) is tuple]"]
)
def test_somebody_looks_at_all_objects(fresh: FreshProcesses, what: str) -> None:
    """No unfinished tuple is there to be found, and none is held on to."""
    fresh.check(
        f"""
import gc
import torch
import omni_tensor_key
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

omni_tensor_key.activate()
held = []
class Key:
    def __repr__(self):
        held.append({what})
        return "key"
key = upstream._hashable([torch.tensor([1]), {{Key(): 1}}, "x"])
assert key == ("__seq__", (omni_tensor_key.tensor_key(torch.tensor([1])), ("__dict__", (("key", 1),)), "x")), key
assert held
"""
    )
