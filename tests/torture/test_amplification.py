"""Opening, verifying and reading a dataset takes memory in proportion to the size of its files, whatever is written in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.torture import agreement, amplification
from tests.torture.budget import runs, seed

from waiting import PATIENCE

pytestmark = pytest.mark.machine

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", agreement.KINDS)
def test_files_take_memory_in_proportion_to_their_size(kind: str, tmp_path: Path) -> None:
    arguments = ["--each", runs(6, 400), "--seed", seed(), "--kinds", kind]
    done = subprocess.run(
        [sys.executable, "-m", amplification.__name__, *map(str, arguments)],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=20 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measurements = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(measurements) >= len(agreement.roots(kind))
    wrong = [
        f"{name}: {memory:,} bytes of memory for {size:,} bytes of files{failure}"
        for name, size, memory, failure in measurements
        if failure or memory > amplification.bound(size)
    ]
    assert not wrong, "\n".join(wrong[:10])


def test_memory_of_a_child_is_counted() -> None:
    """A measurement that could not fail would show nothing."""

    def take() -> None:
        _ = bytearray(200 << 20)

    idle, _ = amplification.peak_of(lambda: None)
    taken, failure = amplification.peak_of(take)
    assert not failure
    assert taken - idle > 190 << 20
    assert amplification.peak_of(lambda: sys.exit(3))[1] == "ended with status 1"
