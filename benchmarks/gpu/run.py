"""All checks and measurements on a GPU, in under 8 minutes: `make gpu`.

    python benchmarks/gpu/run.py [--out FOLDER] [--limit SECONDS]

It needs what build.py has made, and of the machine Python with torch, numpy, pytest and xxhash, and CUDA's
compute-sanitizer. Everything that is printed is kept in FOLDER/log.txt. Without a GPU each step is tried as far as it
goes (a dry run), and the exit code is 3 where all of them went that far.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / ".gpu"
TESTS = ["-m", "pytest", "-m", "cuda", "tests/cuda", "-p", "no:cacheprovider"]
SOME = "dtypes or layouts or capture or queued"  # what depends on where torch's allocator puts tensors
DRY = 3


@dataclass
class Step:
    """A command, and what a dry run does instead: another command, which may end with a code of its own."""

    name: str
    seconds: int  # at most
    command: list[str]
    dry: list[str]
    dry_code: int = 0
    lines: int = 3  # of the end of its output, to print
    environment: dict[str, str] = field(default_factory=dict)
    check: Callable[[str], str | None] = lambda output: None  # what is wrong with the output of a run on a GPU


def ran_on_a_gpu(report: Path) -> Callable[[str], str | None]:
    """Tests that were skipped are no run on a GPU, but for those that need two, or vllm-omni."""

    def check(output: str) -> str | None:
        cases = list(ET.parse(report).iter("testcase"))
        skipped = [case.find("skipped") for case in cases]
        others = [s for s in skipped if s is not None and not re.search("one GPU only|vllm_omni", s.get("message", ""))]
        if not cases or len(cases) == len(list(filter(None, skipped))):
            return "no test ran"
        return f"{len(others)} tests were skipped: {others[0].get('message')}" if others else None

    return check


def steps(site: Path, out: Path) -> list[Step]:
    python = sys.executable
    version = [python, "--version"]
    program = str(BUILT / "gpu_check")
    install = [python, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(BUILT), "--no-deps"]
    install += ["--no-compile", "--target", str(site), "omni-tensor-key", "wrapt"]
    loaded = (
        "from omni_tensor_key import _core; print(_core.__file__, _core.CUDA_BUILD); assert 'sm_' in _core.CUDA_BUILD"
    )
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", "--tool"]
    collect = [python, *TESTS, "--collect-only", "-q"]
    report = out / "tests.xml"

    def sanitized(tool: str, seconds: int) -> Step:
        return Step(tool, seconds, [*sanitizer, tool, program], [program], 2)

    def with_allocator(setting: str) -> Step:
        allocator = {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting, "OMNI_TENSOR_KEY_GPU": "1"}
        return Step(setting, 60, [python, *TESTS, "-q", "-k", SOME], [*collect, "-k", SOME], environment=allocator)

    return [
        Step("machine", 30, ["sh", "-c", "nvidia-smi; nvcc --version; lscpu | head -20"], version, lines=12),
        Step("correct", 40, [program], [program], 2),
        Step("latency", 60, [str(BUILT / "latency")], [str(BUILT / "latency")], 2, lines=25),
        Step("install", 60, install, install),
        Step("first use", 60, [python, "-P", "benchmarks/gpu/first_use.py"], [python, "-P", "-c", loaded]),
        Step(
            "benchmark", 120, [python, "-P", "benchmarks/cuda_key.py", "--json", str(out / "cuda_key.json")],
            [python, "-P", "benchmarks/cuda_key.py", "--help"], lines=40,
        ),
        sanitized("memcheck", 60),
        sanitized("racecheck", 90),
        sanitized("synccheck", 60),
        Step(
            "tests", 150, [python, *TESTS, "-v", "-rsfE", f"--junitxml={report}"], collect, lines=30,
            environment={"OMNI_TENSOR_KEY_GPU": "1"}, check=ran_on_a_gpu(report),
        ),
        with_allocator("expandable_segments:True"),
        with_allocator("backend:cudaMallocAsync"),
    ]  # fmt: skip


def has_gpu() -> bool:
    smi = shutil.which("nvidia-smi")
    return (
        smi is not None and "GPU 0" in subprocess.run([smi, "-L"], capture_output=True, text=True, check=False).stdout
    )


def run(step: Step, dry: bool, environment: dict[str, str], seconds: float, log: Path) -> str | None:
    """What went wrong, or None."""
    command = step.dry if dry else step.command
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment | step.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=min(step.seconds, seconds), text=True, errors="replace", check=False,
        )  # fmt: skip
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output, code = (error.stdout or b"").decode(errors="replace"), -1
    except OSError as error:
        output, code = f"{error}\n", -1
    wrong = None if code == (step.dry_code if dry else 0) else f"ended with {code}" if code >= 0 else "did not end"
    if wrong is None and not dry:
        wrong = step.check(output)
    headline = f"== {step.name}: {wrong or 'right'}, {time.monotonic() - begin:.0f} s"
    with log.open("a") as file:
        file.write(f"{headline}\n{' '.join(command)}\n{output}\n")
    print(headline, *output.splitlines()[-step.lines :], sep="\n", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu" / "out", help="folder for the log and the figures")
    parser.add_argument("--limit", type=int, default=470, help="seconds for all steps together; 470 is the default")
    arguments = parser.parse_args()
    if not (BUILT / "gpu_check").exists():
        raise SystemExit("First build what this script runs, on a machine with nvcc: python benchmarks/gpu/build.py")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    log.unlink(missing_ok=True)
    dry = not has_gpu()
    if dry:
        print("There is no GPU: a dry run, in which every step is tried as far as it goes.")
    end = time.monotonic() + arguments.limit
    wrong = {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"))
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONUNBUFFERED": "1", "PATH": path}
        for step in steps(Path(folder), out):
            left = end - time.monotonic()
            if left < 10:
                wrong[step.name] = "no time was left"
            elif found := run(step, dry, environment, left, log):
                wrong[step.name] = found
    for name, text in wrong.items():
        print(f"{name}: {text}")
    print(f"{len(wrong)} steps went wrong; the log is {log}")
    return 1 if wrong else DRY if dry else 0


if __name__ == "__main__":
    sys.exit(main())
