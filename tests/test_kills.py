"""306 kills at random times while writing, converting and merging: data reported as safe are never lost, and incomplete
datasets never open. ``ACTSHARD_KILLS`` sets the number of kills for each of the eighteen cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torture.budget import first_number
from waiting import PATIENCE

KILLS = int(os.environ.get("ACTSHARD_KILLS", "17"))


MERGED = ("saev", "lmprobe", "zarr", "pickle")
CASES = [
    (what, format)
    for what in ("write", "convert")
    for format in (*MERGED, "zarr 3", "zarr 3 packed", "hf_arrow", "npy")
]
CASES += [("merge", format) for format in MERGED]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "format"), CASES)
def test_killed_at_any_moment(tmp_path: Path, what: str, format: str) -> None:
    kills = Path(__file__).with_name("kills.py")
    command = [sys.executable, *map(str, (kills, what, format, tmp_path, KILLS, first_number()))]
    told = subprocess.run(command, capture_output=True, text=True, timeout=KILLS * PATIENCE, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    assert json.loads(told.stdout)["killed"] == KILLS
