"""The environment variables, each in a process that starts with them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

# Everything that is logged by this package, and what the process ends up with.
START = """
import json, logging, sys, torch

lines = []

class Collect(logging.Handler):
    def emit(self, record):
        if "omni_tensor_key" in record.getMessage():
            lines.append([record.levelname, record.getMessage()])

logging.getLogger().addHandler(Collect())
logging.getLogger().setLevel(logging.INFO)

import omni_tensor_key
from omni_tensor_key.settings import settings
"""

READ = """
for _ in range(3):  # read once, warned of once
    omni_tensor_key.tensor_key(torch.empty(0))
    seen = settings()
print(json.dumps({
    "lines": lines, "enabled": seen.enabled, "max_bytes": seen.max_bytes, "backend": seen.backend,
    "module": omni_tensor_key.TensorKey.__module__, "key": type(omni_tensor_key.tensor_key(torch.empty(0))).__module__,
}))
"""

READ_MANY = """
import os

out = []
for variables in json.loads(sys.argv[1]):
    lines.clear()
    settings.cache_clear()
    os.environ.update(variables)
    settings()
    out.append({"lines": list(lines), **settings()._asdict()})
    for name in variables:
        del os.environ[name]
print(json.dumps(out))
"""

MIB = 1 << 20
NAME = "OMNI_TENSOR_KEY"
BYTES = "OMNI_TENSOR_KEY_MAX_BYTES"
BACKEND = "OMNI_TENSOR_KEY_BACKEND"


def start(run_python: RunPython, **variables: str) -> dict[str, Any]:
    result = run_python(START + READ, **variables)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def read_many(run_python: RunPython, *cases: dict[str, str]) -> list[dict[str, Any]]:
    result = run_python(START + READ_MANY, json.dumps(cases))
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def test_defaults(run_python: RunPython) -> None:
    seen = start(run_python)
    assert seen["lines"] == []
    assert (seen["enabled"], seen["max_bytes"], seen["backend"]) == (True, MIB, "native")
    # The native type names the package as its module.
    assert seen["module"] == seen["key"] == "omni_tensor_key"


def test_the_reference_backend_can_be_chosen(run_python: RunPython) -> None:
    seen = start(run_python, OMNI_TENSOR_KEY_BACKEND="reference")
    assert seen["lines"] == []
    assert seen["module"] == seen["key"] == "omni_tensor_key.reference"


def test_bad_values_from_the_start_of_a_process(run_python: RunPython) -> None:
    seen = start(run_python, **{NAME: "perhaps", BYTES: "abc", BACKEND: "cuda"})
    assert (seen["enabled"], seen["max_bytes"], seen["backend"]) == (True, MIB, "native")
    assert seen["module"] == "omni_tensor_key"
    assert sorted(seen["lines"]) == [
        ["WARNING", "omni_tensor_key: OMNI_TENSOR_KEY='perhaps' is not 0 or 1; using 1."],
        ["WARNING", "omni_tensor_key: OMNI_TENSOR_KEY_BACKEND='cuda' is not native or reference; using native."],
        ["WARNING", "omni_tensor_key: OMNI_TENSOR_KEY_MAX_BYTES='abc' is not a number of bytes; using 1048576."],
    ]


BAD = [
    *((BYTES, value) for value in ("", "abc", "-1", "1.5", "1e6", "1_000", " 5", "5 ", "+5", "0x10", "1M", "٣", "²")),
    (BYTES, str(1 << 63)),
    (BYTES, "9" * 100),
    *((BACKEND, value) for value in ("", "Native", "cuda", " native", "reference,native")),
    *((NAME, value) for value in ("", "2", "-1", "disabled", "none")),
]
DEFAULTS = {NAME: ("enabled", True), BYTES: ("max_bytes", MIB), BACKEND: ("backend", "native")}


def test_each_bad_value_gives_one_warning_and_the_default(run_python: RunPython) -> None:
    for (name, value), seen in zip(BAD, read_many(run_python, *({name: value} for name, value in BAD)), strict=True):
        field, default = DEFAULTS[name]
        assert seen[field] == default, (name, value)
        [(level, line)] = seen["lines"]
        assert level == "WARNING"
        assert f"{name}={value!r} is not" in line
        assert line.endswith(f"; using {int(default) if name == NAME else default}.")


def test_a_number_that_python_does_not_convert(run_python: RunPython) -> None:
    [seen] = read_many(run_python, {BYTES: "1" * 5000})
    assert seen["max_bytes"] == MIB
    assert len(seen["lines"]) == 1


GOOD = [
    *((BYTES, value, int(value)) for value in ("0", "1", "007", str(MIB), str((1 << 63) - 1))),
    *((NAME, value, True) for value in ("1", "true", "YES", " on ")),
    *((NAME, value, False) for value in ("0", "false", "No", " OFF ")),
    *((BACKEND, value, value) for value in ("native", "reference")),
]


def test_good_values_are_taken_without_a_word(run_python: RunPython) -> None:
    seen = read_many(run_python, *({name: value} for name, value, _ in GOOD))
    assert [case["lines"] for case in seen] == [[]] * len(GOOD)
    assert [case[DEFAULTS[name][0]] for case, (name, _, _) in zip(seen, GOOD, strict=True)] == [
        expected for _, _, expected in GOOD
    ]


LIMITED = """
import torch
from omni_tensor_key import UncacheableTensorError, tensor_key

print(tensor_key(torch.zeros(2, dtype=torch.int64)).nbytes)
try:
    tensor_key(torch.zeros(17, dtype=torch.bool))
except UncacheableTensorError as error:
    print(error.reason, "16 bytes" in str(error))
"""


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_the_limit_reaches_the_public_functions(run_python: RunPython, backend: str) -> None:
    result = run_python(LIMITED, **{BYTES: "16", BACKEND: backend})
    assert result.stdout.split() == ["16", "size", "True"], result.stderr[-2000:]
