"""Activation as vLLM-Omni does it: an entry point that is called early in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .fresh_process import FreshProcesses

LOAD = """
import sys, torch
from vllm_omni.plugins import load_omni_general_plugins
before = set(sys.modules)
load_omni_general_plugins()
added = set(sys.modules) - before
assert not [name for name in added if name.startswith("vllm_omni.diffusion")], added
assert not torch.cuda.is_initialized()
"""

USE = """
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

class Pipeline:
    def encode_prompt(self, prompt_ids, attention_mask=None):
        return prompt_ids * 2

pipeline = Pipeline()
cache = upstream.install_prompt_embed_cache(pipeline)
for _ in range(3):
    assert pipeline.encode_prompt(torch.arange(3)).tolist() == [0, 2, 4]
found = cache.stats()
print("COUNTS", found["hits"], found["misses"], found["bypassed"])
"""

ACTIVE, INACTIVE = ["COUNTS 2 1 0"], ["COUNTS 0 0 3"]


def test_a_new_interpreter(tmp_path: Path) -> None:
    """Nothing imported and nothing forked."""
    code = LOAD + "import omni_tensor_key\nassert not omni_tensor_key.is_active()\n" + USE
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMNI_", "VLLM_"))}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "COUNTS 2 1 0" in ran.stdout


def test_the_entry_point_before_and_after_the_import_of_the_cache(fresh: FreshProcesses) -> None:
    for code in (LOAD + USE, "import torch\nimport vllm_omni.diffusion.cache\n" + LOAD + USE):
        result = fresh.check(code + "assert not torch.cuda.is_initialized()\n")
        assert result.lines_with("COUNTS") == ACTIVE
        (line,) = result.lines_with("is active")
        assert line.startswith("INFO ")  # vLLM's format
        assert "omni_tensor_key" in line
        assert "WARNING" not in result.output


def test_switched_off_by_the_environment(fresh: FreshProcesses) -> None:
    off = "assert not __import__('omni_tensor_key').is_active()\n"
    for value in ("0", "false"):
        result = fresh.check(LOAD + USE + off, OMNI_TENSOR_KEY=value)
        assert result.lines_with("COUNTS") == INACTIVE
    explicit = "import omni_tensor_key\nomni_tensor_key.activate()\n" + off
    assert fresh.check(LOAD + explicit + USE + off, OMNI_TENSOR_KEY="0").lines_with("COUNTS") == INACTIVE


def test_bad_values_in_the_environment_are_warned_of_once(fresh: FreshProcesses) -> None:
    bad = {
        "OMNI_TENSOR_KEY": "maybe",
        "OMNI_TENSOR_KEY_MAX_BYTES": "abc",
        "OMNI_TENSOR_KEY_VERIFY": "2",
        "OMNI_TENSOR_KEY_CACHE_BYTES": "-1",
    }
    result = fresh.check(LOAD + USE, **bad)
    assert result.lines_with("COUNTS") == ACTIVE
    for name, value in bad.items():
        (line,) = result.lines_with(f"{name}='{value}'")
        assert line.startswith("WARNING ")


def test_the_size_limit_of_the_environment(fresh: FreshProcesses) -> None:
    assert fresh.check(LOAD + USE, OMNI_TENSOR_KEY_MAX_BYTES="24").lines_with("COUNTS") == ACTIVE
    assert fresh.check(LOAD + USE, OMNI_TENSOR_KEY_MAX_BYTES="23").lines_with("COUNTS") == INACTIVE


def test_vllm_plugins_is_an_allow_list(fresh: FreshProcesses) -> None:
    absent = "assert 'omni_tensor_key' not in sys.modules\n"
    assert fresh.check(LOAD + absent + USE, VLLM_PLUGINS="other").lines_with("COUNTS") == INACTIVE
    assert fresh.check(LOAD + USE, VLLM_PLUGINS="other,omni_tensor_key").lines_with("COUNTS") == ACTIVE
