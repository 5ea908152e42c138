"""``Verb``: the interface that each kind of plan implements, in a module of this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

from actshard.base._json import show
from actshard.base._schema import Amount, Kind, MismatchError, Rule, is_file_text, read_value
from actshard.base.errors import FormatError

if TYPE_CHECKING:
    from actshard.plan.data import Planned


Opened = TypeVar("Opened")
Beat = Callable[[int, int], object]
"""Called by a running task with (units done, total units)."""


@dataclass(frozen=True)
class Result:
    """The result of a finished task.

    Attributes:
        task: its number.
        folder: its folder, with the files that it wrote, and ``result.json``.
        value: what :meth:`Verb.run` returned.
        seconds: its run time; for rates only.
    """

    task: int
    folder: Path
    value: dict[str, Any]
    seconds: float

    def read(self, kind: type[Kind]) -> Kind:
        """The value as a dataclass. Raises FormatError if it does not fit."""
        try:
            return read_value(kind, self.value)
        except MismatchError as error:
            raise self.error(error.described("value")) from error

    def error(self, text: str, path: Path | None = None) -> FormatError:
        """The error for a result, or a file of the task, that the task cannot have written."""
        remedy = f"remove the folder of task {self.task}, and run it again"
        return FormatError(f"task {self.task}: {text}; {remedy}", path=path or self.folder)

    def wrong(self, where: str, expected: str, found: object) -> FormatError:
        """The error for a value ``where`` that the task cannot have written."""
        shown = f"{found:,}" if type(found) is int else show(found)
        return self.error(f"{where}: expected {expected}, found {shown}")


class Verb(ABC, Generic[Opened]):
    """Runs the tasks of one kind of plan, and combines their results.

    A plan contains all data that an instance needs. Tasks are independent of each other and take no locks, and the files that they
    write do not depend on the time.
    """

    name: ClassVar[str]
    undivided: ClassVar[str] = "files, or examples, that are read or copied whole are larger than a sample of {limit}"
    """Reason that the user sees if :meth:`part` returns None."""
    _opened: tuple[str, Opened] | None = None

    def open(self, plan: Planned) -> Opened:
        """Opens what the tasks of a plan share: its dataset, or the list of its files."""
        raise NotImplementedError

    def opened(self, plan: Planned) -> Opened:
        """The result of :meth:`open`, which is kept for the next task of the same plan."""
        if self._opened is None or self._opened[0] != plan.id:
            self._opened = (plan.id, self.open(plan))
        return self._opened[1]

    @abstractmethod
    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> object:
        """Runs one task and returns its result: a dataclass, or JSON values, which must not depend on the machine or the time.

        Args:
            plan: the plan.
            task: the number of the task, described by ``plan.tasks[task]``.
            folder: an empty folder for this attempt, on the file system of :attr:`Planned.work`. The task writes all its files
                there and syncs them to the disk. The folder is renamed afterwards, so files must not contain its absolute path.
            tell: function called with the progress from time to time.

        Raises:
            ActshardError: the message names the input and the row.
        """

    def check_plan(self, plan: Planned, path: Path) -> None:
        """Raises FormatError if the arguments or tasks of a plan that was read from a file are invalid for this kind."""

    def check(self, plan: Planned, results: Sequence[Result]) -> None:
        """Raises FormatError if the tasks' results leave gaps or overlap. Called before a commit starts."""

    @abstractmethod
    def commit(self, plan: Planned, results: Sequence[Result]) -> object:
        """Combines the results of all tasks; returns the value of the function of this name (a Conversion, a Report, ...).

        Files are renamed; the metadata that makes them a dataset is written last. A killed commit is repeated, so each step must
        detect that it was already done. ``results`` are in task order; files that were renamed before may be missing.
        """

    def committed(self, plan: Planned) -> Any | None:
        """The value of :meth:`commit`, if the plan was committed and its working folder is gone; None if not, or if unknown."""
        return None

    def after(self, plan: Planned) -> None:
        """Called after the working folder of a committed plan was removed."""

    def part(self, plan: Planned, limit: int) -> Mapping[str, Any] | None:
        """A task of at most ``limit`` bytes that does the same work as the plan's tasks, to measure speed; None if there is none.

        Its result may be incomplete at the borders of its range.
        """
        return next((task for task in reversed(plan.tasks) if 0 < int(task["bytes"]) <= limit), None)

    def told(self, result: Mapping[str, Any]) -> tuple[int, int]:
        """(bytes read or written, units) of a finished task's result, for rates."""
        return int(result.get("bytes", 0)), int(result.get("units", 0))


def shortened(task: Mapping[str, Any], name: str, limit: int) -> dict[str, object] | None:
    """A task whose range ``task[name] = [first, end]`` is cut to about ``limit`` bytes; None if one element is larger."""
    first, end = task[name]
    size = int(task["bytes"])
    count = end - first if size <= limit else (end - first) * limit // size
    if not count or not size:
        return None
    return {**task, name: [first, first + count], "bytes": size * count // (end - first)}


# Fields that the plans of several verbs have. A plan's hash detects accidental changes, but not a program that writes plans.


def _is_place(text: str) -> bool:
    return (is_file_text(text) and Path(text).is_absolute()) or (text.isprintable() and "://" in text)


PlaceText = Annotated[str, Rule("an absolute path, or a URL", _is_place)]
LayoutValue = str | Mapping[str, object] | None
"""A description of files; see :func:`actshard.plan.reading.described`."""
OpenArguments = tuple[str | tuple[str, ...], str | None, LayoutValue]
"""Path, format and layout, as for :func:`actshard.open`."""


class Span(NamedTuple):
    """A range of examples, layers, files or leaves."""

    first: Amount
    end: Amount


@dataclass(frozen=True)
class ExamplesTask:
    """The examples that a task reads or writes."""

    examples: Span
    bytes: Amount


@dataclass(frozen=True)
class FilesTask:
    """The files that a task copies."""

    files: Span
    bytes: Amount


def check_spans(spans: Sequence[Span], name: str, count: int, path: Path) -> None:
    """Raises FormatError unless the tasks' ranges ``name`` follow each other from 0 to ``count``; ``path`` is the plan's file."""
    end = 0
    for i, span in enumerate(spans):
        if not end == span.first <= span.end:
            raise FormatError(
                f"field 'tasks[{i}].{name}': expected a range that starts at {end}, found {list(span)}",
                path=path,
                code="metadata",
            )
        end = span.end
    if end != count:
        raise FormatError(
            f"field 'tasks': expected ranges of {count:,} {name}, found {end:,}", path=path, code="metadata"
        )
