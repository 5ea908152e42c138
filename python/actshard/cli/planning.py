"""``actshard plan``: saves a plan, and prints its predicted size, memory and time, and the next commands."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base.errors import ActshardError, ExistsError
from actshard.base.work import existing_above
from actshard.cli._format import console, duration, show_facts, size
from actshard.cli._progress import progress
from actshard.plan import Plan, load
from actshard.plan.measuring import LIMIT, Rate, measure

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


def show(summary: PlanSummary) -> None:
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
