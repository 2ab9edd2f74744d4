"""Whatever is missing or broken, the process goes on, and one line says what it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .fresh_process import FreshProcesses
from .test_processes import ACTIVE, INACTIVE, LOAD, USE

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

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
    "the contract": "import omni_tensor_key.upstream.prompt_cache as c\nc.check_tensors = lambda *_: 1 / 0\n",
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


NO_CUDA = """
import torch
def never(*args):
    raise AssertionError("CUDA was initialized")
torch.cuda._lazy_init = torch._C._cuda_init = never
"""
STILL_NONE = """
assert not torch.cuda.is_initialized()
assert "libcuda.so" not in open("/proc/self/maps").read()
"""


def test_cuda_is_not_touched(fresh: FreshProcesses) -> None:
    """Or a process that is forked later could not use it."""
    assert fresh.check(NO_CUDA + LOAD + USE + STILL_NONE).lines_with("COUNTS") == ACTIVE
