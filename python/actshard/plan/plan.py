"""``Plan``: work cut into tasks, as data."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._json import read_json
from actshard.base._schema import json_values
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ChangedInputError,
    FormatError,
    InternalError,
    OutOfRangeError,
    TasksFailedError,
    UnfinishedError,
    boundary,
)
from actshard.base.work import locked, write_json
from actshard.plan.book import BEAT_SECONDS, COMMIT, Attempt, Book, sync_folders_below
from actshard.plan.data import PLANS, VERBS, Planned
from actshard.plan.verb import Result, Verb
from actshard.reading.inputs import changed

if TYPE_CHECKING:
    from types import ModuleType


# Rank and number of processes, from the environment that a launcher sets: they determine a process's share of the tasks.
#
# ====================  ==========================================================================
# torchrun, accelerate  ``RANK``, ``WORLD_SIZE``
# Open MPI              ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``
# Slurm, ``srun``       ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` (or ``SLURM_NTASKS``)
# Slurm, array jobs     ``SLURM_ARRAY_TASK_ID``, ``_COUNT``, ``_MIN``, ``_STEP``; times one of the above
# Ray Train             the train context, if ``ray.train`` is imported and the process is a training worker
# JAX                   ``jax.process_index()``, ``jax.process_count()``, if ``jax`` is imported
# ====================  ==========================================================================
#
# The first launcher in this table that is found is used, because launchers start launchers: torchrun in each task of srun, or
# MPI in a Slurm step. Without a launcher, the process has all tasks.


_LAUNCHERS = (
    ("RANK", ("WORLD_SIZE",)),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)


def of_environment() -> tuple[int, int]:
    """Returns (number of this process, number of processes).

    Raises:
        ArgumentError: a variable is not a number, a rank is not below the number of processes, or only one of RANK and WORLD_SIZE
            is set.
    """
    inner = _launched()
    array = _array()
    if array is not None and not (inner and _counts_elements(inner, array)):
        inner = inner or (0, 1)
        return array[0] * inner[1] + inner[0], array[1] * inner[1]
    share = inner or _ray() or _jax()
    if share is None and array is None:
        _check_pair("RANK", "WORLD_SIZE")
    return share or (0, 1)


def _counts_elements(inner: tuple[int, int], array: tuple[int, int]) -> bool:
    """Whether RANK counts the processes of all elements of an array job, not those of one element.

    A wrong True only makes shares larger than necessary; no task is left out.
    """
    if not os.environ.get("RANK"):
        return False
    if os.environ.get("GROUP_WORLD_SIZE"):  # torchrun's number of machines: more than one element has
        nodes = _number("SLURM_JOB_NUM_NODES") if os.environ.get("SLURM_JOB_NUM_NODES") else 1
        return _number("GROUP_WORLD_SIZE") > nodes
    # Set by a user's script: export RANK=$SLURM_ARRAY_TASK_ID WORLD_SIZE=$SLURM_ARRAY_TASK_COUNT
    return "LOCAL_RANK" not in os.environ and inner == array


def _launched() -> tuple[int, int] | None:
    for rank, sizes in _LAUNCHERS:
        size = next((name for name in sizes if os.environ.get(name)), None)
        if size is None or not os.environ.get(rank):
            continue
        if rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in os.environ and "SLURM_JOB_ID" in os.environ:
            continue  # a batch script itself is one process, for any number of tasks of the job
        return _checked(rank, _number(rank), size, _number(size))
    return None


def _array() -> tuple[int, int] | None:
    """Position of this element in its Slurm array job, and number of elements."""
    if not os.environ.get("SLURM_ARRAY_TASK_ID") or not os.environ.get("SLURM_ARRAY_TASK_COUNT"):
        return None
    element, count = _number("SLURM_ARRAY_TASK_ID"), _number("SLURM_ARRAY_TASK_COUNT")
    first = _number("SLURM_ARRAY_TASK_MIN") if os.environ.get("SLURM_ARRAY_TASK_MIN") else 0
    step = max(_number("SLURM_ARRAY_TASK_STEP"), 1) if os.environ.get("SLURM_ARRAY_TASK_STEP") else 1
    index, odd = divmod(element - first, step)
    if odd or not 0 <= index < count:
        raise ArgumentError(
            f"SLURM_ARRAY_TASK_ID: expected one of {count} numbers from {first} in steps of {step}, found {element}: for an array "
            "with gaps, run the task of this number (--task $SLURM_ARRAY_TASK_ID) instead of a share"
        )
    return index, count


def _ray() -> tuple[int, int] | None:
    train: ModuleType | None = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
        index, count = context.get_world_rank(), context.get_world_size()
    except Exception:  # not a training worker; the error's type depends on ray's version
        return None
    return (int(index), int(count)) if index is not None and count else None


def _jax() -> tuple[int, int] | None:
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return None
    return int(jax.process_index()), int(jax.process_count())


def _check_pair(rank: str, size: str) -> None:
    """Raises ArgumentError if only one is set: otherwise each process of a job would run all tasks."""
    if bool(os.environ.get(rank)) != bool(os.environ.get(size)):
        present, lacking = (rank, size) if os.environ.get(rank) else (size, rank)
        raise ArgumentError(
            f"{present}: expected {lacking} in the environment too, found none: set both, or unset {present}, or name the tasks"
        )


def _number(name: str) -> int:
    text = os.environ[name].strip()
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise ArgumentError(f"{name}: expected a number, found {text!r:.40} in the environment")
    return int(text)


def _checked(rank: str, index: int, size: str, count: int) -> tuple[int, int]:
    if index >= count:
        raise ArgumentError(f"{rank}: expected a number below {size}={count}, found {index} in the environment")
    return index, count


_LISTED = 12
RUN_FIRST = "Run them first"
"""What to do about missing and failed tasks: the end of the error of a commit."""


@dataclass(frozen=True)
class Status:
    """The progress of a plan.

    Attributes:
        tasks: number of tasks.
        done: numbers of finished tasks.
        running: attempts that reported progress within the last minute.
        stopped: attempts that did not: their process was killed, or its machine is gone. Run their tasks again.
        failed: the last error of each task that failed and is not running.
        missing: numbers of tasks that were not started, or whose attempt stopped.
        committed: whether the plan was committed; True also after the working folder was removed.
        committing: whether a commit has started and is not finished: repeat it.
        bytes, seconds: bytes that finished tasks read or wrote, and the sum of their run times.
    """

    tasks: int
    done: tuple[int, ...]
    running: tuple[Attempt, ...]
    stopped: tuple[Attempt, ...]
    failed: Mapping[int, ActshardError]
    missing: tuple[int, ...]
    committed: bool
    committing: bool
    bytes: int = 0
    seconds: float = 0.0

    @property
    def left(self) -> tuple[int, ...]:
        """Numbers of tasks that are not done."""
        finished = set(self.done)
        return () if self.committed else tuple(i for i in range(self.tasks) if i not in finished)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        from actshard.base.errors import as_plain

        return {
            "tasks": self.tasks,
            "done": len(self.done),
            "running": [
                {"task": a.task, "host": a.host, "pid": a.pid, "done": a.done, "total": a.total} for a in self.running
            ],
            "stopped": [{"task": a.task, "host": a.host, "pid": a.pid} for a in self.stopped],
            "failed": [{"task": i, **as_plain(error)} for i, error in self.failed.items()],
            "missing": list(self.missing),
            "committed": self.committed,
            "committing": self.committing,
            "bytes": self.bytes,
            "seconds": self.seconds,
        }


class Plan(Planned):
    """Work on a dataset, divided into tasks. Plain data: :meth:`save` writes it as JSON, :func:`actshard.plan.load` reads it.

    A plan depends only on its inputs and arguments: planning twice gives the same plan. A task depends only on the plan and its
    number: any process on any machine with the same paths may run it, in any order, repeatedly, or at the same time as another.

    Attributes are those of :class:`~actshard.plan.data.Planned`.
    """

    # -- tasks -----------------------------------------------------------------------------------------------------

    @property
    def book(self) -> Book:
        """The working folder."""
        return Book(self.work, self.id)

    @cached_property
    def implementation(self) -> Verb[object]:
        """The implementation of the plan's verb."""
        verb: Verb[object] = _import(VERBS[self.verb])()
        return verb

    def mine(self) -> list[int]:
        """Returns the numbers of this process's tasks, if the processes of a job share them.

        Rank and number of processes come from the environment: torchrun (RANK, WORLD_SIZE), Slurm, MPI, Ray or JAX; see
        :func:`actshard.plan.plan.of_environment`. Process r of n has the tasks r, r + n, ...

        Raises:
            ArgumentError: the environment's variables are invalid or inconsistent.
        """
        index, count = of_environment()
        return list(range(index, len(self), count))

    def run(self, task: int) -> dict[str, Any]:
        """Runs one task and returns its result. A finished task is not run again.

        Safe to call at any time: repeatedly, on two machines at once, after a kill, and after the commit.

        Raises:
            OutOfRangeError: there is no such task.
            ChangedInputError: an input changed since the plan was made.
            Others: errors of the task's work; the message names input and row. The error is recorded for :meth:`status`.
        """
        task = _arguments.whole(task, "task", 0)
        if task >= len(self):
            raise OutOfRangeError(f"task: expected 0 to {len(self) - 1}, found {task}")
        book = self.book
        over = {"task": task, "value": {}, "seconds": 0.0, "committed": True}
        if not self.begin():
            return over
        if (record := book.result(task)) is not None:
            record.pop("files", None)  # only the commit uses it
            return record
        try:
            return self._run(task, book)
        except ActshardError as error:
            if (
                not book.exists() and self._committed(book) is not None
            ):  # the plan was committed meanwhile, which removed this attempt's folder
                return over
            book.failed(task, error)
            raise
        except Exception as error:
            failure = InternalError(f"task {task}: {type(error).__name__}: {error}", path=self.work)
            book.failed(task, failure)
            raise failure from error

    def begin(self) -> bool:
        """Creates the working folder if it does not exist. Returns False, without a folder, if the plan was committed."""
        book = self.book

        def is_over() -> bool:
            return not book.exists() and self._committed(book) is not None

        if book.exists():
            return True
        if self._committed(book) is not None:
            return False
        try:
            return book.begin(self.as_dict(), is_over)
        except ActshardError:
            if is_over():  # another process removed the folder while this one created it
                return False
            raise

    def _committed(self, book: Book) -> object | None:
        """The value of :meth:`Verb.committed`; None also if another process starts the plan at the same time."""
        try:
            with boundary(self.work, "look for the result of a plan next to"):
                return self.implementation.committed(self)
        except ActshardError:
            if book.exists():
                return None
            raise

    def _run(self, task: int, book: Book) -> dict[str, object]:
        began = time.perf_counter()
        self.check_inputs(few=True)
        with book.attempt(task) as folder, boundary(folder, f"run task {task} in"):
            last = 0.0

            def tell(done: int, total: int) -> None:
                nonlocal last
                now = time.monotonic()
                if now - last >= BEAT_SECONDS:
                    last = now
                    book.tell(folder, done, total)

            value = json_values(self.implementation.run(self, task, folder, tell))
            record = {"value": value, "seconds": round(time.perf_counter() - began, 3)}
            book.publish(task, folder, record)
        return {"task": task, **record}

    def check_inputs(self, *, few: bool = False) -> None:
        """Raises ChangedInputError if an input changed since the plan was made.

        Args:
            few: check at most 16 files, so that 10,000 tasks do not send 40 million requests to a file server. :meth:`commit`
                checks all.
        """
        wrong = changed(self.inputs if not few else self.inputs[:: max(1, -(-len(self.inputs) // 16))])
        if wrong is not None:
            raise ChangedInputError(f"{wrong[1]} Make the plan again.", path=wrong[0])

    # -- all tasks -------------------------------------------------------------------------------------------------

    def left(self) -> list[int]:
        """Numbers of the unfinished tasks; none after the commit. Cheaper than :meth:`status`: one listing of a folder."""
        book = self.book
        if not book.exists():
            return [] if self._committed(book) is not None else list(range(len(self)))
        finished = book.done()
        return [task for task in range(len(self)) if task not in finished]

    def status(self) -> Status:
        """Returns the plan's progress. Changes nothing."""
        book = self.book
        if not book.exists():
            over = self._committed(book) is not None
            return Status(len(self), (), (), (), {}, () if over else tuple(range(len(self))), over, False)
        finished = book.done()
        attempts = [a for a in book.attempts() if a.task not in finished]
        running = tuple(a for a in attempts if a.running)
        busy = {a.task for a in running}
        failed = {i: e for i, e in book.errors().items() if i not in finished and i not in busy}
        seconds, size = 0.0, 0
        for task in finished:
            record = book.result(task)
            if record is not None:
                seconds += float(record.get("seconds", 0))
                size += self.implementation.told(record["value"])[0]
        return Status(
            len(self),
            tuple(sorted(finished)),
            running,
            tuple(a for a in attempts if not a.running),
            failed,
            tuple(i for i in range(len(self)) if i not in finished and i not in busy and i not in failed),
            False,
            (self.work / COMMIT).exists(),
            size,
            seconds,
        )

    def commit(self) -> Any:
        """Combines the results of all tasks, and removes the working folder.

        The tasks' files are renamed; the metadata that makes them a dataset is written last. After a kill, the same call
        continues. After a finished commit, it returns the same value again.

        Returns:
            The value of the verb's own function: a Conversion, a Report, statistics by layer, a TokenCache, a path.

        Raises:
            UnfinishedError: tasks are missing, running or failed; the message names them.
            ChangedInputError: an input changed since the plan was made.
            FormatError: the tasks' results leave gaps or overlap.
            LockedError: another process is committing.
        """
        verb, book = self.implementation, self.book
        if not book.exists():
            if (over := self._committed(book)) is not None:
                book.remove()  # a killed commit may have left a part of the folder
                verb.after(self)
                return over
            raise self._unfinished(list(range(len(self))))
        lock = locked(self.work / "committing")
        try:
            if not book.exists():  # another process was faster
                over = verb.committed(self)
                if over is not None:
                    return over
            outcome = self._commit(verb, book)
        finally:
            lock.release()
        book.remove()
        verb.after(self)
        return outcome

    def _commit(self, verb: Verb[object], book: Book) -> object:
        results, records = [], []
        lacking = []
        for task in range(len(self)):
            record = book.result(task)
            if record is None:
                lacking.append(task)
            else:
                records.append(record)
                results.append(Result(task, book.folder(task), record["value"], float(record.get("seconds", 0))))
        if lacking:
            raise self._unfinished(lacking)
        is_repeated = (self.work / COMMIT).exists()
        with boundary(self.work, "commit"), _refusing_results(self.work):
            if not is_repeated:  # a commit that was started and killed is completed without these checks
                self.check_inputs()
                verb.check(self, results)  # before the next check, because its message is more specific
                book.check_files(records)
                write_json(self.work / COMMIT, {"id": self.id})
            outcome = verb.commit(self, results)
            if is_repeated and (path := getattr(outcome, "path", None)) is not None:
                # Files that the killed commit renamed may not be on the disk yet: this call did not rename or sync them.
                sync_folders_below(Path(path))
            return outcome

    def _unfinished(self, lacking: list[int]) -> ActshardError:
        book = self.book
        failed = {i: e for i, e in book.errors().items() if i in set(lacking)}
        busy = sorted({a.task for a in book.attempts() if a.running} & set(lacking))
        idle = [i for i in lacking if i not in failed and i not in busy]
        states = [
            f"{len(tasks):,} {what} ({ranges(tasks)})"
            for tasks, what in ((idle, "missing"), (busy, "running"))
            if tasks
        ]
        if failed:
            states.append(f"{len(failed):,} failed ({ranges(failed)}), the first: {next(iter(failed.values()))}")
        do = RUN_FIRST if idle or failed else "Wait for them"
        text = f"expected {many(len(self), 'finished task')}, found {', '.join(states)}. {do}"
        return UnfinishedError(text, path=self.work)


@contextlib.contextmanager
def _refusing_results(work: Path) -> Iterator[None]:
    """Raises FormatError for invalid results of tasks that no check found."""
    try:
        yield
    except ActshardError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise FormatError(
            f"expected results of this plan's tasks: {type(error).__name__}: {error!s:.200}; if the files in this folder were not "
            "changed, please report a bug",
            path=work,
        ) from error


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as text: ``0-3, 7, 9-12``."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_LISTED]]
    return ", ".join(shown) + (", ..." if len(runs) > _LISTED else "")


def load(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan that :meth:`Plan.save` wrote.

    Raises:
        MissingFileError: there is no such file.
        FormatError: the file is not a plan, or was changed.
    """
    file = _arguments.local_path(path)
    value = read_json(file)
    kind: type[Plan] = Plan
    if isinstance(value, dict) and (class_path := PLANS.get(str(value.get("verb")))) is not None:
        kind = _import(class_path)
    plan = kind.from_dict(value, file)
    plan.implementation.check_plan(plan, file)
    return plan


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def failures(plan: Plan, errors: Mapping[int, ActshardError]) -> TasksFailedError:
    """The error of a run in which tasks failed. ``errors`` contains the error of every task, the message the first few."""
    lines = [f"task {i}: {error}" for i, error in sorted(errors.items())]
    rest = f"; and {len(lines) - _LISTED:,} more" if len(lines) > _LISTED else ""
    failure = TasksFailedError(
        f"{len(errors):,} of {len(plan):,} tasks failed: {'; '.join(lines[:_LISTED])}{rest}", path=plan.work
    )
    failure.errors = dict(errors)
    return failure
