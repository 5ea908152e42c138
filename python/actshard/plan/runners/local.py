"""Runs tasks on this machine: in this process, or in worker processes that run many tasks each."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

from actshard.base import _arguments
from actshard.base.errors import LostWorkerError
from actshard.base.work.pool import WorkerPool
from actshard.plan.plan import Plan
from actshard.plan.runners.tasks import Heard, lost, outcome, plan_file

MOST_WORKERS = 4096


def execute(plan: Plan, tasks: Sequence[int], heard: Heard, *, keep_going: bool, workers: int | None = None) -> None:
    """Runs tasks here; see :class:`actshard.plan.runners.Engine`.

    Args:
        plan: the plan.
        tasks: task numbers.
        heard: called with the outcome of each task.
        keep_going: continue after a failure. If False, running tasks are finished and no other is started.
        workers: number of processes, which share the processors; None: run the tasks in this process, in order.
    """
    count = None if workers is None else _arguments.whole(workers, "workers", 1, MOST_WORKERS)
    if count is None:
        for task in tasks:
            ended = outcome(plan, task)
            heard(ended)
            if "error" in ended and not keep_going:
                return
        return
    _run(plan, tasks, min(count, len(tasks)), heard, keep_going=keep_going)


def last_to_first(plan: Plan, tasks: Sequence[int]) -> list[int]:
    """Tasks in the reverse of the order in which workers get them: largest first, so that no long task is left for the end.

    Among tasks of about the same size, lower numbers go first, because task 0 of a check also checks the files.
    """
    sizes = {task: int(plan.tasks[task].get("bytes", 0)) for task in tasks}
    step = max(sizes.values(), default=0) // 10 + 1
    return sorted(tasks, key=lambda task: (sizes[task] // step, -task))


def _run(plan: Plan, tasks: Sequence[int], count: int, heard: Heard, *, keep_going: bool) -> None:
    """Runs tasks in processes, the largest first. Those that die are replaced."""
    waiting = last_to_first(plan, tasks)

    def report(outcome: Mapping[str, object]) -> None:
        if "error" in outcome and not keep_going:
            waiting.clear()
        heard(outcome)

    def ended(task: int, outcome: Mapping[str, object]) -> bool:
        report(outcome)
        return True

    def died(task: int, how: str) -> None:
        plan.book.remove_dead(task)  # so that it does not count as running
        why = LostWorkerError(f"its process {how}", path=plan.work)
        plan.book.failed(task, why)
        report(lost(task, why))

    WorkerPool(
        "actshard.plan.runners.worker",
        json.dumps({"plan": plan_file(plan), "path": sys.path}),
        count,
        waiting,
        line=str,
        heard=ended,
        lost=died,
        stopped=plan.book.remove_dead,  # a task may be killed at any time
    ).run()
