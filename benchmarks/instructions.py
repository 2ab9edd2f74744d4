"""Where the time of a key goes, in instructions, which do not depend on what else the machine does.

The headline call (two CPU tensors [1, 1,024] int64) runs under callgrind, on a build of this checkout with the shipped
optimization and debug information. The counts of each stage are compared with those in instructions.json, by platform:

    python benchmarks/instructions.py            exit code 1 if a stage grew by more than 5 %, 2 if it cannot be told
    python benchmarks/instructions.py --update   write the counts of this platform to instructions.json

Needs valgrind with its headers, a C and a C++ compiler, and an environment with vllm-omni. Valgrind 3.19 has no
AVX-512: the hash then takes the path that the platform's name ends with.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from callgrind_profile import Profile, read_profiles
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
FIGURES = HERE / "instructions.json"
CALLS = 1000  # as in callgrind_driver.py
PHASES = ("build", "build_and_get")
TOLERANCE = 1.05
SLACK = 10  # instructions: five percent of a stage of 100 is no news

# Functions whose calls, with all they call, make up a stage. None calls another overload of its own name.
BUILD_KEY = "otk::py::(anonymous namespace)::build_key("
VIEW_TENSOR = "otk::py::view_tensor("
CONFIRM_TENSOR = "otk::py::confirm_tensor("
WITHOUT_MODES = "otk::py::WithoutModes::WithoutModes("
COPY_AND_HASH = "otk::xxh3::copy_and_hash("
NEW_KEY = "otk::py::new_key("
SEAL = "otk::py::seal(otk::py::KeyObject*, "
DEALLOC = "otk::py::(anonymous namespace)::dealloc("
ALLOCATE_KEY = "otk::py::allocate_key("
FREE_KEY = "otk::py::free_key("
MEANING = {
    "bind": "arguments to parameters, defaults, the walk, the key's tuples",
    "view": "two tensors confirmed and described, with what torch does for it",
    "copy and hash": "both contents into the keys, and their XXH3-128",
    "key object": "two TensorKeys filled in, sealed with their hash() and taken apart",
    "allocation": "their memory, which is that of keys that were dropped before",
    "interpreter": "the call itself, and the key's tuples freed",
    "lookup": "PromptEmbedCache.get(): upstream looks a key up three times, with equality",
}


class CannotTell(Exception):
    """There is nothing to compare; the text says why and what to do."""


def stages(build: Profile, build_and_get: Profile) -> dict[str, float]:
    """Return instructions per call by stage, from what CALLS calls add."""
    key = build.inclusive(BUILD_KEY)
    view = sum(map(build.inclusive, (VIEW_TENSOR, CONFIRM_TENSOR, WITHOUT_MODES)))
    content = build.inclusive(COPY_AND_HASH)
    in_key = build.inclusive(NEW_KEY) + build.inclusive(SEAL)
    freed = build.inclusive(DEALLOC)
    allocation = build.inclusive(ALLOCATE_KEY) + build.inclusive(FREE_KEY)
    counts = {
        "bind": key - view - content - in_key,
        "view": view,
        "copy and hash": content,
        "key object": in_key + freed - allocation,
        "allocation": allocation,
        "interpreter": build.total - key - freed,
        "lookup": build_and_get.total - build.total,
    }
    return {stage: count / CALLS for stage, count in counts.items()}


def measure(scratch: Path) -> tuple[str, dict[str, float]]:
    """Build, run under callgrind, and return the platform's name and the counts."""
    if shutil.which("valgrind") is None:
        raise CannotTell("valgrind is missing (Debian and Ubuntu: `apt-get install valgrind`)")
    package = _build(scratch)
    switch = scratch / "switch.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", switch, HERE / "callgrind_switch.c"], check=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    for name in ("OMNI_TENSOR_KEY_BACKEND", "OMNI_TENSOR_KEY_DEBUG", "OMNI_TENSOR_KEY_MAX_BYTES"):
        environment.pop(name, None)
    command = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={scratch}/out"]
    command += [sys.executable, str(HERE / "callgrind_driver.py"), str(switch)]
    ran = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    about = json.loads(ran.stdout.splitlines()[-1])
    if not Path(about["package"]).is_relative_to(package):
        raise CannotTell(f"the package under test was {about['package']}, not the build of this checkout")
    profiles = read_profiles(scratch)
    build, build_and_get = (profiles[f"{phase} {2 * CALLS}"] - profiles[f"{phase} {CALLS}"] for phase in PHASES)
    compiler = os.environ.get("CXX", "c++")
    version = subprocess.run([compiler, "-dumpfullversion"], check=True, stdout=subprocess.PIPE, text=True).stdout
    try:
        return f"{about['platform']}, {compiler} {version.strip()}", stages(build, build_and_get)
    except KeyError as error:
        raise CannotTell(f"{error.args[0]} The names are in {Path(__file__).name}") from error


def _build(scratch: Path) -> Path:
    """Install a copy of the checkout, compiled as shipped but with debug information; return where."""
    source, target = scratch / "source", scratch / "package"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "docs")
    shutil.copytree(HERE.parent, source, ignore=skipped)
    environment = {**os.environ, "CFLAGS": "-g", "CXXFLAGS": "-g", "OMNI_TENSOR_KEY_CUDA": "0"}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", target, source], env=environment, check=True)
    return target


def compare(counts: dict[str, float], committed: dict[str, float] | None, console: Console) -> list[str]:
    """Print the table and return the stages that grew too much."""
    table = Table()
    for heading in ("stage", "what it is"):
        table.add_column(heading)
    for heading in ("instructions", "committed", "change"):
        table.add_column(heading, justify="right")
    grown = []
    for stage, count in counts.items():
        before = committed.get(stage) if committed else None
        change = "" if before is None else f"{count / before - 1:+.1%}"
        if before is not None and count > max(before * TOLERANCE, before + SLACK):
            grown.append(stage)
            change = f"[red]{change}[/]"
        table.add_row(stage, MEANING[stage], f"{count:,.0f}", "" if before is None else f"{before:,.0f}", change)
    table.add_row("all", "a call that hits, without upstream's wrapper", f"{sum(counts.values()):,.0f}", "", "")
    console.print(table)
    return grown


def main(arguments: list[str]) -> int:
    """Measure, print, compare or update; return the exit code."""
    if arguments not in ([], ["--update"]):
        print("usage: instructions.py [--update]", file=sys.stderr)
        return 2
    figures = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            platform, counts = measure(Path(scratch))
    except (CannotTell, subprocess.CalledProcessError) as error:
        print(f"Nothing to compare: {error}.", file=sys.stderr)
        return 2
    console = Console()
    console.print(f"One key of two CPU tensors \\[1, 1,024] int64, and its lookup, on {platform}", highlight=False)
    grown = compare(counts, figures.get(platform), console)
    if arguments:
        figures[platform] = {stage: round(count, 1) for stage, count in counts.items()}
        FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        console.print(f"Wrote {FIGURES.relative_to(HERE.parent)}.", highlight=False)
        return 0
    if platform not in figures:
        print(f"{FIGURES.name} has no counts for this platform: add them with --update.", file=sys.stderr)
        return 2
    if grown:
        print(f"Grew by more than 5 %: {', '.join(grown)}. If it is meant to, renew with --update.", file=sys.stderr)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
