"""``actshard.run``: runs the tasks of a plan on this machine, or on an engine, and commits.

One file of this folder for each engine, imported when it is used. An engine starts ``plan.run(i)`` somewhere and tells how it
ended; retries and resources are the engine's. What is done is known from the plan's working folder alone, so a driver that was
killed is started again, and two drivers do no harm.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from actshard import _arguments
from actshard.errors import ActshardError, ArgumentError, ArgumentTypeError, InternalError
from actshard.plan.plan import Plan, failures, load

ENGINES = ("local",)
"""Names of engines, which are modules of this folder."""
Heard = Callable[[int, Mapping[str, Any] | None, ActshardError | None], object]
"""Called by an engine when a task has ended, with (task, its record or None, its error or None)."""


class Engine(Protocol):
    """What a module of this folder has."""

    def execute(self, plan: Plan, tasks: Sequence[int], heard: Heard, *, keep_going: bool, **options: Any) -> None:
        """Runs tasks, in any order. Returns when all have ended, or, without ``keep_going``, when one has failed.

        Raises:
            MissingExtraError: the engine's library is not installed.
            ArgumentError: an unknown option.
        """


def run(
    plan: Plan | str | os.PathLike[str],
    on: str = "local",
    *,
    keep_going: bool = False,
    commit: bool = True,
    progress: Callable[[int, int, int], object] | None = None,
    **options: Any,
) -> Any:
    """Runs the tasks of a plan that are not done, and commits it.

    Args:
        plan: a plan, or the path of its JSON.
        on: ``"local"``.
        keep_going: run the other tasks after one has failed.
        commit: commit when all tasks are done; otherwise return the plan's status.
        progress: called with (tasks done, tasks, bytes of the tasks that were done in this call).
        options: the engine's.

    Returns:
        What :meth:`actshard.plan.Plan.commit` returns.

    Raises:
        TasksFailedError: tasks failed; ``errors`` has the error of each.
        Errors of :meth:`actshard.plan.Plan.commit`.
    """
    plan = plan if isinstance(plan, Plan) else load(plan)
    if not _arguments.is_one_of(on, ENGINES):
        raise ArgumentError(f"on: expected one of {', '.join(ENGINES)}, found {on!r}")
    keep_going, commit = _arguments.switch(keep_going, "keep_going"), _arguments.switch(commit, "commit")
    if progress is not None and not callable(progress):
        raise ArgumentTypeError(f"progress: expected a function, found {type(progress).__name__}")
    engine: Engine = importlib.import_module(f"actshard.runners.{on}")
    left = plan.status().left
    errors: dict[int, ActshardError] = {}
    done, size = len(plan) - len(left), 0

    def heard(task: int, record: Mapping[str, Any] | None, error: ActshardError | None) -> None:
        nonlocal done, size
        if error is not None:
            errors[task] = error
            return
        done += 1
        size += plan.implementation.told((record or {}).get("value", {}))[0]
        if progress is not None:
            progress(done, len(plan), size)

    if left:
        plan.book.begin(plan.as_dict())
        engine.execute(plan, left, heard, keep_going=keep_going, **options)
    if errors:
        raise failures(plan, errors)
    return plan.commit() if commit else plan.status()


def outcome(plan: Plan, task: int) -> tuple[Mapping[str, Any] | None, ActshardError | None]:
    """Runs a task; returns its record, or its error."""
    try:
        return plan.run(task), None
    except ActshardError as error:
        return None, error
    except Exception as error:
        return None, InternalError(f"task {task}: {type(error).__name__}: {error}", path=plan.work)
