"""Activation as vLLM-Omni does it: an entry point that is called early in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fresh_process import FreshProcesses

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

LOAD = """
import sys, torch
def never(*args):
    raise AssertionError("CUDA was initialized")
torch.cuda._lazy_init = torch._C._cuda_init = never
from vllm_omni.plugins import load_omni_general_plugins
before = set(sys.modules)
for _ in range(2):
    load_omni_general_plugins()
added = set(sys.modules) - before
assert not [name for name in added if name.startswith("vllm_omni.diffusion")], added
"""
USE = """
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

class Pipeline:
    def encode_prompt(self, prompt_ids, attention_mask=None):
        return torch.as_tensor(prompt_ids) * 2

pipeline = Pipeline()
cache = upstream.install_prompt_embed_cache(pipeline)
for _ in range(3):
    assert pipeline.encode_prompt(torch.arange(3)).tolist() == [0, 2, 4]
    assert pipeline.encode_prompt([0, 1, 2]).tolist() == [0, 2, 4]
found = cache.stats()
print("COUNTS", found["hits"], found["misses"], found["bypassed"])
assert not torch.cuda.is_initialized()
assert "libcuda.so" not in open("/proc/self/maps").read()
"""
ACTIVE, INACTIVE = ["COUNTS 4 2 0"], ["COUNTS 2 1 3"]
OFF = "assert not __import__('omni_tensor_key').is_active()\n"


def test_a_new_interpreter(tmp_path: Path) -> None:
    """Nothing imported and nothing forked; the entry point is loaded twice and imports no part of the engine."""
    code = LOAD + "import omni_tensor_key\nassert not omni_tensor_key.is_active()\n" + USE
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMNI_", "VLLM_"))}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ACTIVE[0] in ran.stdout


def test_before_and_after_the_import_of_the_cache(fresh: FreshProcesses) -> None:
    for code in (LOAD + USE, "import torch\nimport vllm_omni.diffusion.cache\n" + LOAD + USE):
        result = fresh.check(code)
        assert result.lines_with("COUNTS") == ACTIVE
        (line,) = result.lines_with("is active")
        assert line.startswith("INFO ")  # vLLM's format
        assert "WARNING" not in result.output


def test_switched_off_by_the_environment(fresh: FreshProcesses) -> None:
    for value in ("0", "false"):
        explicit = "import omni_tensor_key\nomni_tensor_key.activate()\n" + OFF
        result = fresh.check(LOAD + explicit + USE + OFF, OMNI_TENSOR_KEY=value)
        assert result.lines_with("COUNTS") == INACTIVE


def test_bad_values_in_the_environment_are_warned_of_once(fresh: FreshProcesses) -> None:
    bad = {
        "OMNI_TENSOR_KEY": "maybe",
        "OMNI_TENSOR_KEY_MAX_BYTES": "1_000",
        "OMNI_TENSOR_KEY_VERIFY": "2",
        "OMNI_TENSOR_KEY_CACHE_BYTES": "-1",
    }
    result = fresh.check(LOAD + USE, **bad)
    assert result.lines_with("COUNTS") == ACTIVE
    for name, value in bad.items():
        (line,) = result.lines_with(f"{name}='{value}'")
        assert line.startswith("WARNING ")
        assert "using " in line


def test_the_size_limit_of_the_environment(fresh: FreshProcesses) -> None:
    assert fresh.check(LOAD + USE, OMNI_TENSOR_KEY_MAX_BYTES="24").lines_with("COUNTS") == ACTIVE
    assert fresh.check(LOAD + USE, OMNI_TENSOR_KEY_MAX_BYTES="23").lines_with("COUNTS") == INACTIVE


def test_vllm_plugins_is_an_allow_list(fresh: FreshProcesses) -> None:
    absent = "assert 'omni_tensor_key' not in sys.modules\n"
    assert fresh.check(LOAD + absent + USE, VLLM_PLUGINS="other").lines_with("COUNTS") == INACTIVE
    assert fresh.check(LOAD + USE, VLLM_PLUGINS="other,omni_tensor_key").lines_with("COUNTS") == ACTIVE


THREADS = """
import threading, torch
from omni_tensor_key.plugin import register

barrier = threading.Barrier(9)

def at_once(action):
    barrier.wait()
    action()

def load():
    import vllm_omni.diffusion.cache

threads = [threading.Thread(target=at_once, args=(action,)) for action in [register] * 8 + [load]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_many_threads_register_while_another_imports(fresh: FreshProcesses) -> None:
    result = fresh.check(THREADS + USE)
    assert result.lines_with("COUNTS") == ACTIVE
    assert len(result.lines_with("is active")) == 1


BROKEN = {
    "the hook": "import wrapt\nwrapt.register_post_import_hook = lambda *_: 1 / 0\n",
    "the search": "import importlib.util as u\nu.find_spec = lambda *a: 1 / 0\n",
    "the contract": "import omni_tensor_key.upstream.contract as c\nc.check_contract = lambda *_: 1 / 0\n",
    "the builder": "import omni_tensor_key.keys as k\nk.make_key_builder = lambda **_: 1 / 0\n",
    "the extension": "import sys\nsys.modules['omni_tensor_key._core'] = None\n",
    "wrapt": "import sys\nsys.modules['wrapt'] = None\n",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_nothing_that_breaks_here_stops_the_process(fresh: FreshProcesses, broken: str) -> None:
    result = fresh.check(broken + LOAD + USE)
    assert result.lines_with("COUNTS") == INACTIVE
    assert result.lines_with("omni_tensor_key"), "nothing was said"


REGISTER = """
import sys
sys.path[:0] = sys.argv[1:]
from omni_tensor_key.plugin import is_active, register
for _ in range(3):
    register()
assert not is_active()
assert "vllm_omni" not in sys.modules
"""


def test_a_release_without_the_cache(tmp_path: Path, run_python: RunPython) -> None:
    metadata = tmp_path / "old" / "vllm_omni-0.20.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.20.0\n")
    for name in ("", "diffusion", "diffusion/cache"):
        (tmp_path / "old" / "vllm_omni" / name).mkdir()
        (tmp_path / "old" / "vllm_omni" / name / "__init__.py").touch()
    ran = run_python(REGISTER, str(tmp_path / "old"))
    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stderr.splitlines()
    assert "vllm-omni 0.20.0" in line
    assert "diffusion/cache/prompt_embed_cache.py" in line


def test_no_vllm_omni(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for folder in [Path(entry) for entry in sys.path if list(Path(entry).glob("*.dist-info"))]:
        for entry in folder.iterdir():
            if not entry.name.startswith(("vllm_omni", "__pycache__")) and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    code = f"import sys; sys.path.append({str(site)!r})\n" + REGISTER
    command = [sys.executable, "-I", "-S", "-c", code]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stderr.splitlines()
    assert "not installed" in line
