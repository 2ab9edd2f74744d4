"""Producers that offer a wrong table or describe tensors wrongly: an error that says why, or a bypass, no crash."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

HERE = Path(__file__).resolve().parent
Run = Callable[..., list[Any]]

PRELUDE = """
import json, sys
sys.path[:0] = [{here!r}, {tests!r}]
import torch
from mock_producer import NAME, Producer
producer = Producer({library!r})
def tell(value):
    print("\\n" + json.dumps(value), flush=True)
"""


@pytest.fixture
def run(run_python: Callable[..., Any], tmp_path: Path) -> Run:
    """Runs code in a fresh process that has a `producer`, and returns the values that it tells."""
    library = tmp_path / "mock_producer.so"
    # Without what the sanitizers preload: a compiler leaks by design.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++17", "-shared", "-fPIC"]
    command += [f"-I{HERE.parents[1] / 'csrc'}", "-o", str(library), str(HERE / "mock_producer.cpp")]
    subprocess.run(command, check=True, env=environment)

    def run(code: str) -> list[Any]:
        prelude = PRELUDE.format(here=str(HERE), tests=str(HERE.parent), library=str(library))
        result = run_python(prelude + code)
        assert result.returncode == 0, result.stderr[-2000:]
        return [json.loads(line) for line in result.stdout.splitlines() if line[:1] in ("[", '"', "{")]

    return run


VERSION = "knows DLPack's exchange table in major version 1 only"
UNUSABLE = {
    "no attribute": ("None", "is None, and not a capsule named 'dlpack_exchange_api'"),
    "no capsule": ("12", "is 12, and not a capsule named 'dlpack_exchange_api'"),
    "another name": ("producer.table((1, True), name=b'dlpack_exchange_api_v2')", "not a capsule named"),
    "an empty name": ("producer.table((1, True), name=b'')", "not a capsule named"),
    "no function": ("producer.table((1, False))", "none with the function it needs"),
    "version 0": ("producer.table((0, True))", VERSION),
    "version 2": ("producer.table((2, True))", VERSION),
    "version 2, then 1 without the function": ("producer.table((2, True), (1, False))", VERSION),
    "version 2, in a loop": ("producer.table((2, True), loop=True)", VERSION),
    "versions 3 and 2, in a loop": ("producer.table((3, True), (2, True), loop=True)", VERSION),
    "version 1 without the function, in a loop": ("producer.table((1, False), loop=True)", VERSION),
}

ASK = """
from omni_tensor_key import tensor_key
def ask():
    try:
        tell(repr(tensor_key(torch.tensor([1]))))
    except RuntimeError as error:
        tell(str(error))
for table in [{tables}]:
    producer.offer(table)
    ask()
del torch.Tensor.__dlpack_c_exchange_api__
ask()
producer.offer(producer.torch)
ask()
"""


def test_an_unusable_table_is_an_error_that_says_why(run: Run) -> None:
    tables = ", ".join(table for table, _ in UNUSABLE.values())
    *told, without, keyed = run(ASK.replace("{tables}", tables))
    assert len(told) == len(UNUSABLE)
    for error, (name, (_, text)) in zip(told, UNUSABLE.items(), strict=True):
        assert error.startswith("omni_tensor_key "), name
        assert text in error, name
    assert "needs torch 2.10 or newer" in without
    assert xxhash.xxh3_128_hexdigest((1).to_bytes(8, "little")) in keyed


@pytest.mark.parametrize("tables", ["(2, True)", "(3, False), (2, True), (1, False)"])
def test_the_chain_of_older_tables_is_followed(run: Run, tables: str) -> None:
    code = f"""
producer.offer(producer.table({tables}, then_torch=True))
from omni_tensor_key import tensor_key
tell(tensor_key(torch.tensor([1, 2, 3])[::2]).hexdigest)
"""
    assert run(code) == [xxhash.xxh3_128_hexdigest(b"".join(n.to_bytes(8, "little") for n in (1, 3)))]


FAR = 1 << 62
DESCRIPTIONS = {
    "fails with an error": ("status=-1, error=ValueError", "unexportable"),
    "fails without an error": ("status=-1", "unexportable"),
    "succeeds with an error set": ("error=ValueError", "unexportable"),
    "no data": ("[1], data=0", "storage"),
    "no data, 0-d": ("data=0", "storage"),
    "ndim -1": ("[1], ndim=-1", "malformed"),
    "ndim 65": ("[1] * 65", "malformed"),
    "ndim without shape": ("None, ndim=1", "malformed"),
    "negative size": ("[-1]", "malformed"),
    "negative size after zero": ("[0, -1]", "malformed"),
    "least size": (f"[{-(1 << 63)}]", "malformed"),
    "sizes overflow": (f"[{FAR}, {FAR}]", "size"),
    "one huge size": (f"[{(1 << 63) - 1}]", "size"),
    "strides overflow": (f"[2, 2], [{FAR}, {FAR}]", "malformed"),
    "least stride": (f"[2], [{-(1 << 63)}]", "malformed"),
    "byte_offset overflows": (f"[1], byte_offset={(1 << 64) - 1}", "malformed"),
    "0 bits": ("[1], dtype=(0, 0, 1)", "dtype"),
    "12 bits": ("[1], dtype=(0, 12, 1)", "dtype"),
    "2 lanes": ("[1], dtype=(0, 64, 2)", "dtype"),
    "0 lanes": ("[1], dtype=(0, 64, 0)", "dtype"),
    "an unknown type": ("[1], dtype=(99, 64, 1)", "dtype"),
}

DESCRIBE = """
import inspect
from keys.support import Active
from omni_tensor_key import UncacheableTensorError, explain, tensor_key
producer.offer(producer.table((1, True)))
tensor, active = torch.tensor([1]), Active()
signature = inspect.signature(lambda ids, mask=None: None)
for name, description in DESCRIPTIONS.items():
    eval(f"producer.describe({description})")
    try:
        reason = repr(tensor_key(tensor))
    except UncacheableTensorError as error:
        reason = error.reason
    assert explain(tensor)
    assert active._hashable([1, (tensor,)]) is active._NOT_HASHABLE
    assert active._build_key(signature, "tag", (tensor,), {}) is None
    tell([name, reason, active.bypasses.pop()])
producer.describe(status=-1, error=MemoryError)
try:
    tensor_key(tensor)
except MemoryError as error:
    tell(str(error))
producer.describe([1, 1, 1])
tell(repr(tensor_key(torch.zeros(2))))
"""


def test_a_wrong_description_is_refused(run: Run) -> None:
    """And what the producer describes is what is keyed: the tensor itself says something else."""
    descriptions = {name: description for name, (description, _) in DESCRIPTIONS.items()}
    *told, out_of_memory, keyed = run(f"DESCRIPTIONS = {descriptions!r}\n" + DESCRIBE)
    assert told == [[name, reason, ["tag", "ids", reason]] for name, (_, reason) in DESCRIPTIONS.items()]
    assert out_of_memory == "this producer fails"
    digest = xxhash.xxh3_128_hexdigest((7).to_bytes(8, "little"))
    assert keyed == f"TensorKey({digest}, int64, (1, 1, 1), cpu)"
