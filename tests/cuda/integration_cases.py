"""What test_integration.py runs in a process of its own: the extension with the unit on the fake runtime, which takes
the test device for CUDA.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator

import device_backend
import pytest
import torch
import xxhash

from omni_tensor_key import UncacheableTensorError, _core, tensor_key, tensor_keys
from omni_tensor_key.keys import host_copy
from omni_tensor_key.keys.host_copy import to_host

LIMIT = 1 << 20
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700


class Fake:
    """The fake runtime inside the extension."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(_core.__file__)
        self.library.fake_poison(device_backend.POISON)

    def calls(self, name: str) -> int:
        return int(self.library.fake_calls(name.encode()))

    def fail(self, name: str, error: int) -> None:
        self.library.fake_fail(name.encode(), 0, error)

    @property
    def launches_and_waits(self) -> tuple[int, int]:
        return self.calls("launch"), self.calls("cudaStreamSynchronize")


@pytest.fixture
def otkdev() -> Iterator[types.ModuleType]:
    module = device_backend.load()
    module.reset_counters()
    yield module
    module.set_device(0)


@pytest.fixture
def fake(otkdev: types.ModuleType) -> Iterator[Fake]:
    fake = Fake()
    for index in range(2):
        tensor_key(torch.arange(1, device=f"otkdev:{index}"))  # the first use is compared
    otkdev.reset_counters()
    fake.library.fake_reset()
    yield fake
    fake.library.fake_reset()


def digests(tensors: list[torch.Tensor]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(tensor.cpu().contiguous().numpy().tobytes()) for tensor in tensors]


def read(tensors: list[torch.Tensor]) -> list[bytes]:
    return [key.digest for key in by_unit(tensors)]


def by_unit(tensors: list[torch.Tensor]) -> list[_core.TensorKey]:
    keys = _core.tensor_keys(tensors, to_host, LIMIT, True)
    assert isinstance(keys, list)
    return keys


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.T,
    "columns": lambda t: t[:, 1:4],
    "steps": lambda t: t[::2, ::3],
    "expanded": lambda t: t[:1].expand(3, 30),
    "one element": lambda t: t[2, 3],
    "overlapping": lambda t: t.as_strided((3, 4), (2, 1), 5),
    "strided size 1": lambda t: t.as_strided((1, 3, 1), (999, 2, 777), 1),
    "bytes": lambda t: t.view(torch.uint8)[:, 3:9],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(fake: Fake, layout: str) -> None:
    tensor = LAYOUTS[layout](torch.arange(600, device="otkdev:0").reshape(20, 30))
    assert read([tensor]) == digests([tensor])
    assert fake.launches_and_waits == (1, 1)


def test_one_device_and_the_host_in_one_call(fake: Fake) -> None:
    ids = torch.arange(100)
    tensors = [ids.to("otkdev:1"), ids, torch.empty(0, device="otkdev:0"), ids[::2].to("otkdev:1")]
    assert read(tensors) == digests(tensors)
    assert fake.launches_and_waits == (1, 1)


def test_several_devices_in_one_call_are_copied_by_torch(otkdev: types.ModuleType, fake: Fake) -> None:
    tensors = [torch.arange(100, device=f"otkdev:{index}") for index in (0, 1, 0)]
    otkdev.reset_counters()
    keys = tensor_keys(tensors)
    assert (fake.launches_and_waits, otkdev.copies_to_host()) == ((0, 0), 3)
    assert [key.digest for key in keys] == digests(tensors)
    with pytest.raises(NotImplementedError, match="several devices"):
        by_unit(tensors)


def test_the_current_stream_is_used(otkdev: types.ModuleType, fake: Fake) -> None:
    side = otkdev.Stream("otkdev:1")
    tensor = torch.arange(100, device="otkdev:1")
    fake.library.fake_capture(1, ctypes.c_void_p(side.cuda_stream))
    assert tensor_key(tensor).digest == digests([tensor])[0]
    with otkdev.stream(side), pytest.raises(UncacheableTensorError, match="captured"):
        tensor_key(tensor)


def test_too_many_dimensions_go_through_torch(otkdev: types.ModuleType, fake: Fake) -> None:
    many = torch.arange(3**9, device="otkdev:0").reshape([3] * 9)[(slice(0, 3, 2),) * 9]
    ids = torch.arange(10, device="otkdev:0")
    otkdev.reset_counters()
    keys = tensor_keys([ids, many, ids])
    assert (otkdev.copies_to_host(), fake.launches_and_waits) == (3, (0, 0))
    assert [key.digest for key in keys] == digests([ids, many, ids])


def test_capture(fake: Fake) -> None:
    fake.library.fake_capture(1, None)
    with pytest.raises(UncacheableTensorError) as caught:
        tensor_keys([torch.arange(3), torch.arange(3, device="otkdev:1")])
    assert caught.value.reason == "graph_capture"
    assert fake.launches_and_waits == (0, 0)


@pytest.mark.parametrize("name", ["cudaSetDevice", "cudaStreamIsCapturing", "launch", "cudaStreamSynchronize"])
def test_an_error_is_raised(fake: Fake, name: str) -> None:
    fake.fail(name, ILLEGAL_ADDRESS)
    with pytest.raises(RuntimeError, match=r"^omni_tensor_key: .* on cuda:0: .* Earlier asynchronous work"):
        tensor_key(torch.arange(3, device="otkdev:0"))


def test_what_the_unit_cannot_do_torch_does_and_it_is_said_once(
    otkdev: types.ModuleType, fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    fake.fail("launch", 209)  # no code for this GPU
    host_copy.note_host_copy.cache_clear()
    tensors = [torch.arange(100, device="otkdev:0"), torch.arange(7, device="otkdev:0", dtype=torch.int16)]
    otkdev.reset_counters()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [key.digest for key in tensor_keys(tensors)] == digests(tensors)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "no code for this GPU" in said[0]


def test_the_host_copy_can_be_forced_and_gives_the_same_keys(otkdev: types.ModuleType, fake: Fake) -> None:
    tensors = [torch.arange(1000, device="otkdev:0")[::3], torch.ones(3, 4, dtype=torch.bool, device="otkdev:0").T]
    keys = tensor_keys(tensors)
    otkdev.reset_counters()
    assert _core.tensor_keys(tensors, to_host, LIMIT, False) == keys
    assert (otkdev.copies_to_host(), fake.launches_and_waits) == (2, (1, 1))


def test_the_unit_can_be_forced_and_fails_where_it_cannot_read(otkdev: types.ModuleType, fake: Fake) -> None:
    """A benchmark must not time the host copy under the unit's name."""
    fake.fail("launch", 209)
    with pytest.raises(NotImplementedError, match="no code for this GPU"):
        by_unit([torch.arange(3, device="otkdev:0")])
    assert otkdev.copies_to_host() == 0


@pytest.mark.parametrize("call", ["cudaStreamSynchronize", "cudaHostAlloc"])
def test_the_gil_is_free_during_a_wait_and_an_allocation(fake: Fake, call: str) -> None:
    fake.library.fake_delay(call.encode(), 500)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.01)

    tensors = [torch.arange(1 << 17, device="otkdev:0")] * (8 if call == "cudaHostAlloc" else 1)
    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    tensor_keys(tensors)
    end = time.perf_counter()
    stop.set()
    thread.join()
    assert end - begin >= 0.5
    assert sum(begin < moment < end for moment in ticks) >= 5


@pytest.mark.parametrize(("count", "length"), [(16, 1 << 17), (40, 9)], ids=["another storage", "another shape"])
def test_a_tensor_that_changes_during_an_allocation(fake: Fake, count: int, length: int) -> None:
    """Without the GIL another thread may give it another storage, or another shape: it is described anew."""
    tensors = [torch.zeros(1 << 17, dtype=torch.int64, device="otkdev:0")] * count
    changing, other = torch.arange(1 << 17, device="otkdev:0"), torch.arange(1, 1 + length).to("otkdev:0")
    fake.library.fake_delay(b"cudaHostAlloc", 300)
    timer = threading.Timer(0.1, lambda: changing.set_(other))
    timer.start()
    if length == 9:
        with pytest.raises(UncacheableTensorError) as caught:
            tensor_keys([changing, *tensors])
        assert caught.value.reason == "changed"
    else:
        assert tensor_keys([changing, *tensors])[0].digest == digests([other])[0]
    timer.join()
    assert fake.calls("cudaHostAlloc") == 1


def test_threads(fake: Fake) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(20):
                tensors = [torch.arange(seed * 1000 + i, device=f"otkdev:{seed % 2}")[:: 1 + i % 3] for _ in range(3)]
                assert [key.digest for key in tensor_keys(tensors)] == digests(tensors)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
