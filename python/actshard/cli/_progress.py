"""Shows progress of a long command: a bar on a terminal, one line per minute in a log file, nothing if quiet.

The public functions report progress with different signatures. Each is converted to a :class:`Step`, which one renderer shows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from actshard.base._arguments import many
from actshard.cli._format import duration, size

if TYPE_CHECKING:
    from actshard.tokens.building import BuildProgress
    from actshard.writing.capturing import CaptureProgress

_EVERY = 60.0
"""Seconds between two lines if stderr is not a terminal."""


@dataclass(frozen=True, slots=True)
class Step:
    """The state of a task.

    Attributes:
        done, total: units of work, for the bar and the remaining time; ``total`` is 0 while unknown.
        unit: the units' name. ``"bytes"`` are printed as KB, MB, ...
        bytes: bytes of the units done, if known: the speed is then in bytes.
        stage: the current stage; empty for a task with one stage.
        counts: formatted counts; None: ``done`` of ``total``.
        rate: formatted speed; None: computed from the reports.
    """

    done: int
    total: int
    unit: str = ""
    bytes: int = 0
    stage: str = ""
    counts: str | None = None
    rate: str | None = None


@dataclass(frozen=True, slots=True)
class _StepTexts:
    """The texts of a step."""

    counts: str
    rate: str
    time_left: str


class _Pace:
    """Computes speed and remaining time.

    Both start at the first report of a stage, because a resumed task begins with units that were done earlier.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first: Step | None = None
        self._began = 0.0

    def of(self, step: Step) -> _StepTexts:
        now, first = self._clock(), self._first
        if first is None or (first.stage, first.unit) != (step.stage, step.unit) or step.done < first.done:
            self._first = first = step
            self._began = now
        seconds, units = now - self._began, step.done - first.done
        remaining = duration(seconds / units * (step.total - step.done)) if units and step.total > step.done else ""
        return _StepTexts(_counts(step), _rate(step, first, seconds), f"{remaining} left" if remaining else "")


def _counts(step: Step) -> str:
    if step.counts is not None:
        return step.counts
    if step.unit == "bytes":
        return f"{size(step.done)} of {size(step.total)}" if step.total else size(step.done)
    counts = f"{step.done:,} of {step.total:,}" if step.total else f"{step.done:,}"
    return f"{counts} {step.unit}".rstrip()


def _rate(step: Step, first: Step, seconds: float) -> str:
    if step.rate is not None:
        return step.rate
    if seconds <= 0 or step.done == first.done:
        return ""
    if step.unit == "bytes":
        return f"{size(int((step.done - first.done) / seconds))}/s"
    if step.bytes > first.bytes:
        return f"{size(int((step.bytes - first.bytes) / seconds))}/s"
    rate = (step.done - first.done) / seconds
    return f"{rate:,.0f} {step.unit}/s" if rate >= 10 else f"{rate:.2g} {step.unit}/s"


class TaskWatch:
    """Progress callbacks of one task, one method per signature."""

    def __init__(self, show: Callable[[Step], None], unit: str, clock: Callable[[], float]) -> None:
        self._show = show
        self._unit = unit
        self._clock = clock
        self._began = clock()

    def counts(self, done: int, total: int, nbytes: int = 0) -> None:
        """For ``convert``, ``run``, ``push`` and ``Store.stats``: units done, total units, and bytes."""
        self._show(Step(done, total, self._unit, nbytes))

    def stage(self, what: str, done: int, total: int) -> None:
        """For ``verify`` and ``stage``: the units' name, units done, and total units."""
        self._show(Step(done, total, what))

    def capture(self, report: CaptureProgress) -> None:
        """For ``capture``: examples, tokens and bytes of rows."""
        seconds = max(report.seconds, 1e-3)
        self._show(
            Step(
                report.examples,
                report.examples_total,
                self._unit,
                counts=f"{report.examples:,} of {report.examples_total:,} examples, {many(report.tokens, 'token')}"
                if report.examples_total
                else f"{many(report.examples, 'example')}, {many(report.tokens, 'token')}",
                rate=f"{report.tokens / seconds:,.0f} tokens/s, {size(int(report.bytes / seconds))}/s",
            )
        )

    def build(self, report: BuildProgress) -> None:
        """For ``build_cache``: documents, tokens and bytes of sources."""
        skipped = f", {report.skipped:,} skipped" if report.skipped else ""
        seconds = max(self._clock() - self._began, 1e-3)
        self._show(
            Step(
                report.bytes,
                report.bytes_total,
                "bytes",
                stage=f"{report.stage}, {report.files_done} of {many(report.files, 'file')}",
                counts=f"{many(report.rows, 'doc')}, {many(report.tokens, 'token')}",
                rate=f"{report.rows / seconds:,.0f} docs/s, {report.tokens / seconds:,.0f} tokens/s{skipped}",
            )
        )


@contextmanager
def progress(
    what: str, *, quiet: bool, unit: str = "", clock: Callable[[], float] = time.monotonic
) -> Iterator[TaskWatch]:
    """Shows progress on stderr with speed and remaining time; nothing if ``quiet``.

    Args:
        what: the task's name.
        quiet: show nothing.
        unit: the name of the units that :meth:`TaskWatch.counts` counts.
        clock: returns seconds.
    """
    console = Console(stderr=True)
    if quiet:
        yield TaskWatch(lambda step: None, unit, clock)
        return
    if not console.is_terminal:
        yield TaskWatch(_lines(what, clock), unit, clock)
        return
    # No markup: names of files are shown as they are.
    columns = (
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[stage]}", style="dim", markup=False),
        BarColumn(),
        *(TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("counts", "rate", "left")),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, stage="", counts="", rate="", left="")
        pace = _Pace(clock)

        def draw(step: Step) -> None:
            shown = pace.of(step)
            fields: dict[str, Any] = {
                "stage": step.stage,
                "counts": shown.counts,
                "rate": shown.rate,
                "left": shown.time_left,
            }
            bar.update(task, completed=step.done, total=step.total or None, **fields)

        yield TaskWatch(draw, unit, clock)


def _lines(what: str, clock: Callable[[], float]) -> Callable[[Step], None]:
    """Returns a callback that prints one line per minute."""
    printed = clock()
    pace = _Pace(clock)

    def line(step: Step) -> None:
        nonlocal printed
        now = clock()
        shown = pace.of(step)
        if now - printed < _EVERY:
            return
        printed = now
        parts = ", ".join(part for part in (step.stage, shown.counts, shown.rate, shown.time_left) if part)
        print(f"{what}: {parts}", file=sys.stderr, flush=True)

    return line
