"""Tasks on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from actshard.plan.plan import Plan
from actshard.runners import Heard, outcome


def execute(plan: Plan, tasks: Sequence[int], heard: Heard, *, keep_going: bool) -> None:
    """Runs tasks in this process, one after the other; see :class:`actshard.runners.Engine`."""
    for task in tasks:
        record, error = outcome(plan, task)
        heard(task, record, error)
        if error is not None and not keep_going:
            return
