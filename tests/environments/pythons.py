"""Install the one wheel in dist/ into each CPython named on the command line, and run the tests of keys there."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from venvs import ROOT, TORCH, Venv, pytest, table

HEADINGS = ["CPython", "torch", "tests/keys"]


def release_of(interpreter: str) -> str | None:
    """The interpreter's full version, or None if it cannot be run."""
    try:
        command = [interpreter, "-c", "import platform; print(platform.python_version())"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def test(interpreter: str, wheel: Path) -> tuple[bool, list[str]]:
    """Whether the tests passed, and the interpreter's row."""
    release = release_of(interpreter)
    if release is None:
        return True, [interpreter, "", "skipped: it cannot be run"]
    with tempfile.TemporaryDirectory() as folder:
        venv = Venv(Path(folder), interpreter)
        torch = venv.pip_install_torch(TORCH)
        venv.pip_install("--no-deps", "-r", ROOT / "requirements" / "dev.txt")
        venv.pip_install("--no-deps", wheel)
        passed, summary = pytest(venv.python, "tests/keys")
    if not passed:
        print(summary, file=sys.stderr)
        summary = f"FAILED: {summary.splitlines()[-1]}"
    return passed, [release, torch, summary]


def main() -> None:
    wheels = list((ROOT / "dist").glob(f"*manylinux_2_28_{platform.machine()}.whl"))
    if len(wheels) != 1:
        raise SystemExit("There is no wheel in dist/: run `make dist` first.")
    results = [test(interpreter, wheels[0]) for interpreter in sys.argv[1:]]
    print(f"{wheels[0].name}\n\n{table(HEADINGS, [row for _, row in results])}")
    raise SystemExit(not all(passed for passed, _ in results))


if __name__ == "__main__":
    main()
