"""Activation as vLLM-Omni does it: an entry point that is called early in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
    bad = {"OMNI_TENSOR_KEY": "maybe", "OMNI_TENSOR_KEY_MAX_BYTES": "abc", "OMNI_TENSOR_KEY_BACKEND": "gpu"}
    result = fresh.check(LOAD + USE, **bad)
    assert result.lines_with("COUNTS") == ACTIVE
    for name, value in bad.items():
        (line,) = result.lines_with(f"{name}='{value}'")
        assert line.startswith("WARNING ")


def test_the_size_limit_of_the_environment(fresh: FreshProcesses) -> None:
    assert fresh.check(LOAD + USE, OMNI_TENSOR_KEY_MAX_BYTES="24").lines_with("COUNTS") == ACTIVE
    assert fresh.check(LOAD + USE, OMNI_TENSOR_KEY_MAX_BYTES="23").lines_with("COUNTS") == INACTIVE


def test_the_reference_backend(fresh: FreshProcesses) -> None:
    result = fresh.check(LOAD + USE, OMNI_TENSOR_KEY_BACKEND="reference")
    assert result.lines_with("COUNTS") == ACTIVE
    assert len(result.lines_with("reference backend")) == 1


def test_vllm_plugins_is_an_allow_list(fresh: FreshProcesses) -> None:
    absent = "assert 'omni_tensor_key' not in sys.modules\n"
    assert fresh.check(LOAD + absent + USE, VLLM_PLUGINS="other").lines_with("COUNTS") == INACTIVE
    assert fresh.check(LOAD + USE, VLLM_PLUGINS="other,omni_tensor_key").lines_with("COUNTS") == ACTIVE


def test_many_threads_register_while_another_imports(fresh: FreshProcesses) -> None:
    threads = """
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
    result = fresh.check(threads + USE)
    assert result.lines_with("COUNTS") == ACTIVE
    assert len(result.lines_with("is active")) == 1


BROKEN = {
    "the hook": "import wrapt\nwrapt.register_post_import_hook = lambda *_: 1 / 0\n",
    "the search": "import importlib.util as u\nreal = u.find_spec\nu.find_spec = lambda *a: 1 / 0\n",
    "the contract": "import omni_tensor_key.contract as c\nc.check_contract = lambda *_: 1 / 0\n",
    "the builder": "import omni_tensor_key.backend as b\nb.KeyBuilder = lambda *_: 1 / 0\n",
    "the extension": "import sys\nsys.modules['omni_tensor_key._core'] = None\n",
    "wrapt": "import sys\nsys.modules['wrapt'] = None\n",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_nothing_that_breaks_here_stops_the_process(fresh: FreshProcesses, broken: str) -> None:
    result = fresh.check(broken + LOAD + USE)
    assert result.lines_with("COUNTS") == INACTIVE
    assert result.lines_with("omni_tensor_key"), "nothing was said"


def folder_with(folder: Path, version: str, files: list[str]) -> Path:
    """A folder with a package vllm_omni of these files, and its metadata."""
    metadata = folder / f"vllm_omni-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm-omni\nVersion: {version}\n")
    for name in files:
        path = folder / "vllm_omni" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


FORK = """
import os, signal, threading
import torch, omni_tensor_key
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

names = ["_hashable", "_build_key", "install_prompt_embed_cache"]
theirs = [getattr(upstream, name) for name in names]
omni_tensor_key.activate()  # imports everything: a fork while a thread imports leaves locks of Python's own taken
omni_tensor_key.deactivate()
stop = threading.Event()

def switch():
    while not stop.wait(0.001):
        omni_tensor_key.activate()
        omni_tensor_key.deactivate()

switching = threading.Thread(target=switch)
switching.start()
failed = 0
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for a lock
        replaced = [getattr(upstream, name) is not function for name, function in zip(names, theirs)]
        whole = replaced == [omni_tensor_key.is_active()] * len(names)
        omni_tensor_key.activate()
        os._exit(not (whole and omni_tensor_key.is_active()))
    failed += os.waitpid(child, 0)[1] != 0
    if failed:
        break
stop.set()
switching.join()
assert not failed
"""


def test_forks_while_another_thread_switches(fresh: FreshProcesses) -> None:
    fresh.check(FORK)


FORK_EARLY = """
import os, signal, threading
import torch
from omni_tensor_key import plugin
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream

check, begun, forked = plugin._check_presence, threading.Event(), threading.Event()

def wait():
    begun.set()
    forked.wait()

plugin._check_presence = wait
first = threading.Thread(target=plugin.activate)
first.start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    plugin._check_presence = check
    plugin.activate()
    os._exit(not plugin.is_active())
forked.set()
first.join()
assert os.waitpid(child, 0)[1] == 0
assert plugin.is_active()
"""


def test_a_fork_in_the_middle_of_the_first_activation(fresh: FreshProcesses) -> None:
    fresh.check(FORK_EARLY)


REGISTER = """
import sys
sys.path[:0] = sys.argv[1:]
from omni_tensor_key.plugin import is_active, register
for _ in range(3):
    register()
assert not is_active()
assert "vllm_omni" not in sys.modules
"""


def test_a_release_without_the_cache(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    files = ["__init__.py", "diffusion/__init__.py", "diffusion/cache/__init__.py"]
    old = folder_with(tmp_path / "old", "0.20.0", files)
    ran = run_python(REGISTER, str(old))
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
    assert "omni_tensor_key" in line
    assert "not installed" in line
