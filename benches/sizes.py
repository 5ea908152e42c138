"""Sizes of the workloads: full, or tiny to find out in seconds whether every workload still runs (tests/test_benches.py)."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "ACTSHARD_BENCH_TINY"
"""Set to 1 for tiny data. A variable and not only an option: workloads start processes, which must agree."""
TINY = os.environ.get(VARIABLE) == "1"


def size(full: T, tiny: T) -> T:
    """One of the two."""
    return tiny if TINY else full


def turns(full: int) -> int:
    """Repeats, or one."""
    return size(full, 1)
