"""Throw-away environments for the scripts here, made from the one that runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = next(
    line.removeprefix("torch==").strip()
    for line in (ROOT / "requirements" / "vllm-omni-0.30-cpu.txt").read_text().splitlines()
    if line.startswith("torch==")
)


def run(command: list[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout with the given variables and none of this project's; its output is returned."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMNI_", "PYTHON"))}
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def check(command: list[str | Path], **variables: str) -> str:
    """`run`, and the command must succeed."""
    done = run(command, **variables)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


class Venv:
    """An environment of its own in `folder`."""

    def __init__(self, folder: Path, interpreter: str = sys.executable) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        check([interpreter, "-m", "venv", folder])

    @property
    def _site_packages(self) -> Path:
        return next(self.folder.glob("lib/python3.*/site-packages"))

    def borrow(self, *without: str) -> None:
        """Let it import what the environment that runs this script has, but for these packages."""
        left_out = (*(name.replace("-", "_") for name in without), "pip", "__pycache__")
        # Up to CPython 3.11 an environment begins with an old one, which would hide the borrowed one.
        check([self.python, "-m", "pip", "uninstall", "-q", "-y", "setuptools"])
        borrowed = self.folder / "borrowed"
        borrowed.mkdir()
        for place in (Path(entry) for entry in sys.path if Path(entry).name == "site-packages"):
            for item in place.iterdir():
                link = borrowed / item.name
                if not item.name.startswith(left_out) and not link.is_symlink():
                    link.symlink_to(item)
        # After its own packages.
        (self._site_packages / "borrowed.pth").write_text(f"{borrowed}\n")

    def pip_install(self, *arguments: str | Path, **variables: str) -> None:
        check([self.python, "-m", "pip", "install", "-q", "--no-compile", *arguments], **variables)

    def pip_install_torch(self, version: str) -> str:
        """Install the CPU build where pip finds one, or else the default build. Returns which it is."""
        cpu = [self.python, "-m", "pip", "install", "-q", "--no-compile", f"torch=={version}+cpu"]
        if run(cpu).returncode != 0:
            self.pip_install(f"torch=={version}")
        return self.version("torch")

    def version(self, distribution: str) -> str:
        return check([self.python, "-c", f"import importlib.metadata as m; print(m.version({distribution!r}))"]).strip()


def pytest(python: Path, *arguments: str, **variables: str) -> tuple[bool, str]:
    """Run tests of the checkout. Returns whether they passed, and pytest's last line or, if they failed, its output."""
    done = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], **variables)
    passed = done.returncode == 0
    return passed, done.stdout.strip().splitlines()[-1].strip("= ") if passed else done.stdout


def table(headings: list[str], rows: list[list[str]]) -> str:
    """The rows as a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
