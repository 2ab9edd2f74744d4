"""What nvcc makes of the kernel, executed instruction by instruction on this machine, below the real launcher.

The machine finds accesses out of bounds or misaligned, races between two barriers, uninitialized shared memory, double
writes and threads that miss a barrier. Without nvcc these tests skip.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .translate import Kernel

HERE = Path(__file__).resolve().parent
CUDA = HERE.parents[2] / "csrc" / "cuda"
OK, FAILED = 0, 4
EXECUTED = (75, 90, 120)  # architectures, whose texts are those of all others too
BLOCK, TILE = 1024, 32 * 1024
LENGTHS = [
    *range(1, 260), 511, 512, 513, BLOCK + 63, BLOCK + 64, BLOCK + 65,
    *(blocks * BLOCK + more for blocks in (1, 2, 4, 8) for more in (-1, 0, 1)),
    *(tiles * TILE + more for tiles in (1, 2) for more in (-1, 0, 1, 63, 64, 65)), 66_000, 3 * TILE + 63, 3 * TILE + 64,
]  # fmt: skip


def span(array: np.ndarray) -> tuple[int, int]:
    """The first address of an array's elements, and the number of bytes to the end of the last."""
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    low = sum(min(0, far) for far in reach)
    return array.__array_interface__["data"][0] + low, sum(map(abs, reach)) + array.itemsize


class Machine:
    """Reads arrays with one text of the kernel; raises where the machine stopped it, or where a result is wrong."""

    def __init__(self, unit: Any) -> None:
        self.unit = unit
        unit.library.ptx_written.restype = ctypes.c_uint64

    def order(self, seed: int) -> None:
        self.unit.library.ptx_set_order(ctypes.c_uint64(seed))

    def add_source(self, address: int, at: int, size: int) -> None:
        self.unit.library.ptx_add_source(ctypes.c_uint64(address), ctypes.c_void_p(at), ctypes.c_uint64(size))

    def written(self, address: int, size: int) -> int:
        return int(self.unit.library.ptx_written(ctypes.c_uint64(address), ctypes.c_uint64(size)))

    def read(self, tensors: Sequence[Any], arrays: Sequence[np.ndarray]) -> None:
        """Read the tensors, whose contents are those of the arrays."""
        status, read = self.unit.launch(0, 0, tensors)
        assert status == OK, self.unit.text
        status = self.unit.wait(read)
        try:
            assert status == OK, self.unit.text
            self.unit.check(read, arrays)
            for i, array in enumerate(arrays):
                content = self.unit.result(read, i).content
                size, room = -(-array.nbytes // 16) * 16, -(-array.nbytes // 128) * 128
                assert (self.written(content, size), self.written(content + size, room - size)) == (size, 0)
        finally:
            self.unit.library.ptx_reset()
            self.unit.release(read)

    def __call__(self, arrays: Sequence[np.ndarray]) -> None:
        begin = end = 0
        for start, size in sorted(map(span, arrays)):
            begin = start if start > end else begin  # views of one array are one source
            end = max(end, start + size)
            self.add_source(begin, begin, end - begin)
        self.read(arrays, arrays)


def filled(nbytes: int, seed: int, offset: int = 0) -> np.ndarray:
    """Random bytes at an address that is `offset` more than a multiple of 16."""
    memory = np.random.default_rng(seed).integers(0, 256, nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 16 + offset
    return memory[start : start + nbytes]


@pytest.fixture(scope="session")
def nvcc() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMNI_TENSOR_KEY_CUDA", raising=False)
        found = setup_functions()["find_nvcc"]()
    if found is None:
        pytest.skip("nvcc is not installed: what it makes of the kernel is not executed")
    return str(found)


def setup_functions() -> dict[str, Any]:
    import runpy

    import setuptools

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        return runpy.run_path(str(HERE.parents[2] / "setup.py"))


@pytest.fixture(scope="session")
def texts(nvcc: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The PTX for each architecture that setup.py builds for."""
    folder = tmp_path_factory.mktemp("ptx")
    codes, newest = setup_functions()["gpu_targets"](nvcc)
    made = {}
    for number in sorted({*codes, newest}):
        output = folder / f"{number}.ptx"
        target = f"-gencode=arch=compute_{number},code=compute_{number}"
        subprocess.run([nvcc, "-std=c++17", "-O3", "-ptx", target, "-o", output, CUDA / "kernel.cu"], check=True)
        made[number] = output.read_text()
    return made


def test_the_text_of_every_architecture_is_executed(texts: dict[int, str]) -> None:
    groups: dict[str, list[int]] = {}
    for number, text in texts.items():
        name = re.sub(r"_[0-9a-f]{8}(?=_|\d)", "", text)
        groups.setdefault(re.sub(r"^\.target.*$", "", name, flags=re.M), []).append(number)
    assert [numbers for numbers in groups.values() if not set(numbers) & set(EXECUTED)] == []


@pytest.fixture(scope="session")
def build(
    nvcc: str, tmp_path_factory: pytest.TempPathFactory, compile_native: Callable[..., Path], unit_class: Any
) -> Callable[[str], Machine]:
    """Makes a machine for a text, with nvcc's own host code for the launch."""
    folder = tmp_path_factory.mktemp("machine")
    host = folder / "kernel.o"
    subprocess.run([nvcc, "-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-c", CUDA / "kernel.cu", "-o", host], check=True)
    runtime = HERE.parent / "fake_runtime" / "runtime.cpp"
    objects = [
        compile_native(folder / f"{place.parent.name}_{place.stem}.o", "-O2", "-c", place)
        for place in (*sorted(CUDA.glob("*.cpp")), runtime, HERE / "machine.cpp")
    ]
    made = 0

    def build_one(text: str) -> Machine:
        nonlocal made
        made += 1
        source = folder / f"text_{made}.cpp"
        source.write_text(Kernel(text).cpp)
        flags = ["-O1", "-shared", f"-I{HERE}", "-Wno-unused-but-set-variable", "-Wno-uninitialized"]
        return Machine(unit_class(compile_native(source.with_suffix(".so"), *flags, source, host, *objects)))

    return build_one


@pytest.fixture(scope="session", params=EXECUTED, ids="compute_{}".format)
def machine(request: pytest.FixtureRequest, texts: dict[int, str], build: Callable[[str], Machine]) -> Machine:
    return build(texts[request.param])


@pytest.mark.parametrize("seed", [0, 1, 7], ids=["forward", "reverse", "random"])
def test_lengths_and_offsets(machine: Machine, seed: int) -> None:
    machine.order(seed)
    for at in range(0, len(LENGTHS), 16):
        for offset in (0, 1, 8):
            machine([filled(length, length, offset) for length in LENGTHS[at : at + 16]])


def layouts() -> Iterator[np.ndarray]:
    for dtype in ("u1", "u2", "i4", "i8", "c16"):
        flat = filled(2 * 3 * 2 * 5 * 2 * 7 * 2 * 9 * 16, 3).view(dtype)
        cube = flat[:7200].reshape(3, 40, 60)
        yield from (cube[:, ::2], cube[:, :, ::3], cube[::-1], cube[:, ::-1, ::-1], cube.transpose(2, 0, 1))
        yield from (cube.transpose(1, 2, 0)[5:, 7:], cube[0, :, 3], cube[1:2, 5:7, 9:30:2], cube[:, 3:, 5:])
        for count in (1, 2, 3, 5, 17, 63, 64, 65, 129, 300, 1000):
            yield from (flat[: 3 * count : 3], flat[1 : count + 1], flat[count::-1])
        eight = flat[: 2 * 3 * 2 * 5 * 2 * 7 * 2 * 3].reshape(2, 3, 2, 5, 2, 7, 2, 3)
        yield from (eight[:, :2, :, :4, :, :6, :, :2], eight.transpose(7, 6, 5, 4, 3, 2, 1, 0)[:, :1])
        yield np.broadcast_to(flat[:5], (7, 5))
    misaligned = filled(8 * 600, 4, 2).view(np.int64).reshape(20, 30)
    yield from (misaligned[::2, ::3], misaligned.T)


def test_layouts_one_by_one(machine: Machine) -> None:
    machine.order(5)
    for array in layouts():
        machine([array])


def test_several_launches(machine: Machine) -> None:
    machine.order(6)
    machine(list(layouts()))


def test_offsets_beyond_4_gib(machine: Machine, unit_class: Any) -> None:
    """Rows of 1,024 IDs that lie 3 GiB apart on the device, forwards, backwards and transposed."""
    machine.order(2)
    rows = filled(5 * 8200, 8).view(np.int64).reshape(5, 1025)[:, :1024]
    base, apart = 1 << 40, 3 << 30
    for first, sign, step, axis in ((0, 1, 1, 0), (4, -1, 1, 0), (0, 1, 3, 0), (0, 1, 1, 1), (4, -1, 5, 1)):
        array = rows[::sign, ::step] if axis == 0 else rows[::sign, ::step].T
        tensor = unit_class.describe(array)
        tensor.data, tensor.strides[axis] = base + first * apart, sign * apart // 8
        for i, row in enumerate(rows):
            machine.add_source(base + i * apart, row.ctypes.data, row.nbytes)
        machine.read([tensor], [array])


def replaced(text: str, pattern: str, new: str) -> str:
    changed, count = re.subn(pattern, new, text, count=1)
    assert count == 1
    return changed


# What is changed in the text, and what the machine or the comparison must say.
FAULTS = {
    "no barrier": (r"bar\.sync\s+0;", "", "uninitialized shared memory"),
    "a barrier for some": (
        r"(bar\.sync\s+0;)", r"mov.u32 %fault, %tid.x; setp.eq.u32 %pfault, %fault, 3; @%pfault ret; \1",
        "not at the barrier",
    ),
    "a wrong multiplier": (r"2654435761", "2654435763", "=="),
    "a read too far": (r"(ld\.global\.v2\.u64\s+\{[^}]*\}, \[%rd\d+)\]", r"\1+16]", "read out of bounds"),
    "a misaligned read": (r"(ld\.global\.v2\.u64\s+\{[^}]*\}, \[%rd\d+)\]", r"\1+8]", "misaligned"),
    "a second write": (r"(st\.global\.v2\.u64\s+\[%rd\d+\], \{[^}]*\};)", r"\1 \1", "second write"),
    "a write too far": (r"(st\.global\.v2\.u64\s+\[%rd\d+)\]", r"\1+1048576]", "write out of bounds"),
    "another's shared memory": (r"(st\.shared\.v2\.u64\s+\[%r\d+)\]", r"\1+16]", "race with a write"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(texts: dict[int, str], build: Callable[[str], Machine], fault: str) -> None:
    pattern, new, message = FAULTS[fault]
    text = replaced(texts[90], pattern, new)
    text = text.replace(".reg .pred", ".reg .b32 %fault;\n.reg .pred %pfault;\n.reg .pred", 1)
    broken = build(text)
    with pytest.raises(AssertionError, match=message):
        broken([filled(64 * 1024, 1)] * 2)


@pytest.mark.parametrize(
    "unknown", ["fma.rn.f32 %r1, %r2, %r3, %r1", "atom.global.add.u32 %r1, [%rd1], 1", "red.global.add.u32 [%rd1], 1"]
)
def test_an_unknown_instruction_ends_the_translation(texts: dict[int, str], unknown: str) -> None:
    with pytest.raises(ValueError, match="not known"):
        Kernel(replaced(texts[90], r"bar\.sync\s+0;", f"{unknown};"))
