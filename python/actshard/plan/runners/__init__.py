"""``actshard.run``: runs the tasks of a plan on this machine, or on an engine, and commits.

Each engine is a module of this folder, imported on first use; engines' processes call ``tasks``. An engine manages machines and
resources, starts tasks, and reports their outcomes. The plan's working folder alone records which tasks are done: a lost message
loses no work, a killed driver can be started again, and two drivers at once are safe.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from actshard.base import _arguments
from actshard.base.errors import ActshardError, ArgumentError, OutOfRangeError, from_plain
from actshard.plan.plan import Plan, failures, load
from actshard.plan.runners.tasks import Heard, Said

ENGINES = ("local", "slurm", "ray", "dask")
"""Names of the engines, which are modules of this folder."""
_MOST_RETRIES = 1000


class Engine(Protocol):
    """The interface of an engine's module."""

    def execute(self, plan: Plan, tasks: Sequence[int], heard: Heard, *, keep_going: bool, **options: object) -> None:
        """Runs tasks in any order. Returns when all have ended; without ``keep_going``, soon after one has failed.

        Raises:
            MissingExtraError: the engine's library is not installed.
            ArgumentError: an invalid option.
        """


def run(
    plan: Plan | str | os.PathLike[str],
    on: str = "local",
    *,
    keep_going: bool = False,
    retries: int = 0,
    commit: bool = True,
    tasks: Iterable[int] | None = None,
    progress: Callable[[int, int, int], object] | None = None,
    **options: object,
) -> Any:
    """Runs the tasks of a plan that are not done, and commits it.

    Args:
        plan: a plan, or the path of its JSON file.
        on: ``"local"``: in this process, or with ``workers=N`` in N processes that share this machine's processors;
            ``"slurm"``, ``"ray"`` or ``"dask"``: see ``execute`` of these modules for their options.
        keep_going: run the other tasks after one has failed.
        retries: number of times to run failed tasks again, after the others have ended.
        commit: commit when all tasks are done. If False, return the plan's status instead.
        tasks: run only these tasks, and do not commit.
        progress: called with (tasks done, number of tasks, bytes of the tasks done in this call).
        options: options of the engine.

    Returns:
        The value of :meth:`actshard.plan.Plan.commit`; None with ``tasks``.

    Raises:
        OutOfRangeError: there is no such task.
        TasksFailedError: tasks failed; ``errors`` contains the error of each.
        MissingExtraError: the engine's library is not installed.
        Errors of :meth:`actshard.plan.Plan.commit`.
    """
    plan = plan if isinstance(plan, Plan) else load(plan)
    keep_going, commit = _arguments.switch(keep_going, "keep_going"), _arguments.switch(commit, "commit")
    retries = _arguments.whole(retries, "retries", 0, _MOST_RETRIES)
    _arguments.check_progress(progress)
    engine = _engine(on, options)
    task_numbers = None if tasks is None else _numbers(plan, tasks)
    for retries_left in reversed(range(retries + 1)):
        pending = [task for task in plan.left() if task_numbers is None or task in task_numbers]
        if not pending:
            break
        # Before the last round, a failure does not stop other tasks.
        errors = _round(
            plan, engine, pending, keep_going=keep_going or retries_left > 0, progress=progress, options=options
        )
        if errors and not retries_left:
            raise failures(plan, errors)
    if task_numbers is not None:
        return None
    return plan.commit() if commit else plan.status()


def _numbers(plan: Plan, tasks: Iterable[int]) -> set[int]:
    numbers = {_arguments.whole(task, "tasks", 0) for task in tasks}
    if numbers and max(numbers) >= len(plan):
        raise OutOfRangeError(f"tasks: expected 0 to {len(plan) - 1}, found {max(numbers)}")
    return numbers


def _round(
    plan: Plan,
    engine: Engine,
    pending: Sequence[int],
    *,
    keep_going: bool,
    progress: Callable[[int, int, int], object] | None,
    options: dict[str, object],
) -> dict[int, ActshardError]:
    """Runs tasks once. Returns the errors of tasks that are not done; tasks may be done in spite of a reported error."""
    errors: dict[int, ActshardError] = {}
    done_count, size = len(plan) - len(pending), 0

    def heard(outcome: Said) -> None:
        nonlocal done_count, size
        if "error" in outcome:
            errors[outcome["task"]] = from_plain(dict(outcome))
            return
        done_count, size = done_count + 1, size + outcome["bytes"]
        if progress is not None:
            progress(done_count, len(plan), size)

    engine.execute(plan, pending, heard, keep_going=keep_going, **options)
    undone = set(plan.left()) if errors else set()
    return {task: error for task, error in errors.items() if task in undone}


def _engine(on: str, options: dict[str, object]) -> Engine:
    """Returns the engine with a name.

    Raises:
        ArgumentError: the engine or one of the options does not exist.
    """
    if not _arguments.is_one_of(on, ENGINES):
        raise ArgumentError(f"on: expected one of {', '.join(ENGINES)}, found {on!r}")
    engine, names = _options_of(on)
    for name in options:
        if names is not None and name not in names:
            having = [f"on={engine_name!r}" for engine_name in ENGINES if name in (_options_of(engine_name)[1] or ())]
            elsewhere = f"; it is an option of {' and '.join(having)}" if having else ""
            raise ArgumentError(f"{name}: expected an option of on={on!r}: {', '.join(names)}{elsewhere}")
    return engine


def _options_of(on: str) -> tuple[Engine, list[str] | None]:
    """Returns an engine and the names of its options; None if it accepts any."""
    engine: Engine = importlib.import_module(f"actshard.plan.runners.{on}")
    parameters = inspect.signature(engine.execute).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return engine, None
    return engine, list(parameters)[4:]
