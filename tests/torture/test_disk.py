"""Reads past the page cache, ahead of a stream and from caches, from a disk whose reads fail."""

from __future__ import annotations

import pytest
from tests.torture import disk
from tests.torture.budget import first_number, runs


@pytest.mark.slow
@pytest.mark.skipif(disk.CC is None, reason="needs Linux and a C compiler")
def test_rows_are_right_or_one_error_when_reads_of_the_disk_fail() -> None:
    found = disk.run(runs(24, 20_000), first_number())
    assert found["reads past the page cache"] > 0
    assert found["reads through it"] > 0
    assert sum(n for ending, n in found.items() if ending.endswith("Error")) > 0
