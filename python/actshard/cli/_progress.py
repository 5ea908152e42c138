"""Shows progress of a long command: a bar on a terminal, otherwise a line every ten seconds.

The public functions report progress with different signatures. Each is converted to a :class:`Step`, which one renderer shows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from actshard.cli._format import size

if TYPE_CHECKING:
    from actshard.tokens.building import BuildProgress

_EVERY = 10.0
"""Seconds between two lines if stderr is not a terminal."""


@dataclass(frozen=True, slots=True)
class Step:
    """The state of a task.

    Attributes:
        done, total: units of work, for the bar and the remaining time; ``total`` is 0 while unknown.
        rate: speed, formatted.
        label: the current stage, shown after the task's name; empty for a task with one stage.
        counts: formatted counts for a line; None for ``done`` of ``total``.
    """

    done: int
    total: int
    rate: str = ""
    label: str = ""
    counts: str | None = None


class TaskWatch:
    """Progress callbacks of one task, one method per signature."""

    def __init__(self, show: Callable[[Step], None]) -> None:
        self._show = show
        self._began = time.monotonic()

    def _seconds(self) -> float:
        return max(time.monotonic() - self._began, 1e-3)

    def counts(self, done: int, total: int, nbytes: int = 0) -> None:
        """For ``convert`` and ``Store.stats``: units done, total units, and bytes."""
        self._show(Step(done, total, f"{size(int(nbytes / self._seconds()))}/s" if nbytes else ""))

    def stage(self, what: str, done: int, total: int) -> None:
        """For ``verify``: the stage, its units done, and its total units."""
        self._show(Step(done, total, label=what))

    def build(self, now: BuildProgress) -> None:
        """For ``build_cache``: documents, tokens and bytes of sources."""
        skipped = f", {now.skipped:,} skipped" if now.skipped else ""
        seconds = self._seconds()
        self._show(
            Step(
                now.bytes,
                now.bytes_total,
                f"{now.rows / seconds:,.0f} docs/s, {now.tokens / seconds:,.0f} tokens/s{skipped}",
                f"{now.stage}, {now.files_done} of {now.files} files",
                f"{now.rows:,} docs, {now.tokens:,} tokens",
            )
        )


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[TaskWatch]:
    """Shows progress on stderr with speed and remaining time; nothing if ``quiet``."""
    console = Console(stderr=True)
    if quiet:
        yield TaskWatch(lambda step: None)
        return
    if not console.is_terminal:
        yield TaskWatch(_lines(what))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, rate="")

        def draw(step: Step) -> None:
            described = f"{what} [dim]{step.label}[/]" if step.label else what
            bar.update(task, completed=step.done, total=step.total or None, rate=step.rate, description=described)

        yield TaskWatch(draw)


def _lines(what: str) -> Callable[[Step], None]:
    """Returns a callback that prints a line every ten seconds."""
    told = began = time.monotonic()

    def line(step: Step) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < _EVERY:
            return
        told = now
        counts = step.counts if step.counts is not None else f"{step.done:,} of {step.total:,}"
        left = f"{(now - began) / step.done * (step.total - step.done):.0f} s left" if step.done else ""
        parts = ", ".join(part for part in (step.label, counts, step.rate, left) if part)
        print(f"{what}: {parts}", file=sys.stderr, flush=True)

    return line
