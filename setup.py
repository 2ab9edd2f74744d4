"""Build of the native core; all metadata is in pyproject.toml."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError, PlatformError

LIMITED_API = 0x030A0000  # CPython 3.10: must agree with the wheel tag below


class BuildCore(build_ext):
    """`build_ext` that says what to install when there is no C++ compiler."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, LinkError, PlatformError) as error:
            raise SystemExit(
                "omni_tensor_key could not be compiled: install a C++17 compiler (Debian and Ubuntu: "
                f"`apt-get install g++`), or set CXX to one. The compiler step said: {error}"
            ) from None


if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        "omni_tensor_key uses CPython's stable ABI, which free-threaded builds do not have: use a default build."
    )

core = Extension(
    "omni_tensor_key._core",
    sources=sorted(str(path) for path in Path("csrc").rglob("*.cpp")),
    depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
    define_macros=[("Py_LIMITED_API", hex(LIMITED_API))],
    extra_compile_args=["-std=c++17", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
    py_limited_api=True,
    language="c++",
)

setup(
    ext_modules=[core],
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
