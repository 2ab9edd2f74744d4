"""Build what run.py takes along to a machine with a GPU: .gpu/ with two programs, a library and wheels.

    python benchmarks/gpu/build.py [--arch sm_90] [--python 3.12]

The machine need not have nvcc, this package's dependencies or internet access.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / ".gpu"
CSRC = ROOT / "csrc"
HASH = CSRC / "hash"
DEPENDENCIES = ["wrapt"]  # what the wheel needs beside torch


def nvcc_found() -> str:
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if found is None:
        raise SystemExit("benchmarks/gpu/build.py needs nvcc, which is neither on PATH nor in /usr/local/cuda/bin.")
    return found


def build_programs(arch: str) -> None:
    sources = [*(CSRC / "cuda").glob("*.cpp"), *(CSRC / "cuda").glob("*.cu"), *HASH.glob("xxh3*.cpp")]
    flags = ["-std=c++17", "-O3", f"-arch={arch}", "-lineinfo", f"-I{CSRC}", "-ldl"]
    programs = {
        "gpu_check": Path(__file__).with_name("check.cpp"),
        "latency": Path(__file__).with_name("latency.cu"),
    }
    for name, source in programs.items():
        subprocess.run([nvcc_found(), *flags, "-o", BUILT / name, source, *sources], check=True)
    floor = Path(__file__).with_name("floor.cu")
    shared = ["-O2", f"-arch={arch}", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run([nvcc_found(), *shared, "-o", BUILT / "floor.so", floor], check=True)


def build_wheels(python: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    environment = os.environ | {"OMNI_TENSOR_KEY_CUDA": "1"}
    subprocess.run([*pip, "wheel", "--no-deps", "-w", BUILT, ROOT], check=True, env=environment)
    for version in {python, f"{sys.version_info.major}.{sys.version_info.minor}"}:  # there, and in a dry run here
        target = ["--only-binary=:all:", "--python-version", version, "--no-deps", "-d", BUILT]
        subprocess.run([*pip, "download", *target, *DEPENDENCIES], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default="sm_90", help="of the GPU; sm_90, an H100 or H200, is the default")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python; 3.12 is the default")
    arguments = parser.parse_args()
    BUILT.mkdir(exist_ok=True)
    for path in filter(Path.is_file, BUILT.iterdir()):  # run.py's results are in a folder
        path.unlink()
    build_programs(arguments.arch)
    build_wheels(arguments.python)
    for path in sorted(filter(Path.is_file, BUILT.iterdir())):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
