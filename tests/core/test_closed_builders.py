"""Keys of a builder that has been closed: the calls that have them are under way, and nobody guards what they store."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch

from omni_tensor_key import _core, reference, tensor_key
from omni_tensor_key.host_copy import to_host

IDS = torch.arange(8)
SENTINEL = object()


@pytest.fixture(params=[_core, reference], ids=["native", "reference"])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def make_builder(backend: Any) -> Any:
    return backend.KeyBuilder(lambda value: value, lambda *args: None, SENTINEL, (), to_host, 1 << 20)


def test_they_equal_nothing_but_themselves(backend: Any) -> None:
    builder, other = make_builder(backend), make_builder(backend)
    first, second, third = builder.hashable(IDS), builder.hashable(IDS.clone()), other.hashable(IDS)
    public = backend.tensor_keys([IDS], to_host, 1 << 20)[0]
    assert first == second == third == public
    entries = {first: "first", third: "third"}
    assert entries == {public: "third"}
    builder.close()
    assert first == first
    assert entries[first] == "third"
    for key in (second, third, public):
        assert first != key
        assert key != first
        assert hash(key) == hash(first)
        assert key not in entries
    assert third == public
    assert first.digest == public.digest


def test_they_outlive_their_builder() -> None:
    for close in (True, False):
        keys = []
        for _ in range(100):
            builder = make_builder(_core)
            keys.append([builder.hashable(IDS), builder.hashable(IDS)])
            if close:
                builder.close()
            del builder
        assert all((first == second) is not close for first, second in keys)
        assert all((first == tensor_key(IDS)) is not close for first, _ in keys)


def test_a_builder_that_is_closed_while_it_makes_a_key() -> None:
    builder: Any

    def close(value: Any) -> str:
        builder.close()
        return "closed"

    builder = _core.KeyBuilder(close, lambda *args: None, SENTINEL, (), to_host, 1 << 20)
    _, (key, closed) = builder.hashable([IDS, object()])
    assert closed == "closed"
    assert key != tensor_key(IDS)


def test_nothing_is_kept_for_calls_that_will_not_come() -> None:
    signature = inspect.Signature([inspect.Parameter("prompt", inspect.Parameter.KEYWORD_ONLY)])
    before = sys.getrefcount(signature)
    builder = make_builder(_core)
    assert builder.build_key(signature, "tag", (), {"prompt": "a"}) == ("tag", (("prompt", "a"),))
    assert sys.getrefcount(signature) > before
    builder.close()
    assert sys.getrefcount(signature) == before
