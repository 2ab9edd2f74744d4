"""Build of the native core; all metadata is in pyproject.toml.

OMNI_TENSOR_KEY_CUDA says whether the CUDA unit is built: `auto` (the default) where nvcc is found, `1` always, `0`
never. nvcc is looked for on PATH, in CUDA_HOME and in /usr/local/cuda.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError, PlatformError

LIMITED_API = 0x030A0000  # CPython 3.10: must agree with the wheel tag below
FLAGS = ["-std=c++17", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"]
CUDA = Path("csrc", "cuda")
OLDEST_GPU = 75  # Turing


def find_nvcc() -> str | None:
    """The nvcc to build the CUDA unit with, or None for a build without it."""
    wanted = os.environ.get("OMNI_TENSOR_KEY_CUDA") or "auto"
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"OMNI_TENSOR_KEY_CUDA={wanted!r} is none of auto, 0 and 1.")
    if wanted == "0":
        return None
    homes = [home for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(f"{home}/bin" for home in homes))
    if nvcc is None and wanted == "1":
        raise SystemExit(
            "OMNI_TENSOR_KEY_CUDA=1 needs nvcc, which is neither on PATH nor in CUDA_HOME or /usr/local/cuda: install "
            "NVIDIA's CUDA toolkit, or build without the CUDA unit with OMNI_TENSOR_KEY_CUDA=0."
        )
    return nvcc


def run_nvcc(nvcc: str, *args: str) -> str:
    """Run nvcc and return what it printed, on either stream."""
    done = subprocess.run([nvcc, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return done.stdout
    print(done.stdout)
    raise SystemExit(
        f"omni_tensor_key's CUDA unit could not be built: {shlex.join([nvcc, *args])} ended with {done.returncode}; "
        "its messages are above. OMNI_TENSOR_KEY_CUDA=0 builds without the unit; NVCC_CCBIN names another host "
        "compiler."
    )


def gpu_targets(nvcc: str) -> tuple[list[int], int]:
    """The architectures to build machine code for, and the one to build PTX for, which runs on any newer GPU.

    Machine code for one architecture runs on the later ones of the same major version.
    """
    known = sorted(int(number) for number in re.findall(r"\bsm_(\d+)\b", run_nvcc(nvcc, "--list-gpu-code")))
    first_of_major = {number // 10: number for number in reversed(known) if number >= OLDEST_GPU}
    if not first_of_major:
        raise SystemExit(f"{nvcc} knows no GPU of sm_{OLDEST_GPU} or newer: use a newer one.")
    return sorted(first_of_major.values()), known[-1]


def build_cuda(nvcc: str, folder: Path) -> tuple[list[str], list[str], str]:
    """Compile the CUDA unit. Returns the objects, the folders with the CUDA libraries, and what was built in words."""
    codes, ptx = gpu_targets(nvcc)
    targets = [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]
    targets.append(f"-gencode=arch=compute_{ptx},code=compute_{ptx}")
    host = ",".join(["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"])
    strict = []
    if "-Werror" in shlex.split(os.environ.get("CFLAGS", "")):
        strict = ["-Werror", "all-warnings", "-Xcompiler", "-Werror"]
    folder.mkdir(parents=True, exist_ok=True)
    objects = []
    for source in sorted([*CUDA.glob("*.cpp"), *CUDA.glob("*.cu")]):
        objects.append(str(folder / f"{source.name}.o"))
        options = ["-std=c++17", "-O3", "--threads", "0", *targets, "-Xcompiler", host, *strict]
        run_nvcc(nvcc, *options, "-c", str(source), "-o", objects[-1])
    # Where the toolkit keeps its libraries differs between its packagings; nvcc knows.
    linking = run_nvcc(nvcc, "--dryrun", "-cudart", "static", "-o", str(folder / "unused"), objects[0])
    line = next((line for line in linking.splitlines() if "LIBRARIES=" in line), "")
    libraries = re.findall(r'-L"?([^" ]+)', line)
    version = re.search(r"release \S+, V(\S+)", run_nvcc(nvcc, "--version"))
    built = " ".join(f"sm_{code}" for code in codes)
    return objects, libraries, f"nvcc {version[1] if version else 'of unknown version'}: {built} compute_{ptx}"


class BuildCore(build_ext):
    """`build_ext` that adds the CUDA unit, and that says what to install when there is no C++ compiler."""

    def build_extension(self, ext: Extension) -> None:
        # What an earlier build left may have been made with another OMNI_TENSOR_KEY_CUDA.
        self.force = True
        advice = ""
        if nvcc := find_nvcc():
            ext.extra_objects, ext.library_dirs, built = build_cuda(nvcc, Path(self.build_temp, CUDA))
            # The runtime is linked statically, so that the module loads on machines without CUDA.
            ext.libraries = ["cudart_static", "rt", "pthread", "dl"]
            ext.extra_link_args = ["-Wl,--exclude-libs,ALL"]  # the runtime is for this module alone
            ext.define_macros.append(("OTK_CUDA_BUILD", f'"{built}"'))
            print(f"omni_tensor_key: the CUDA unit is built ({built})")
            advice = " OMNI_TENSOR_KEY_CUDA=0 builds without the CUDA unit and its libraries."
        else:
            print("omni_tensor_key: the CUDA unit is left out")
        try:
            super().build_extension(ext)
        except (CompileError, LinkError, PlatformError) as error:
            raise SystemExit(
                "omni_tensor_key could not be compiled: install a C++17 compiler (Debian and Ubuntu: "
                f"`apt-get install g++`), or set CXX to one.{advice} The compiler step said: {error}"
            ) from None


if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        "omni_tensor_key uses CPython's stable ABI, which free-threaded builds do not have: use a default build."
    )

core = Extension(
    "omni_tensor_key._core",
    sources=sorted(str(path) for path in Path("csrc").rglob("*.cpp") if CUDA not in path.parents),
    depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
    define_macros=[("Py_LIMITED_API", hex(LIMITED_API))],
    extra_compile_args=FLAGS,
    py_limited_api=True,
    language="c++",
)

setup(
    ext_modules=[core],
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
