"""204 kills at random times while writing, converting and merging: data reported as safe are never lost, and incomplete
datasets never open. ``ACTSHARD_KILLS`` sets the number of kills for each of the twelve cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = int(os.environ.get("ACTSHARD_KILLS", "17"))


@pytest.mark.parametrize("format", ["saev", "lmprobe", "zarr", "pickle"])
@pytest.mark.parametrize("what", ["write", "convert", "merge"])
def test_killed_at_any_moment(tmp_path: Path, what: str, format: str) -> None:
    command = [sys.executable, str(Path(__file__).with_name("kills.py")), what, format, str(tmp_path), str(KILLS), "1"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    assert json.loads(told.stdout)["killed"] == KILLS
