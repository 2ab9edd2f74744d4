"""The commands in the documents: each line of a block marked `sh` is run, or known to be run elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .planted import run_command

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What CI, or the installation of the environment that these tests run in, does with every change.
ELSEWHERE = ("pip install .",)


def commands() -> Iterator[tuple[str, str]]:
    """Every command, with the name of the document."""
    for document in DOCUMENTS:
        for block in re.findall(r"^```sh\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip():
                    yield document.name, line.strip()


def runnable() -> list[str]:
    """The commands that this test runs, each once."""
    found = [line for _, line in commands() if not line.startswith((*ELSEWHERE, "make ", "export "))]
    return list(dict.fromkeys(found))


def test_there_are_commands() -> None:
    assert {name for name, _ in commands()} >= {"README.md", "troubleshooting.md"}
    assert runnable()


@pytest.mark.parametrize("line", runnable())
def test_a_command(line: str, tmp_path: Path) -> None:
    command, _, comment = line.partition("#")
    expected = re.search(r"exit code (\d+)", comment)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    done = run_command(["sh", "-c", command], tmp_path)
    assert done.returncode == (int(expected[1]) if expected else 0), done.stdout + done.stderr


def test_every_make_target_exists() -> None:
    targets = {line.split("#")[0].split()[1] for _, line in commands() if line.startswith("make ")}
    assert targets
    for target in sorted(targets):
        dry = subprocess.run(
            ["make", "-n", target, f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert dry.returncode == 0, dry.stderr


def test_every_variable_is_read_somewhere() -> None:
    sources = [*(ROOT / "omni_tensor_key").rglob("*.py"), ROOT / "setup.py"]
    code = "".join(path.read_text() for path in sources)
    exports = {line.split()[1].partition("=")[0] for _, line in commands() if line.startswith("export ")}
    named = set(re.findall(r"\bOMNI_TENSOR_KEY\w*", "".join(path.read_text() for path in DOCUMENTS)))
    upstreams = {name for name in exports if name.startswith("OMNI_DIFFUSION_PROMPT_EMBED_CACHE")}
    missing = [name for name in (exports | named) - upstreams if not re.search(rf"\b{name}\b", code)]
    # Read by the tests alone.
    assert [name for name in missing if not name.startswith("OMNI_TENSOR_KEY_TEST_")] == []


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_pages_are_short() -> None:
    pages = [document for document in DOCUMENTS if document.parent.name == "docs"]
    assert len(pages) <= 8
    assert {page.name: count for page in pages if (count := len(page.read_text().splitlines())) >= 80} == {}


def test_every_link_leads_somewhere() -> None:
    dead = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            there = (document.parent / path) if path else document
            if not there.exists() or (anchor and anchor not in anchors(there)):
                dead.append(f"{document.name}: {target}")
    assert dead == []
