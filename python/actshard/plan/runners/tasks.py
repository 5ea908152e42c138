"""Outcomes of tasks as JSON values, which any engine can send, and functions that engines' processes call to run tasks.

.. code-block:: text

    {"task": 17, "bytes": 123456}                       done
    {"task": 17, "error": "FormatError", ...}           failed: see :func:`actshard.base.errors.as_plain`
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from actshard.base.errors import ActshardError, InternalError, UnfinishedError, as_plain
from actshard.base.work import PLAN
from actshard.plan.plan import Plan, load

Said = Mapping[str, Any]
Heard = Callable[[Said], object]
"""A function that an engine calls, in the driver's process, with the outcome of a task."""


def outcome(plan: Plan, task: int) -> dict[str, object]:
    """Runs a task and returns its outcome. The task's result is stored in the working folder."""
    try:
        record = plan.run(task)
    except ActshardError as error:
        return lost(task, error)
    except Exception as error:
        return lost(task, InternalError(f"task {task}: {type(error).__name__}: {error}", path=plan.work))
    return {"task": task, "bytes": plan.implementation.told(record["value"])[0]}


def lost(task: int, error: ActshardError) -> dict[str, object]:
    """Returns the outcome of a failed task."""
    return {"task": task, **as_plain(error)}


def plan_file(plan: Plan) -> str:
    """Writes the plan to its working folder, which all machines see. Engines send this path instead of the plan."""
    if not plan.book.exists():
        plan.check_size()
        plan.begin()
    return str(plan.work / PLAN)


def outcomes_at(file: str, tasks: list[int], threads: int | None = None) -> list[dict[str, object]]:
    """Runs tasks of the plan in a file, in order, and returns their outcomes. Engines call this on other machines.

    Does not raise errors of tasks, because an engine's own retries are for machines that died. ``threads``: the number that the
    engine gave this process, if it does not bind processes to processors.
    """
    if threads is not None:
        os.environ.setdefault("ACTSHARD_NUM_THREADS", str(threads))  # read when the first task begins
    try:
        plan = _loaded(file)
    except ActshardError as error:
        return [lost(task, error) for task in tasks]
    return [outcome(plan, task) for task in tasks]


def done_at(file: str, tasks: list[int]) -> set[int]:
    """Returns which of these tasks of the plan in a file are done."""
    try:
        return _loaded(file).book.done() & set(tasks)
    except ActshardError:
        return set()


@lru_cache(maxsize=4)
def _loaded(file: str) -> Plan:
    return load(Path(file))


# An element of an array job, on its node: runs its tasks, and is queued again when it is preempted or its time is up.
#
# Slurm sends a signal before it stops an element (submitit's ``slurm_signal_delay_s``, 90 s). submitit then calls
# ``checkpoint`` and queues the element again, which runs the unfinished tasks. Python cannot handle a signal during a long call
# into Rust: such an element is killed, and the driver runs its tasks again.


class TimeIsUp(BaseException):
    """The time limit is near, and this run finished no task. Not an Exception, because it ends the element, not the task."""


class Element:
    """The function object that submitit sends to a node."""

    def __init__(self, minutes: int) -> None:
        self._minutes = minutes
        self._began = 0.0
        self._done = 0

    def __call__(self, file: str, tasks: list[int]) -> list[dict[str, object]]:
        """Runs the tasks. See :func:`actshard.plan.runners.tasks.outcomes_at`."""
        self._began, self._done = time.monotonic(), len(done_at(file, tasks))
        ended: list[dict[str, object]] = []
        try:
            for task in tasks:
                ended += outcomes_at(file, [task])
        except TimeIsUp:
            why = UnfinishedError(
                f"expected a task to end within the time limit of {self._minutes} minutes: ask for more time, or plan more tasks"
            )
            ended += [lost(task, why) for task in tasks[len(ended) :]]
        return ended

    def checkpoint(self, file: str, tasks: list[int]) -> object:
        """Called by submitit in its signal handler: returns the job to queue again.

        Raises:
            TimeIsUp: this run finished no task, so another would not either.
        """
        import submitit.helpers

        # submitit's rule: a signal means that time is up after 80 % of the limit, or in its last ten minutes; else preemption.
        late = time.monotonic() - self._began >= min(self._minutes * 48, self._minutes * 60 - 600)
        if late and len(done_at(file, tasks)) <= self._done:
            raise TimeIsUp
        return submitit.helpers.DelayedSubmission(self, file, tasks)
