"""`pipeline.load_weights()`: the real loader of vLLM-Omni writes into a pipeline that has a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .conftest import Log
from .support import Adapter, LoadingEncoder, installed, is_hit, kept, new_weights, recomputed

pytestmark = pytest.mark.usefixtures("active")

Weights = list[tuple[str, torch.Tensor]]

CONTAINERS: dict[str, Callable[[Weights], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict_items": lambda weights: dict(weights).items(),
    "generator": lambda weights: (pair for pair in weights),
    "iterator": iter,
    "map": lambda weights: map(tuple, weights),
}


def text(pipeline: Any, seed: int = 1) -> Weights:
    return new_weights(pipeline.text_encoder, "text_encoder.", seed)


def image(pipeline: Any, seed: int = 1) -> Weights:
    return new_weights(pipeline.transformer, "transformer.", seed)


@pytest.mark.parametrize("encoder", [None, LoadingEncoder])
@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_weights_of_the_text_encoder(call: Any, container: Callable[[Weights], Any], encoder: Any) -> None:
    pipeline, cache = installed(Adapter(encoder) if encoder else None)
    with recomputed(pipeline, cache, *call):
        loaded = pipeline.load_weights(container(text(pipeline)))
    assert loaded == {f"text_encoder.{name}" for name, _ in pipeline.text_encoder.named_parameters()}


def test_by_keyword(call: Any) -> None:
    pipeline, cache = installed()
    with recomputed(pipeline, cache, *call):
        pipeline.load_weights(weights=text(pipeline))
    with kept(pipeline, cache, *call):
        pipeline.load_weights(weights=iter(image(pipeline)))


@pytest.mark.parametrize("encoder", [None, LoadingEncoder])
@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_weights_of_the_transformer_keep_the_cache(
    call: Any, container: Callable[[Weights], Any], encoder: Any, log: Log
) -> None:
    pipeline, cache = installed(Adapter(encoder) if encoder else None)
    wanted = image(pipeline)
    with kept(pipeline, cache, *call):
        loaded = pipeline.load_weights(container(wanted))
    assert loaded == {name for name, _ in wanted}
    assert torch.equal(pipeline.transformer.weight, dict(wanted)["transformer.weight"])
    assert log.having("DEBUG", "Adapter", "kept", "load_weights", "transformer")
    assert not log.having("cleared")


def test_what_may_be_readable_only_once_is_not_looked_at_and_clears(call: Any, log: Log) -> None:
    class Once:
        """Iterable, but no iterator: iter() may open a stream."""

        def __init__(self, weights: Weights) -> None:
            self.weights, self.opened = weights, 0

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            self.opened += 1
            return iter(self.weights)

    pipeline, cache = installed()
    pipeline.encode_prompt(*call)
    weights = Once(image(pipeline))
    pipeline.load_weights(weights)
    assert weights.opened == 1
    assert not is_hit(pipeline, cache, *call)
    assert log.having("DEBUG", "Adapter", "cleared", "load_weights")


def test_both(call: Any) -> None:
    for order in (lambda p: text(p) + image(p), lambda p: image(p) + text(p)):
        pipeline, cache = installed()
        with recomputed(pipeline, cache, *call):
            pipeline.load_weights(iter(order(pipeline)))


def test_no_weights_keep_the_cache(call: Any) -> None:
    pipeline, cache = installed()
    for nothing in ([], (), iter(())):
        with kept(pipeline, cache, *call):
            pipeline.load_weights(nothing)


@pytest.mark.parametrize("item", [("unknown.weight", torch.ones(1)), ("transformer_3.weight", torch.ones(1)), 3, ()])
def test_an_unknown_name_clears(call: Any, item: Any) -> None:
    pipeline, cache = installed()
    for container in (list, iter):
        pipeline.encode_prompt(*call)
        with pytest.raises((ValueError, TypeError)):
            pipeline.load_weights(container([item]))
        assert not is_hit(pipeline, cache, *call)


def test_a_name_that_only_begins_like_the_transformer_clears(call: Any) -> None:
    pipeline, cache = installed()
    pipeline.encode_prompt(*call)
    with pytest.raises(ValueError, match="transformer_of_text"):
        pipeline.load_weights([("transformer_of_text.weight", torch.ones(1))])
    assert not is_hit(pipeline, cache, *call)


def test_buckets(call: Any) -> None:
    """verl-omni hands over one list per bucket, in several calls."""
    pipeline, cache = installed()
    for seed in (1, 2):
        with kept(pipeline, cache, *call):
            for bucket in image(pipeline, seed):
                pipeline.load_weights([bucket])
        with recomputed(pipeline, cache, *call):
            for bucket in image(pipeline, seed) + text(pipeline, seed):
                pipeline.load_weights([bucket])


def test_each_bucket_clears_what_was_encoded_between_two(call: Any) -> None:
    pipeline, cache = installed()
    for bucket in text(pipeline):
        with recomputed(pipeline, cache, *call):
            pipeline.load_weights([bucket])


@pytest.mark.parametrize("container", [list, iter])
def test_a_load_that_fails_half_way_clears(call: Any, container: Any) -> None:
    pipeline, cache = installed()
    weights = [text(pipeline)[0], ("nothing.like.it", torch.ones(1))]
    with recomputed(pipeline, cache, *call), pytest.raises(ValueError, match="nothing"):
        pipeline.load_weights(container(weights))


def test_an_iterator_that_fails_half_way_clears(call: Any) -> None:
    pipeline, cache = installed()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from text(pipeline)
        raise ConnectionError("the sender is gone")

    with recomputed(pipeline, cache, *call), pytest.raises(ConnectionError, match="the sender is gone"):
        pipeline.load_weights(weights())


class Counted:
    """An iterator that notes what has been asked of it, and what had been written at that time."""

    def __init__(self, pipeline: Any, weights: Weights) -> None:
        self.parameters = dict(pipeline.named_parameters())
        self.weights = weights
        self.given = 0
        self.at_once = 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self.given == len(self.weights):
            raise StopIteration
        written = [torch.equal(self.parameters[name], weight) for name, weight in self.weights[: self.given]]
        self.at_once = max(self.at_once, len(written) - sum(written))
        self.given += 1
        return self.weights[self.given - 1]


@pytest.mark.parametrize("which", [text, image])
def test_an_iterator_is_read_once_and_lazily(which: Callable[[Any], Weights]) -> None:
    pipeline, _ = installed()
    weights = Counted(pipeline, which(pipeline))
    pipeline.load_weights(weights)
    assert weights.given == len(weights.weights)
    # The loader looks one weight ahead where the name's first part changes; upstream alone does the same.
    assert weights.at_once <= 1


def test_a_list_reaches_the_loader_as_it_is() -> None:
    seen: list[Any] = []

    class Recording(Adapter):
        def load_weights(self, weights: Any) -> None:
            seen.append(weights)

    pipeline, _ = installed(Recording())
    for weights in ([], (), None, {}.items()):
        pipeline.load_weights(weights)
        assert seen.pop() is weights


def test_what_load_weights_returns_and_raises_is_the_loaders_own(call: Any) -> None:
    class Odd(Adapter):
        def load_weights(self, weights: Any, strict: bool = True, *, device: str = "cpu") -> Any:
            """Mine."""
            if weights is None:
                raise KeyError("mine")
            return (list(weights), strict, device)

    pipeline, _ = installed(Odd())
    assert pipeline.load_weights([1], False, device="x") == ([1], False, "x")
    assert pipeline.load_weights(strict=0, weights=iter([2])) == ([2], 0, "cpu")
    assert pipeline.load_weights.__doc__ == "Mine."
    with pytest.raises(KeyError, match="mine"):
        pipeline.load_weights(None)
    with pytest.raises(TypeError, match="weights"):
        pipeline.load_weights()
