"""Outcomes of tasks as JSON values, which any engine can send, and functions that engines' processes call to run tasks.

.. code-block:: text

    {"task": 17, "bytes": 123456}                       done
    {"task": 17, "error": "FormatError", ...}           failed: see :func:`actshard.base.errors.as_plain`
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from actshard.base.errors import ActshardError, InternalError, as_plain
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
