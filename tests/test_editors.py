"""What editors see: pyright's view of the public surface. mypy checks the same script in `make check`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.peers
def test_the_user_script_has_the_same_types_in_an_editor() -> None:
    """Pyright, which editors run, reports the refused lines and no other."""
    script = ROOT / "tests/typed/script.py"
    refused = {n for n, line in enumerate(script.read_text().splitlines(), 1) if "# type: ignore[" in line}
    command = [Path(sys.executable).parent / "basedpyright", "--level", "error", "--outputjson", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert {one["range"]["start"]["line"] + 1 for one in found} == refused, done.stdout
