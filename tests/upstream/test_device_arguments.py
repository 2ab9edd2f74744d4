"""Tensors on a device: copied to the host once per call, after everything that could make the call bypass."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from omni_tensor_key import tensor_key

from .support import Pipeline, counts, identical, installed, tensor_keys_in
from .test_bypass import REFUSED

pytestmark = pytest.mark.usefixtures("active")


@pytest.fixture(scope="module")
def device() -> Any:
    """torch's module for a device that exists for tests only; what its memory holds is not what its tensors hold."""
    path = Path(__file__).resolve().parents[1] / "device_backend" / "__init__.py"
    spec = importlib.util.spec_from_file_location("device_backend", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load()


@pytest.fixture(autouse=True)
def _from_zero(device: Any) -> None:
    device.reset_counters()


def on_device(values: Any, index: int = 0, **options: Any) -> torch.Tensor:
    return torch.tensor(values, **options).to(f"otkdev:{index}")


def test_the_samples_of_a_prompt_hit(device: Any) -> None:
    pipeline, cache = installed()
    expected = Pipeline().encode_prompt([[1, 2, 3]], [[1, 1, 0]])
    for _ in range(16):
        output = pipeline.encode_prompt(on_device([[1, 2, 3]]), on_device([[1, 1, 0]]))
        assert identical(tuple(t.detach() for t in output), tuple(t.detach() for t in expected))
    assert counts(cache) == (15, 1, 0)
    assert pipeline.runs == 1


def test_content_dtype_shape_and_device_tell_calls_apart(device: Any) -> None:
    calls = [
        on_device([1, 2, 3]),
        on_device([1, 2, 4]),
        on_device([[1, 2, 3]]),
        on_device([1, 2, 3], dtype=torch.int32),
        on_device([1, 2, 3], index=1),
        torch.tensor([1, 2, 3]),
        [1, 2, 3],
        on_device([]),
        on_device([], index=1),
        torch.tensor([]),
    ]
    pipeline, cache = installed()
    for expected in ((0, len(calls), 0), (len(calls), len(calls), 0)):
        for prompt in calls:
            pipeline.encode_prompt(prompt.clone() if isinstance(prompt, torch.Tensor) else prompt)
        assert counts(cache) == expected


def test_views_and_edits(device: Any) -> None:
    pipeline, cache = installed()
    wide = on_device([[1, 2, 3, 4], [5, 6, 7, 8]])
    pipeline.encode_prompt(wide[:, 1:3])
    pipeline.encode_prompt(on_device([[2, 3], [6, 7]]))
    assert counts(cache) == (1, 1, 0)
    wide[0, 1] = 9
    pipeline.encode_prompt(wide[:, 1:3])
    pipeline.encode_prompt(wide[:, ::3])
    assert counts(cache) == (1, 3, 0)


def bytes_read(device: Any, make_key: Callable[[], Any]) -> tuple[int, int]:
    device.reset_counters()
    make_key()
    return device.copies_to_host(), device.bytes_to_host()


def encode(a: Any = None, m: Any = None, prompt_embeds: Any = None, z: Any = None) -> None:
    """Keyed in the order a, m, prompt_embeds, z."""


def variadic(a: Any = None, m: Any = None, prompt_embeds: Any = None, z: Any = None, **options: Any) -> None:
    """The same, bound by upstream's own builder."""


@pytest.mark.parametrize("function", [encode, variadic])
def test_the_tensors_of_a_call_are_read_in_one_copy(active: Any, device: Any, function: Any) -> None:
    signature = inspect.signature(function)
    ids, mask = on_device([[1, 2, 3]]), on_device([[True, True, False]])
    keys: list[Any] = []
    read = bytes_read(device, lambda: keys.append(active._build_key(signature, "tag", (ids, [mask, {"k": ids}]), {})))
    assert read == (1, 24 + 3 + 24)
    assert tensor_keys_in(keys[0]) == [tensor_key(ids), tensor_key(mask), tensor_key(ids)]
    nothing = (on_device([]), torch.ones(3).bool())
    assert bytes_read(device, lambda: active._build_key(signature, "tag", nothing, {})) == (0, 0)


@pytest.mark.parametrize("function", [encode, variadic])
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_nothing_is_copied_where_anything_else_bypasses(active: Any, device: Any, function: Any, make: Any) -> None:
    signature = inspect.signature(function)
    ids = on_device([[1, 2, 3]])
    calls: list[dict[str, Any]] = [{"a": ids, "z": make()}, {"a": [ids, make()]}, {"a": make(), "z": ids}]
    calls += [{"a": {"x": ids, "y": [make()]}}, {"a": ids, "m": [ids, torch.arange(3)], "z": (ids, [make()])}]
    for kwargs in calls:
        device.reset_counters()
        assert active._build_key(signature, "tag", (), kwargs) is None
        assert device.copies_to_host() == 0


@pytest.mark.parametrize("function", [encode, variadic])
def test_nothing_is_copied_with_precomputed_embeddings_or_unbound_arguments(
    active: Any, device: Any, function: Any
) -> None:
    signature = inspect.signature(function)
    ids = on_device([[1, 2, 3]])
    for args, kwargs in (((), {"a": ids, "prompt_embeds": ids}), ((ids,) * 5, {}), ((ids,), {"a": ids})):
        device.reset_counters()
        assert active._build_key(signature, "tag", args, kwargs) is None
        assert device.copies_to_host() == 0


def test_nothing_is_copied_while_the_cache_is_disabled(device: Any) -> None:
    pipeline, cache = installed(type("Idle", (), {"encode_prompt": lambda self, prompt_ids: 1})(), enabled=False)
    ids = on_device([[1, 2, 3]])
    assert bytes_read(device, lambda: pipeline.encode_prompt(ids)) == (0, 0)
    assert counts(cache) == (0, 0, 0)


def test_hashable_alone_returns_finished_keys(active: Any, device: Any) -> None:
    ids = on_device([1, 2, 3])
    assert active._hashable(ids) == tensor_key(ids)
    assert active._hashable([ids, (ids,)]) == ("__seq__", (tensor_key(ids), ("__seq__", (tensor_key(ids),))))
    assert bytes_read(device, lambda: active._hashable([ids, object()])) == (0, 0)


def test_the_callers_current_device_stays(device: Any) -> None:
    pipeline, _ = installed()
    with device.device(1):
        pipeline.encode_prompt(on_device([1, 2, 3], index=0))
        assert device.current_device() == 1
    assert device.current_device() == 0


def test_an_error_of_the_device_is_raised_and_nothing_is_cached(
    active: Any, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, cache = installed()
    ids = on_device([1, 2, 3])

    def fail(*_: Any) -> Any:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(device, "is_current_stream_capturing", fail, raising=False)
        with pytest.raises(RuntimeError, match="device lost"):
            pipeline.encode_prompt(ids)
    assert cache.stats()["size"] == 0
    assert pipeline.runs == 0
    pipeline.encode_prompt(ids)
    pipeline.encode_prompt(ids)
    assert counts(cache) == (1, 1, 0)


class RunsInTorch(TorchFunctionMode):
    """Code that runs inside torch's own calls, and so while a tensor is copied to the host."""

    def __init__(self, action: Callable[[], Any]) -> None:
        super().__init__()
        self.action = action
        self.inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside:
            self.inside = True
            self.action()
            self.inside = False
        return func(*args, **(kwargs or {}))


def test_code_that_asks_for_keys_while_others_are_read(active: Any, device: Any) -> None:
    ids, mask = on_device([[1, 2, 3]]), on_device([[True, True, False]])
    others = [torch.arange(5), on_device([7, 8])]
    made: list[Any] = []

    def ask() -> None:
        made.extend((active._hashable(other), other) for other in others)

    signature = inspect.signature(encode)
    with RunsInTorch(ask):
        key = active._build_key(signature, "tag", (ids, [torch.arange(4), mask]), {})
    assert tensor_keys_in(key) == [tensor_key(ids), tensor_key(torch.arange(4)), tensor_key(mask)]
    assert made, "no code ran, so this shows nothing"
    for found, other in made:
        assert found == tensor_key(other)


def test_a_tensor_that_goes_to_another_device_while_its_key_is_made(active: Any) -> None:
    prompt_ids = on_device([1, 2, 3], index=0)

    class Name:
        def __repr__(self) -> str:
            prompt_ids.data = on_device([1, 2, 3], index=1)
            return "name"

    assert active._build_key(inspect.signature(encode), "tag", ([prompt_ids], {Name(): 1}), {}) is None
    assert prompt_ids.device.index == 1


def test_a_stream_under_capture_bypasses_without_a_copy(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, cache = installed(type("Idle", (), {"encode_prompt": lambda self, prompt_ids: 1})())
    ids = on_device([1, 2, 3])
    monkeypatch.setattr(device, "is_current_stream_capturing", lambda: True, raising=False)
    assert bytes_read(device, lambda: pipeline.encode_prompt([torch.arange(3), ids])) == (0, 0)
    assert counts(cache) == (0, 0, 1)
