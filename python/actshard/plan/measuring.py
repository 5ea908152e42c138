"""Measures how fast one process runs a plan: it runs a part of a task in a scratch folder next to the result."""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from actshard.base.errors import ActshardError
from actshard.base.work import existing_above, remove
from actshard.plan.plan import Plan

LIMIT = 64 << 20
"""Bytes of a sample."""
_SHORT = 0.5
"""Seconds."""
_WARMING = 16
"""A first run does this fraction (1/16) of the sample. It also opens files and loads tokenizers, which must not count as work."""


@dataclass(frozen=True)
class Rate:
    """A measured rate.

    Attributes:
        bytes: size of the sample, in the unit of ``plan.tasks[i]["bytes"]``.
        seconds: time of one process, with all its threads.
    """

    bytes: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds


def measure(plan: Plan, limit: int = LIMIT) -> Rate | str:
    """Runs a sample of a plan's work on this machine, and removes the files that it wrote.

    Args:
        plan: the plan. Its working folder is not touched.
        limit: maximum bytes of the sample.

    Returns:
        The rate, or the reason why there is none: the smallest part of the work exceeds the limit (a compressed text file, a
        large file to copy, a model's capture), or the sample failed.
    """
    try:
        first = _time_sample(plan, max(limit // _WARMING, 1))
        total = _time_sample(plan, limit)
    except (ActshardError, OSError) as error:
        return f"a sample of the work failed: {error}"
    if first is None or total is None:
        return plan.implementation.undivided.format(limit=f"{limit:,} bytes")
    difference = Rate(total.bytes - first.bytes, total.seconds - first.seconds)
    # If both runs are short, their difference is noise.
    return difference if difference.bytes > 0 and difference.seconds > _SHORT else total


def _time_sample(plan: Plan, limit: int) -> Rate | None:
    verb = plan.implementation
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = verb.part(plan, limit)
        if part is None:
            return None
        folder = Path(tempfile.mkdtemp(prefix=".actshard-sample-", dir=existing_above(plan.work)))
        try:
            began = time.perf_counter()
            # The part runs as task 1, because task 0 does additional work in some verbs.
            verb.run(replace(plan, tasks=(plan.tasks[0], part)), 1, folder, lambda done, total: None)
            return Rate(int(part["bytes"]), max(time.perf_counter() - began, 1e-6))
        finally:
            remove(folder)
