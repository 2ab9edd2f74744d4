"""Installations with a fault: folders that stand first on PYTHONPATH, made of what is really installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

Edit = Callable[[str], str]


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def copy_of_this_package(place: Path) -> tuple[Path, Path]:
    """Copy this package and its metadata to `place`. Returns the two folders."""
    package = Path(shutil.copytree(folder_of("omni_tensor_key"), place / "omni_tensor_key"))
    for name in ("METADATA", "entry_points.txt"):
        text = distribution("omni-tensor-key").read_text(name)
        assert text
        metadata(place, "omni_tensor_key", "0.1.0", **{name: text})
    return package, place / "omni_tensor_key-0.1.0.dist-info"


def metadata(place: Path, name: str, release: str, **files: str) -> Path:
    """Make a dist-info folder with these files and, unless it is given, a short METADATA."""
    folder = place / f"{name}-{release}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    files.setdefault("METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {release}\n")
    for file, text in files.items():
        (folder / file).write_text(text)
    return folder


def vllm_omni_with(place: Path, cache_module: Edit | None) -> None:
    """Mirror the installed vllm_omni in `place`, its cache module edited, or left out for None."""
    inside = Path("diffusion", "cache", "prompt_embed_cache.py")
    real, mirror = folder_of("vllm_omni"), place / "vllm_omni"
    for part in (Path(), *reversed(inside.parents[:-1])):  # the folders that cannot be links
        (mirror / part).mkdir(parents=True)
        for item in (real / part).iterdir():
            if item.name != "__pycache__" and item.relative_to(real) not in (inside, *inside.parents):
                (mirror / part / item.name).symlink_to(item)
    if cache_module is not None:
        (mirror / inside).write_text(cache_module((real / inside).read_text()))


def replaced(old: str, new: str) -> Edit:
    """An edit of the one place where `old` stands."""

    def edit(text: str) -> str:
        assert text.count(old) == 1, f"{text.count(old)} times {old!r}"
        return text.replace(old, new)

    return edit


def run_command(
    command: list[str], cwd: Path, first_on_path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout, with none of the variables that it is about but the given ones."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMNI_", "VLLM_", "PYTHON"))
    }
    if first_on_path is not None:
        environment["PYTHONPATH"] = str(first_on_path)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    return subprocess.run(
        command, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=600, check=False
    )
