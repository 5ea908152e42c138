"""``Plan``: work cut into tasks, as data."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from actshard import _arguments
from actshard._json import read_json
from actshard.errors import (
    ActshardError,
    ChangedInputError,
    FormatError,
    InternalError,
    OutOfRangeError,
    TasksFailedError,
    UnfinishedError,
    boundary,
)
from actshard.inputs import changed
from actshard.plan.book import BEAT_SECONDS, COMMIT, Attempt, Book, sync_folders_below
from actshard.plan.data import PLANS, VERBS, Planned
from actshard.plan.shares import of_environment
from actshard.plan.verb import Result, Verb
from actshard.work import locked, write_json

_LISTED = 12


@dataclass(frozen=True)
class Status:
    """How far a plan is.

    Attributes:
        tasks: number of tasks.
        done: numbers of finished tasks.
        running: attempts that told their progress within a minute.
        stopped: attempts that did not: their process was killed, or its machine is gone. Run their tasks again.
        failed: the last error of each task that failed and is not running.
        missing: numbers of tasks that nobody has begun, or whose attempt stopped.
        committed: whether the results were put together; True also once the working folder is gone.
        committing: whether a commit has begun and is not finished: repeat it.
        bytes, seconds: of the finished tasks, for a rate; seconds are those of all tasks together.
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
        done = set(self.done)
        return () if self.committed else tuple(i for i in range(self.tasks) if i not in done)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        from actshard.errors import as_plain

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
    """Work on a dataset, cut into tasks. Plain data: :meth:`save` writes it as JSON, :func:`actshard.plan.load` reads it.

    A plan is a pure function of its inputs and arguments: made twice, it is the same. A task is a pure function of the plan and
    its number: any process of any machine that sees the same paths may run it, in any order, twice, or at the same time.

    Its attributes are those of :class:`~actshard.plan.data.Planned`.
    """

    # -- tasks -----------------------------------------------------------------------------------------------------

    @property
    def book(self) -> Book:
        """The working folder."""
        return Book(self.work, self.id)

    @cached_property
    def implementation(self) -> Verb:
        """The verb."""
        made: Verb = _imported(VERBS[self.verb])()
        return made

    def mine(self) -> list[int]:
        """Numbers of the tasks that this process runs, if the processes of a job share them.

        The environment tells which process this is: torchrun (RANK, WORLD_SIZE), Slurm, MPI, Ray or JAX; see
        :func:`actshard.plan.shares.of_environment`. Process r of n has the tasks r, r + n, ...

        Raises:
            ArgumentError: the environment contradicts itself.
        """
        index, count = of_environment()
        return list(range(index, len(self), count))

    def run(self, task: int) -> dict[str, Any]:
        """Runs one task and returns its result. A finished task is not run again.

        Harmless at any time: twice, by two machines at once, after a kill, and after the commit.

        Raises:
            OutOfRangeError: there is no such task.
            ChangedInputError: an input changed since the plan was made.
            Others: what the task's work raises; the message tells input and row. The error is recorded for :meth:`status`.
        """
        task = _arguments.whole(task, "task", 0)
        if task >= len(self):
            raise OutOfRangeError(f"task: expected 0 to {len(self) - 1}, found {task}")
        book = self.book
        over = {"task": task, "value": {}, "seconds": 0.0, "committed": True}
        if not self.begin():
            return over
        if (found := book.result(task)) is not None:
            found.pop("files", None)  # of the commit
            return found
        try:
            return self._run(task, book)
        except ActshardError as error:
            if (
                not book.exists() and self._committed(book) is not None
            ):  # meanwhile, which removed this attempt's folder
                return over
            book.failed(task, error)
            raise
        except Exception as error:
            made = InternalError(f"task {task}: {type(error).__name__}: {error}", path=self.work)
            book.failed(task, made)
            raise made from error

    def begin(self) -> bool:
        """Makes the working folder, unless there is one. Returns False if the plan was committed; there is none then."""
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
            if is_over():  # another process removed the folder while this one made it
                return False
            raise

    def _committed(self, book: Book) -> Any | None:
        """What :meth:`Verb.committed` finds; None also if another process begins the plan at this moment."""
        try:
            with boundary(self.work, "look for the result of a plan beside"):
                return self.implementation.committed(self)
        except ActshardError:
            if book.exists():
                return None
            raise

    def _run(self, task: int, book: Book) -> dict[str, Any]:
        began = time.perf_counter()
        self.check_inputs(few=True)
        with book.attempt(task) as folder, boundary(folder, f"run task {task} in"):
            told = 0.0

            def tell(done: int, total: int) -> None:
                nonlocal told
                now = time.monotonic()
                if now - told >= BEAT_SECONDS:
                    told = now
                    book.tell(folder, done, total)

            value = self.implementation.run(self, task, folder, tell)
            record = {"value": value, "seconds": round(time.perf_counter() - began, 3)}
            book.publish(task, folder, record)
        return {"task": task, **record}

    def check_inputs(self, *, few: bool = False) -> None:
        """Raises ChangedInputError if an input changed since the plan was made.

        Args:
            few: look at up to 16 files only, so that 10,000 tasks do not ask a file server 40 million times. :meth:`commit` looks
                at all.
        """
        wrong = changed(self.inputs if not few else self.inputs[:: max(1, -(-len(self.inputs) // 16))])
        if wrong is not None:
            raise ChangedInputError(f"{wrong[1]} Make the plan again.", path=wrong[0])

    # -- all tasks -------------------------------------------------------------------------------------------------

    def left(self) -> list[int]:
        """Numbers of the tasks that are not done; none after the commit. Cheaper than :meth:`status`: one listing of a folder."""
        book = self.book
        if not book.exists():
            return [] if self._committed(book) is not None else list(range(len(self)))
        done = book.done()
        return [task for task in range(len(self)) if task not in done]

    def status(self) -> Status:
        """Tells how far the plan is. Changes nothing."""
        book = self.book
        if not book.exists():
            over = self._committed(book) is not None
            return Status(len(self), (), (), (), {}, () if over else tuple(range(len(self))), over, False)
        done = book.done()
        attempts = [a for a in book.attempts() if a.task not in done]
        running = tuple(a for a in attempts if a.running)
        busy = {a.task for a in running}
        failed = {i: e for i, e in book.errors().items() if i not in done and i not in busy}
        seconds, size = 0.0, 0
        for task in done:
            found = book.result(task)
            if found is not None:
                seconds += float(found.get("seconds", 0))
                size += self.implementation.told(found["value"])[0]
        return Status(
            len(self),
            tuple(sorted(done)),
            running,
            tuple(a for a in attempts if not a.running),
            failed,
            tuple(i for i in range(len(self)) if i not in done and i not in busy and i not in failed),
            False,
            (self.work / COMMIT).exists(),
            size,
            seconds,
        )

    def commit(self) -> Any:
        """Puts the results of all tasks together, and removes the working folder.

        Files are renamed, and what makes them a dataset comes last. After a kill, the same call goes on. After a finished commit
        it returns the same again.

        Returns:
            What the verb's own function returns: a Conversion, a Report, statistics by layer, a TokenCache, a path.

        Raises:
            UnfinishedError: tasks are missing, running or failed; the message names them.
            ChangedInputError: an input changed since the plan was made.
            FormatError: results leave a hole or overlap.
            LockedError: another process commits.
        """
        verb, book = self.implementation, self.book
        if not book.exists():
            if (over := self._committed(book)) is not None:
                book.remove()  # a commit that was killed may have left some of it
                verb.after(self)
                return over
            raise UnfinishedError(f"{len(self)} of {len(self)} tasks are missing: run them first", path=self.work)
        lock = locked(self.work / "committing")
        try:
            if not book.exists():  # another process was faster
                over = verb.committed(self)
                if over is not None:
                    return over
            made = self._commit(verb, book)
        finally:
            lock.release()
        book.remove()
        verb.after(self)
        return made

    def _commit(self, verb: Verb, book: Book) -> Any:
        results, records = [], []
        lacking = []
        for task in range(len(self)):
            found = book.result(task)
            if found is None:
                lacking.append(task)
            else:
                records.append(found)
                results.append(Result(task, book.folder(task), found["value"], float(found.get("seconds", 0))))
        if lacking:
            raise self._unfinished(lacking)
        begun = (self.work / COMMIT).exists()
        with boundary(self.work, "commit"), _refusing_results(self.work):
            if not begun:  # a commit that has begun is finished
                self.check_inputs()
                verb.check(self, results)  # first: it names files
                book.check_files(records)
                write_json(self.work / COMMIT, {"id": self.id})
            made = verb.commit(self, results)
            if begun and (place := getattr(made, "path", None)) is not None:
                # What was renamed before the kill may not be on the disk: this call did not rename it, and so did not sync it.
                sync_folders_below(Path(place))
            return made

    def _unfinished(self, lacking: list[int]) -> ActshardError:
        book = self.book
        failed = {i: e for i, e in book.errors().items() if i in set(lacking)}
        busy = sorted({a.task for a in book.attempts() if a.running} & set(lacking))
        idle = [i for i in lacking if i not in failed and i not in busy]
        said = [
            f"{len(some):,} {what} ({ranges(some)})" for some, what in ((idle, "missing"), (busy, "running")) if some
        ]
        if failed:
            said.append(f"{len(failed):,} failed ({ranges(failed)}), the first: {next(iter(failed.values()))}")
        return UnfinishedError(f"expected {len(self):,} finished tasks, found {', '.join(said)}", path=self.work)


@contextlib.contextmanager
def _refusing_results(work: Path) -> Iterator[None]:
    """Raises FormatError for results of tasks with values that no check expected."""
    try:
        yield
    except ActshardError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise FormatError(
            f"expected results that tasks of this plan left: {type(error).__name__}: {error!s:.200}; if nobody changed files in "
            "this folder, please report it",
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
        FormatError: it is no plan, or was changed.
    """
    file = _arguments.local_path(path)
    value = read_json(file)
    kind: type[Plan] = Plan
    if isinstance(value, dict) and (own := PLANS.get(str(value.get("verb")))) is not None:
        kind = _imported(own)
    made = kind.from_dict(value, file)
    made.implementation.check_plan(made, file)
    return made


def _imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def failures(plan: Plan, errors: Mapping[int, ActshardError]) -> TasksFailedError:
    """The error of a run in which tasks failed: every task's error is in ``errors``, and in the message."""
    lines = [f"task {i}: {error}" for i, error in sorted(errors.items())]
    more = f"; and {len(lines) - _LISTED:,} more" if len(lines) > _LISTED else ""
    made = TasksFailedError(
        f"{len(errors):,} of {len(plan):,} tasks failed: {'; '.join(lines[:_LISTED])}{more}", path=plan.work
    )
    made.errors = dict(errors)
    return made
