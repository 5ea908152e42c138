"""``Verb``: what a kind of plan does. One file of this folder for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from actshard.plan.data import Planned

Beat = Callable[[int, int], object]
"""Called by a running task with (units done, units in all)."""


@dataclass(frozen=True)
class Result:
    """What a finished task left.

    Attributes:
        task: its number.
        folder: its folder, with the files that it wrote, and ``result.json``.
        value: what :meth:`Verb.run` returned.
        seconds: how long it ran; for rates only.
    """

    task: int
    folder: Path
    value: dict[str, Any]
    seconds: float


class Verb(ABC):
    """Runs the tasks of one kind of plan, and puts their results together.

    Plans are data: everything that an instance needs is in the plan. Tasks know nothing of each other, take no lock and read no
    clock that what they write depends on.
    """

    name: ClassVar[str]
    undivided: ClassVar[str] = "files, or examples, that are read or copied whole are larger than a sample of {limit}"
    """Why there is no :meth:`part`."""

    @abstractmethod
    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> dict[str, Any]:
        """Does one task and returns its result as JSON values, which may not depend on who runs it, or when.

        Args:
            plan: the plan.
            task: the number of the task; ``plan.tasks[task]`` tells what it is.
            folder: an empty folder of this attempt, on the file system of :attr:`Planned.work`. All files of the
                task are written there, synced to the disk. It is renamed when the task is done: no absolute path may be kept in it.
            tell: to be called now and then.

        Raises:
            ActshardError: the message tells which input, and which row.
        """

    def check_plan(self, plan: Planned, path: Path) -> None:  # noqa: B027 -- whatever is wrong is found when a task runs
        """Raises FormatError unless a plan that was read from a file has the arguments and tasks that this kind has."""

    def check(self, plan: Planned, results: Sequence[Result]) -> None:  # noqa: B027 -- most verbs have nothing to compare
        """Raises FormatError if the results of all tasks leave a hole, or overlap. Called before a commit begins."""

    @abstractmethod
    def commit(self, plan: Planned, results: Sequence[Result]) -> Any:
        """Puts the results of all tasks together; returns what the command of this name returns (a Conversion, a Report, ...).

        Files are renamed; what makes the dataset one comes last. A commit that was killed is repeated: each step finds what was
        done. ``results`` have the order of the tasks; their folders may lack files that were renamed before.
        """

    def committed(self, plan: Planned) -> Any | None:
        """What :meth:`commit` returned, if the plan was committed and its working folder is gone; None if not, or not known."""
        return None

    def after(self, plan: Planned) -> None:  # noqa: B027 -- most verbs leave nothing outside of the plan's working folder
        """Called when the working folder of a committed plan was removed."""

    def part(self, plan: Planned, limit: int) -> Mapping[str, Any] | None:
        """A task of at most ``limit`` bytes that does the same work as the plan's tasks, for a measurement; None: there is none.

        Its result may lack what a task's must have at its borders.
        """
        return next((task for task in reversed(plan.tasks) if 0 < int(task["bytes"]) <= limit), None)

    def told(self, result: Mapping[str, Any]) -> tuple[int, int]:
        """(bytes read or written, units) of a finished task's result, for rates."""
        return int(result.get("bytes", 0)), int(result.get("units", 0))


def shortened(task: Mapping[str, Any], name: str, limit: int) -> dict[str, Any] | None:
    """A task with fewer of its ``[first, end]`` under ``name``, of about ``limit`` bytes; None if one of them has more."""
    first, end = task[name]
    size = int(task["bytes"])
    count = end - first if size <= limit else (end - first) * limit // size
    if not count or not size:
        return None
    return {**task, name: [first, first + count], "bytes": size * count // (end - first)}
