"""Keys of device tensors. A device stays registered for the life of a process, so its tests have one of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).with_name("device")


def test_on_a_device(root: Path, tmp_path: Path) -> None:
    """Run the files in device/, and show what they print if one of them fails."""
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={root}"]
    result = subprocess.run(
        [*pytest, FOLDER / "keys.py", FOLDER / "copies.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    print(result.stdout[-10_000:], result.stderr[-2000:])
    assert result.returncode == 0
    summary = re.search(r"(\d+) passed", result.stdout)
    assert summary
    assert int(summary[1]) >= 50
