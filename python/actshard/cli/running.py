"""``actshard run``, ``status`` and ``commit``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import typer
from rich.markup import escape

from actshard.base._arguments import many
from actshard.base.errors import ESCAPES, ArgumentError, ChangedInputError, OutOfRangeError, UnfinishedError
from actshard.cli._format import console, duration
from actshard.cli._messages import spelled
from actshard.cli._progress import progress
from actshard.plan import Plan, Status, runners
from actshard.plan.plan import RUN_FIRST, ranges
from actshard.plan.reading import kept_at
from actshard.reading.verifying import Report

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


def show(plan: Plan, outcome: object, *, quiet: bool = False) -> None:
    """Prints the value of a commit; and, unless ``quiet``, the file that keeps it."""
    if isinstance(outcome, Report):
        from actshard.cli import verify

        verify.show(outcome)
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
