"""Producers that offer a wrong table or describe tensors wrongly: an error that says why, or a bypass, no crash."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from upstream.fresh_process import FreshProcesses, Result

HERE = Path(__file__).resolve().parent

PRELUDE = """
import sys
sys.path.insert(0, {here!r})
from mock_producer import NAME, Producer
producer = Producer({library!r})
"""


class Children:
    """Runs code in fresh processes that have a `producer`."""

    def __init__(self, processes: FreshProcesses, library: Path) -> None:
        self._processes = processes
        self._prelude = PRELUDE.format(here=str(HERE), library=str(library))

    def check(self, code: str, **environment: str) -> Result:
        return self._processes.check(self._prelude + code, **environment)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Children]:
    folder = tmp_path_factory.mktemp("producer")
    library = folder / "mock_producer.so"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    includes = HERE.parents[1] / "csrc"
    # Without what the sanitizers preload: a compiler leaks by design.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [*compiler, "-std=c++17", "-shared", "-fPIC", f"-I{includes}", "-o", str(library)]
    subprocess.run([*command, str(HERE / "mock_producer.cpp")], check=True, env=environment)
    processes = FreshProcesses(folder)
    yield Children(processes, library)
    processes.close()


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

ASK_TWICE = """
import torch
from omni_tensor_key import tensor_key
for _ in range(2):
    try:
        print("keyed", tensor_key(torch.tensor([1])))
    except RuntimeError as error:
        print(error)
producer.offer(producer.torch)
print(tensor_key(torch.tensor([1])).hexdigest)
"""


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_table_is_an_error_that_says_why(children: Children, name: str) -> None:
    table, text = UNUSABLE[name]
    lines = children.check(f"producer.offer({table})\n" + ASK_TWICE).output.splitlines()
    assert [text in line for line in lines] == [True, True, False]
    assert [line.startswith("omni_tensor_key ") for line in lines] == [True, True, False]
    assert lines[2] == xxhash.xxh3_128_hexdigest((1).to_bytes(8, "little"))


def test_a_torch_without_a_table(children: Children) -> None:
    lines = children.check("import torch; del torch.Tensor.__dlpack_c_exchange_api__\n" + ASK_TWICE).output.splitlines()
    assert ["needs torch 2.10 or newer" in line for line in lines] == [True, True, False]


@pytest.mark.parametrize("tables", ["(2, True)", "(3, False), (2, True)", "(2, False), (1, False)", "(1, False)"])
def test_the_chain_of_older_tables_is_followed(children: Children, tables: str) -> None:
    code = f"""
import torch
producer.offer(producer.table({tables}, then_torch=True))
from omni_tensor_key import tensor_key
print(tensor_key(torch.tensor([1, 2, 3])[::2]).hexdigest)
"""
    expected = xxhash.xxh3_128_hexdigest(b"".join(n.to_bytes(8, "little") for n in (1, 3)))
    assert children.check(code).output.split() == [expected]


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
import inspect, torch
from omni_tensor_key import _core, explain, tensor_key, UncacheableTensorError
producer.offer(producer.table((1, True)))
producer.describe({description})
tensor, refused = torch.tensor([1]), object()
try:
    print("keyed", tensor_key(tensor))
except UncacheableTensorError as error:
    print(error.reason)
assert explain(tensor)
builder = _core.KeyBuilder(lambda value: refused, lambda *args: 1 / 0, refused, (), None, 1 << 20)
assert builder.hashable(tensor) is refused
assert builder.hashable([1, (tensor,)]) is refused
signature = inspect.signature(lambda ids, mask=None: None)
assert builder.build_key(signature, "tag", (tensor,), {{}}) is None
print(builder.bypassed())
"""


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_a_wrong_description_is_refused(children: Children, name: str) -> None:
    description, reason = DESCRIPTIONS[name]
    lines = children.check(DESCRIBE.format(description=description)).output.splitlines()
    assert lines == [reason, str({("tag", "ids", reason): 1})]


def test_out_of_memory_stays_an_error(children: Children) -> None:
    code = """
import torch
from omni_tensor_key import tensor_key
producer.offer(producer.table((1, True)))
producer.describe(status=-1, error=MemoryError)
try:
    tensor_key(torch.tensor([1]))
except MemoryError as error:
    print(error)
"""
    assert children.check(code).output == "this producer fails\n"


def test_what_the_producer_describes_is_keyed(children: Children) -> None:
    """So the mock is what the extension reads: the tensor itself says something else."""
    code = """
import torch
from omni_tensor_key import tensor_key
producer.offer(producer.table((1, True)))
producer.describe([1, 1, 1])
print(repr(tensor_key(torch.zeros(2))))
"""
    digest = xxhash.xxh3_128_hexdigest((7).to_bytes(8, "little"))
    assert children.check(code).output == f"TensorKey({digest}, int64, (1, 1, 1), cpu)\n"


ACTIVATE = """
import logging, torch
class Count(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.getMessage())
logging.getLogger("vllm_omni.omni_tensor_key").addHandler(Count())
logging.getLogger("vllm_omni.omni_tensor_key").propagate = False
from omni_tensor_key import is_active, plugin
plugin.register()
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream
before = upstream._hashable
plugin.register()
plugin.register()
assert not is_active() and upstream._hashable is before
class Pipeline:
    def encode_prompt(self, ids):
        return ids + 1
pipeline = Pipeline()
cache = upstream.install_prompt_embed_cache(pipeline)
assert pipeline.encode_prompt(torch.tensor([1])).tolist() == [2]
assert cache.stats()["bypassed"] == 1
"""


@pytest.mark.parametrize("name", ["another name", "no function", "version 2", "version 2, in a loop"])
def test_activation_stands_down_with_one_warning(children: Children, name: str) -> None:
    table, text = UNUSABLE[name]
    result = children.check(f"producer.offer({table})\n" + ACTIVATE)
    warnings = result.lines_with("WARNING")
    assert len(warnings) == 1, result.output
    assert "stands down" in warnings[0]
    assert text in warnings[0]
    assert result.lines_with("ERROR") == []
