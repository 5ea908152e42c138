"""``actshard plan``, ``run``, ``status`` and ``commit``."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base.errors import (
    ESCAPES,
    ActshardError,
    ArgumentError,
    ChangedInputError,
    ExistsError,
    OutOfRangeError,
    UnfinishedError,
)
from actshard.base.work import existing_above
from actshard.cli._format import console, duration, show_facts, size
from actshard.cli._messages import spelled
from actshard.cli._progress import progress
from actshard.plan import Plan, Status, load, runners
from actshard.plan.needs import LIMIT, Rate, measure
from actshard.plan.plan import RUN_FIRST, ranges
from actshard.plan.reading import kept_at
from actshard.reading.verifying import Report

# Saves a plan, and prints its predicted size, memory and time, and the next commands.


_MOST_ELEMENTS = 1000
"""Slurm's default MaxArraySize is 1001. The array elements of larger plans run several tasks each."""
_WORKERS = 8
"""Number of processes for which a second time is printed."""


def save(plan: Plan, file: str, replace: bool) -> Path:
    """Writes a plan's file.

    Raises:
        ExistsError: the file exists and does not contain this plan.
    """
    path = _arguments.local_path(file, "--out")
    if not replace and (path.exists() or path.is_symlink()):
        try:
            same = load(path).id == plan.id
        except ActshardError:
            same = False
        if not same:
            raise ExistsError(
                "exists and is not this plan. Pass --replace to overwrite it, or another -o FILE.", path=path
            )
    return plan.save(path)


def rate(plan: Plan, *, quiet: bool) -> Rate | str:
    """Measures a sample of the work, or returns the reason why it cannot."""
    if not plan.left():
        return "all tasks are done"
    if not any(int(task["bytes"]) for task in plan.tasks):
        return "the tasks read and copy nothing"
    with progress("measuring a sample", quiet=quiet):
        return measure(plan, LIMIT)


@dataclass(frozen=True)
class PlanSummary:
    """The printed summary of a plan.

    Attributes:
        plan: the plan.
        path: its file.
        rate: the measured rate, or the reason why there is none.
        free: free bytes and files of the working folder's file system; files is None if the file system does not count them.
    """

    plan: Plan
    path: Path
    rate: Rate | str
    free: tuple[int, int | None]

    @classmethod
    def of(cls, plan: Plan, path: Path, rate: Rate | str) -> PlanSummary:
        """Creates the summary of a plan, with the free space of its file system."""
        folder = existing_above(plan.work)
        inodes = os.statvfs(folder)
        return cls(plan, path, rate, (shutil.disk_usage(folder).free, inodes.f_favail if inodes.f_files else None))

    def seconds(self, processes: int) -> float | None:
        """Time of all tasks in this number of processes, if each reaches the measured rate; None without a rate."""
        if isinstance(self.rate, str):
            return None
        sizes = [int(task["bytes"]) for task in self.plan.tasks]
        return max(sum(sizes) / min(processes, len(sizes)), *sizes) / self.rate.per_second

    def commands(self) -> dict[str, str]:
        """The next commands, by a description of each. The first ones also commit."""
        file, count = shlex.quote(str(self.path)), len(self.plan)
        commands = {"here": f"actshard run {file} --workers {min(os.cpu_count() or 1, count)}"}
        if count > 1:
            commands |= {f"on {name}": f"actshard run {file} --on {name.lower()}" for name in ("Slurm", "Ray", "Dask")}
            elements = min(count, _MOST_ELEMENTS)
            task = shlex.quote(f"actshard run {file} --task {'$SLURM_ARRAY_TASK_ID' if elements == count else 'auto'}")
            commands["as an array"] = f"sbatch --wait --array=0-{elements - 1} --wrap {task}"
            commands["and then"] = f"actshard commit {file}"
        commands["progress"] = f"actshard status {file}"
        return commands

    def as_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        predicted = self.plan.predicted
        return {
            "plan": str(self.path),
            "id": self.plan.id,
            "verb": self.plan.verb,
            "work": str(self.plan.work),
            "tasks": len(self.plan),
            "notes": list(self.plan.notes),
            "predicted": {name: getattr(predicted, name) for name in predicted.__dataclass_fields__},
            "free": {"bytes": self.free[0], "files": self.free[1]},
            "not_measured": self.rate if isinstance(self.rate, str) else None,
            "rate": None
            if isinstance(self.rate, str)
            else {
                "bytes": self.rate.bytes,
                "seconds": self.rate.seconds,
                "bytes_per_second": self.rate.per_second,
            },
            "seconds": {str(n): self.seconds(n) for n in self._processes()},
            "next": self.commands(),
        }

    def _processes(self) -> list[int]:
        return sorted({1, min(_WORKERS, len(self.plan)), len(self.plan)})

    def time(self) -> str:
        """The predicted times as text."""
        serial_seconds = self.seconds(1)
        if isinstance(self.rate, str) or serial_seconds is None:
            return f"not measured: {self.rate}"
        if serial_seconds < 1:
            return "below 1 s in one process"
        shown = []
        for n in self._processes():
            seconds = self.seconds(n)
            assert seconds is not None
            shown.append(f"{duration(seconds)} in {'one process' if n == 1 else f'{n:,} processes'}")
        return (
            f"about {', '.join(shown)}: {size(int(self.rate.per_second))}/s in one process here, measured on "
            f"{size(self.rate.bytes)}. A shared disk or network may limit several processes."
        )


def show_plan(summary: PlanSummary) -> None:
    """Prints a plan's predicted size, memory and time, and the next commands."""
    plan, predicted = summary.plan, summary.plan.predicted
    how = "" if predicted.exact else ", predicted"
    lines: list[tuple[str, object]] = [
        ("plan", f"{escape(str(summary.path))}: {plan.verb} in {many(len(plan), 'task')}")
    ]
    if predicted.read:
        lines.append(("reads", size(predicted.read)))
    if predicted.bytes or predicted.files:
        lines.append(("writes", f"{size(predicted.bytes)} in {many(predicted.files, 'file')}{how}"))
    if predicted.scratch:
        lines.append(("scratch", f"{size(predicted.scratch)} until the commit"))
    files = "" if summary.free[1] is None else f", room for {summary.free[1]:,} files"
    lines += [
        ("free", f"{size(summary.free[0])}{files}, in {escape(str(plan.work))}"),
        ("memory", f"{size(predicted.memory)} per task"),
        ("time", escape(summary.time())),
    ]
    show_facts(lines, ())
    out = console()
    for note in plan.notes:
        out.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    width = max(map(len, summary.commands()))
    for what, command in summary.commands().items():
        out.print(f"[dim]{what:<{width}}[/]  {escape(command)}", soft_wrap=True)


# Runs tasks, and shows what is left.


_EVERY = 5.0
"""Seconds between two reports of ``--watch``."""
_SHOWN = 20
"""Maximum number of attempts and of errors to print."""


def tasks_named(words: Sequence[str], plan: Plan) -> list[int]:
    """Parses ``--task``: ``17``, ``0-63``, ``3,5`` or ``auto``."""
    tasks: list[int] = []
    for word in (part for text in words for part in text.split(",")):
        if word == "auto":
            tasks += plan.mine()
            continue
        first, dash, last = word.partition("-")
        if not all(n.isascii() and n.isdecimal() and len(n) < 10 for n in ((first, last) if dash else (first,))):
            raise ArgumentError(f"--task: expected a number, first-last or auto, found {word!r:.40}")
        a, b = int(first), int(last if dash else first)
        if not a <= b < len(plan):
            raise OutOfRangeError(f"--task: expected 0 to {len(plan) - 1}, found {word}")
        tasks += range(a, b + 1)
    return sorted(set(tasks))


def run(plan: Plan, on: str, *, quiet: bool, **options: Any) -> Any:
    """Runs tasks and shows progress."""
    with progress(plan.verb, quiet=quiet, unit="tasks") as watch:
        return runners.run(plan, on, progress=watch.counts, **options)


def commit(plan: Plan, file: str) -> object:
    """Commits a plan. If tasks are left, the error names the next command."""
    try:
        return plan.commit()
    except UnfinishedError as error:
        if error.detail.endswith(RUN_FIRST):
            error.detail += f": actshard run {shlex.quote(file)}"
        raise


def engine_options(**options: str | float) -> dict[str, object]:
    """Returns the given options with the types that engines expect. :func:`actshard.run` refuses options of other engines."""
    typed_options: dict[str, object] = {}
    for name, value in options.items():
        if (isinstance(value, float) and value.is_integer()) or (
            name == "time" and isinstance(value, str) and value.isdecimal()
        ):
            typed_options[name] = int(value)
        else:
            typed_options[name] = value
    return {name: value for name, value in typed_options.items() if value}


def statuses(plan: Plan, watch: bool) -> Iterator[Status]:
    """Yields the status; with ``watch``, repeatedly until every task is done or has failed.

    A driver retries failed tasks after all others have ended, and no task runs in between. So a second look must confirm the end.
    """
    ended = False
    while True:
        status = plan.status()
        yield status
        before, ended = ended, bool(status.failed) and not status.running and not status.missing
        if not watch or not status.left or (before and ended):
            return
        time.sleep(_EVERY)


def show_status(plan: Plan, status: Status, file: str) -> None:
    """Prints a plan's progress and the next command."""
    out = console()
    tasks = many(status.tasks, "task")
    if status.committed:
        out.print(f"{plan.verb}: {tasks}, committed")
        return
    counts = {"done": status.done, "running": status.running, "stopped": status.stopped, "failed": status.failed}
    shown = [f"{len(numbers):,} {what}" for what, numbers in {**counts, "missing": status.missing}.items() if numbers]
    speed = f", {status.bytes / status.seconds / 1e6:,.1f} MB/s per task" if status.bytes and status.seconds else ""
    out.print(f"{plan.verb}, {tasks}: {', '.join(shown)}{speed}{_time_left(plan, status)}", soft_wrap=True)
    for line in _details(status):
        out.print(f"  {line}", soft_wrap=True)
    if status.committing:
        out.print("  a commit was started and is not finished; if it was killed, run it again")
    # The error of a changed input advises to make the plan again.
    changed = any(isinstance(error, ChangedInputError) for error in status.failed.values())
    needs_run = not status.running and not changed and bool(status.failed or status.stopped)
    if needs_run or not status.left:
        how = ", with the same options: it runs the tasks that are not done" if status.left else ""
        verb = "run" if status.left else "commit"
        out.print(f"[dim]next: actshard {verb} {escape(shlex.quote(file))}{how}[/]", soft_wrap=True)


def _details(status: Status) -> Iterator[str]:
    """Yields lines about attempts, errors and missing tasks. Tasks with the same error share a line."""
    for attempt in status.running[:_SHOWN]:
        part = f", {100 * attempt.done // attempt.total} %" if attempt.total else ""
        yield f"running {attempt.task}: {escape(attempt.host)}, process {attempt.pid}{part}"
    yield from _more(status.running, "running")
    for attempt in status.stopped[:_SHOWN]:
        yield f"[yellow]stopped[/] {attempt.task}: {escape(attempt.host)}, process {attempt.pid}"
    yield from _more(status.stopped, "stopped")
    alike: dict[str, list[int]] = {}
    for task, error in status.failed.items():
        alike.setdefault(str(error), []).append(task)
    for text, tasks in list(alike.items())[:_SHOWN]:
        yield f"[red]failed[/] {ranges(tasks)}: {escape(spelled(text))}"
    yield from _more(alike, "errors")
    if status.missing:
        yield f"missing {ranges(status.missing)}"


def _more(entries: Sized, what: str) -> Iterator[str]:
    """Yields a line with the number of entries that are not printed, if any."""
    if len(entries) > _SHOWN:
        yield f"{what}: {len(entries) - _SHOWN:,} more, see --json"


def _time_left(plan: Plan, status: Status) -> str:
    """Remaining time at the speed of the finished tasks, with the number of processes that are running now; as text."""
    sizes = [max(int(task.get("bytes", 0)), 1) for task in plan.tasks]
    done_bytes = sum(sizes[task] for task in status.done)
    if not status.left or not done_bytes or not status.seconds:
        return ""
    seconds = status.seconds / done_bytes * (sum(sizes) - done_bytes)
    count = max(len(status.running), 1)
    return f", {duration(seconds / count)} left in {count:,} process{'es' if count > 1 else ''}"


def plain(outcome: object) -> object:
    """Returns the value of a commit as JSON values."""
    if isinstance(outcome, dict):
        from actshard.cli import stats

        return stats.as_dict(outcome)
    as_dict = getattr(outcome, "as_dict", None)
    return as_dict() if as_dict is not None else {"path": str(getattr(outcome, "path", outcome))}


def show_outcome(plan: Plan, outcome: object, *, quiet: bool = False) -> None:
    """Prints the value of a commit; and, unless ``quiet``, the file that keeps it."""
    if isinstance(outcome, Report):
        from actshard.cli import info

        info.show_report(outcome)
    elif isinstance(outcome, dict):
        from actshard.cli import stats

        stats.show_committed(plan.arguments, outcome)
    else:
        typer.echo(f"{getattr(outcome, 'path', outcome)}: {plan.verb} in {many(len(plan), 'task')}, committed")
        return
    if not quiet and (file := kept_at(plan.work)).exists():
        # On stderr: stdout is that of `actshard verify --deep` or `actshard stats`.
        text = f"result kept in {file}: another commit prints it again; remove the file when you are done"
        typer.echo(text.translate(ESCAPES), err=True)


def show_done(plan: Plan, tasks: Sequence[int]) -> None:
    """Prints which tasks were run, and how many tasks of the plan are done."""
    if not tasks:
        typer.echo("this process has no tasks: the plan has fewer tasks than there are processes")
        return
    status = plan.status()
    subject = f"task{'' if len(tasks) == 1 else 's'} {ranges(tasks)}"
    phrase = "task of the plan is" if status.tasks == 1 else "tasks of the plan are"
    over = "the plan is committed" if status.committed else f"{len(status.done):,} of {status.tasks:,} {phrase} done"
    typer.echo(f"{subject}: done; {over}")


def exit_status(outcome: object) -> int:
    """Returns the exit status: for a report that of ``actshard verify``, otherwise 0."""
    return outcome.status if isinstance(outcome, Report) else 0
