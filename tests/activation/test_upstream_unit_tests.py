"""Upstream's own unit tests for the cache, where a copy of them is at hand: OMNI_UPSTREAM_TESTS names the file.

It is tests/diffusion/cache/test_prompt_embed_cache.py of the vLLM-Omni release that is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = """
import omni_tensor_key
import pytest

@pytest.fixture(scope="session", autouse=True)
def _active():
    omni_tensor_key.activate()
    assert omni_tensor_key.is_active()
    yield
    assert omni_tensor_key.is_active()

# The tests take the functions by name when they are imported.
omni_tensor_key.activate()
"""


def test_they_pass_with_the_extension_active(tmp_path: Path) -> None:
    given = os.environ.get("OMNI_UPSTREAM_TESTS")
    if not given:
        pytest.skip("OMNI_UPSTREAM_TESTS does not name upstream's test_prompt_embed_cache.py")
    shutil.copy(given, tmp_path / "test_prompt_embed_cache.py")
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    core_model\n    cpu\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "."]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
