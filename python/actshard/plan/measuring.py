"""How fast one process does a plan's work: a part of a task, done in a scratch folder beside the result."""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from actshard.errors import ActshardError
from actshard.plan.plan import Plan
from actshard.work import existing_above, remove

LIMIT = 64 << 20
"""Bytes of a sample."""
_SHORT = 0.5
"""Seconds."""
_WARMING = 16
"""The sample is done twice, first a part of it, which also opens files and loads tokenizers: that time is not work."""


@dataclass(frozen=True)
class Rate:
    """A measured rate.

    Attributes:
        bytes: size of the sample, in the unit of ``plan.tasks[i]["bytes"]``.
        seconds: time that it took one process, with all threads that the process has.
    """

    bytes: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds


def measure(plan: Plan, limit: int = LIMIT) -> Rate | str:
    """Does a sample of a plan's work on this machine, and removes what it wrote.

    Args:
        plan: the plan. Its working folder is not touched.
        limit: most bytes of the sample.

    Returns:
        The rate. Or the reason why there is none: no part of the work is so small (a compressed file of text, a large file to
        copy, a model's capture), or the sample could not be done.
    """
    try:
        first = _done(plan, max(limit // _WARMING, 1))
        whole = _done(plan, limit)
    except (ActshardError, OSError) as error:
        return f"a sample of the work failed: {error}"
    if first is None or whole is None:
        return plan.implementation.undivided.format(limit=f"{limit:,} bytes")
    more = Rate(whole.bytes - first.bytes, whole.seconds - first.seconds)
    # Where all of it is short, the difference is noise.
    return more if more.bytes > 0 and more.seconds > _SHORT else whole


def _done(plan: Plan, limit: int) -> Rate | None:
    verb = plan.implementation
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = verb.part(plan, limit)
        if part is None:
            return None
        folder = Path(tempfile.mkdtemp(prefix=".actshard-sample-", dir=existing_above(plan.work)))
        try:
            began = time.perf_counter()
            # Not the first task, which in some verbs does more than its share.
            verb.run(replace(plan, tasks=(plan.tasks[0], part)), 1, folder, lambda done, total: None)
            return Rate(int(part["bytes"]), max(time.perf_counter() - began, 1e-6))
        finally:
            remove(folder)
