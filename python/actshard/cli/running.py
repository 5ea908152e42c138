"""``actshard run``, ``status`` and ``commit``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import typer
from rich.markup import escape

from actshard import runners
from actshard._arguments import many
from actshard.cli._format import console, duration
from actshard.cli._messages import spelled
from actshard.cli._progress import progress
from actshard.errors import ESCAPES, ArgumentError, ChangedInputError, OutOfRangeError, UnfinishedError
from actshard.plan import Plan, Status
from actshard.plan.plan import RUN_FIRST, ranges
from actshard.plan.reading import kept_at
from actshard.verifying import Report

_EVERY = 5.0
"""Seconds between two reports of ``--watch``."""
_SHOWN = 20
"""Maximum number of attempts and of errors to print."""


def tasks_named(words: Sequence[str], plan: Plan) -> list[int]:
    """Parses ``--task``: ``17``, ``0-63``, ``3,5`` or ``auto``."""
    made: list[int] = []
    for word in (part for each in words for part in each.split(",")):
        if word == "auto":
            made += plan.mine()
            continue
        first, dash, last = word.partition("-")
        if not all(n.isascii() and n.isdecimal() and len(n) < 10 for n in ((first, last) if dash else (first,))):
            raise ArgumentError(f"--task: expected a number, first-last or auto, found {word!r:.40}")
        a, b = int(first), int(last if dash else first)
        if not a <= b < len(plan):
            raise OutOfRangeError(f"--task: expected 0 to {len(plan) - 1}, found {word}")
        made += range(a, b + 1)
    return sorted(set(made))


def run(plan: Plan, on: str, *, quiet: bool, **options: Any) -> Any:
    """Runs tasks and shows progress."""
    with progress(plan.verb, quiet=quiet, unit="tasks") as watch:
        return runners.run(plan, on, progress=watch.counts, **options)


def commit(plan: Plan, file: str) -> Any:
    """Commits a plan. If tasks are left, the error names the next command."""
    try:
        return plan.commit()
    except UnfinishedError as error:
        if error.detail.endswith(RUN_FIRST):
            error.detail += f": actshard run {shlex.quote(file)}"
        raise


def engine_options(**given: str | float) -> dict[str, Any]:
    """Returns the given options with the types that engines expect. :func:`actshard.run` refuses options of other engines."""
    made: dict[str, Any] = {}
    for name, value in given.items():
        if (isinstance(value, float) and value.is_integer()) or (
            name == "time" and isinstance(value, str) and value.isdecimal()
        ):
            made[name] = int(value)
        else:
            made[name] = value
    return {name: value for name, value in made.items() if value}


def statuses(plan: Plan, watch: bool) -> Iterator[Status]:
    """Yields the status; with ``watch``, repeatedly until every task is done or has failed.

    A driver retries failed tasks after all others have ended, and no task runs in between. So a second look must confirm the end.
    """
    ended = False
    while True:
        now = plan.status()
        yield now
        before, ended = ended, bool(now.failed) and not now.running and not now.missing
        if not watch or not now.left or (before and ended):
            return
        time.sleep(_EVERY)


def show_status(plan: Plan, now: Status, file: str) -> None:
    """Prints a plan's progress and the next command."""
    out = console()
    tasks = many(now.tasks, "task")
    if now.committed:
        out.print(f"{plan.verb}: {tasks}, committed")
        return
    counts = {"done": now.done, "running": now.running, "stopped": now.stopped, "failed": now.failed}
    shown = [f"{len(some):,} {what}" for what, some in {**counts, "missing": now.missing}.items() if some]
    speed = f", {now.bytes / now.seconds / 1e6:,.1f} MB/s per task" if now.bytes and now.seconds else ""
    out.print(f"{plan.verb}, {tasks}: {', '.join(shown)}{speed}{_time_left(plan, now)}", soft_wrap=True)
    for line in _details(now):
        out.print(f"  {line}", soft_wrap=True)
    if now.committing:
        out.print("  a commit was started and is not finished; if it was killed, run it again")
    # The error of a changed input advises to make the plan again.
    changed = any(isinstance(error, ChangedInputError) for error in now.failed.values())
    again = not now.running and not changed and bool(now.failed or now.stopped)
    if again or not now.left:
        how = ", with the same options: it runs the tasks that are not done" if now.left else ""
        verb = "run" if now.left else "commit"
        out.print(f"[dim]next: actshard {verb} {escape(shlex.quote(file))}{how}[/]", soft_wrap=True)


def _details(now: Status) -> Iterator[str]:
    """Yields lines about attempts, errors and missing tasks. Tasks with the same error share a line."""
    for attempt in now.running[:_SHOWN]:
        part = f", {100 * attempt.done // attempt.total} %" if attempt.total else ""
        yield f"running {attempt.task}: {escape(attempt.host)}, process {attempt.pid}{part}"
    yield from _more(now.running, "running")
    for attempt in now.stopped[:_SHOWN]:
        yield f"[yellow]stopped[/] {attempt.task}: {escape(attempt.host)}, process {attempt.pid}"
    yield from _more(now.stopped, "stopped")
    alike: dict[str, list[int]] = {}
    for task, error in now.failed.items():
        alike.setdefault(str(error), []).append(task)
    for text, tasks in list(alike.items())[:_SHOWN]:
        yield f"[red]failed[/] {ranges(tasks)}: {escape(spelled(text))}"
    yield from _more(alike, "errors")
    if now.missing:
        yield f"missing {ranges(now.missing)}"


def _more(some: Sized, what: str) -> Iterator[str]:
    """Yields a line with the number of entries that are not printed, if any."""
    if len(some) > _SHOWN:
        yield f"{what}: {len(some) - _SHOWN:,} more, see --json"


def _time_left(plan: Plan, now: Status) -> str:
    """Remaining time at the speed of the finished tasks, with the number of processes that are running now; as text."""
    sizes = [max(int(task.get("bytes", 0)), 1) for task in plan.tasks]
    done = sum(sizes[task] for task in now.done)
    if not now.left or not done or not now.seconds:
        return ""
    seconds = now.seconds / done * (sum(sizes) - done)
    count = max(len(now.running), 1)
    return f", {duration(seconds / count)} left in {count:,} process{'es' if count > 1 else ''}"


def plain(made: Any) -> Any:
    """Returns the value of a commit as JSON values."""
    if isinstance(made, dict):
        from actshard.cli import stats

        return stats.as_dict(made)
    as_dict = getattr(made, "as_dict", None)
    return as_dict() if as_dict is not None else {"path": str(getattr(made, "path", made))}


def show(plan: Plan, made: Any, *, quiet: bool = False) -> None:
    """Prints the value of a commit; and, unless ``quiet``, the file that keeps it."""
    if isinstance(made, Report):
        from actshard.cli import verify

        verify.show(made)
    elif isinstance(made, dict):
        from actshard.cli import stats

        stats.show_committed(plan.arguments, made)
    else:
        typer.echo(f"{getattr(made, 'path', made)}: {plan.verb} in {many(len(plan), 'task')}, committed")
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
    now = plan.status()
    some = f"task{'' if len(tasks) == 1 else 's'} {ranges(tasks)}"
    whole = "task of the plan is" if now.tasks == 1 else "tasks of the plan are"
    over = "the plan is committed" if now.committed else f"{len(now.done):,} of {now.tasks:,} {whole} done"
    typer.echo(f"{some}: done; {over}")


def exit_status(made: Any) -> int:
    """Returns the exit status: for a report that of ``actshard verify``, otherwise 0."""
    return made.status if isinstance(made, Report) else 0
