"""A plan as data, and its JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._json import MAX_BYTES, MAX_VALUES, Fields
from actshard.base._schema import Amount, Kind, Rule, json_values, read
from actshard.base.errors import ArgumentError, FormatError, boundary
from actshard.base.work import as_json, write_json_at_once
from actshard.reading.inputs import Input

VERSION = 1
"""Version of the JSON. A reader refuses plans of a later version."""
VERBS: dict[str, str] = {
    "convert": "actshard.plan.converting:Converting",
    "create": "actshard.plan.creating:Creating",
    "capture": "actshard.plan.capturing:Capturing",
    "stats": "actshard.plan.summing:Summing",
    "tokenize": "actshard.plan.tokenizing:Tokenizing",
    "verify": "actshard.plan.verifying:Verifying",
    "merge": "actshard.plan.merging:Merging",
    "stage": "actshard.plan.staging:Staging",
}
"""The kinds of plans, and where they are implemented."""
PLANS: dict[str, str] = {
    "create": "actshard.plan.creating:CreatePlan",
    "capture": "actshard.plan.capturing:CapturePlan",
}
"""The kinds whose plans have additional methods, and where their classes are."""


@dataclass(frozen=True)
class Predicted:
    """Predicted size, memory and disk space of a plan.

    Attributes:
        bytes: total size of the result's files.
        files: number of files of the result (inodes, without folders).
        read: bytes that the tasks read from the inputs, including gaps between rows. Not counted: reads to open the inputs
            (metadata, headers, the first decoded shard), and columns and lengths that tasks of a conversion read.
        memory: bytes of memory of a task's process, including the interpreter, with as many threads as this process uses. The
            page cache is not counted.
        scratch: bytes of additional disk space until the commit is done.
        exact: whether ``bytes`` and ``files`` are exact; if not, compressed sizes or the text of metadata were estimated.
    """

    bytes: Amount
    files: Amount
    read: Amount
    memory: Amount
    scratch: Amount = 0
    exact: bool = False


@dataclass(frozen=True)
class Planned:
    """Work on a dataset, divided into tasks: the data of a :class:`~actshard.plan.Plan`.

    Attributes:
        verb: ``"convert"``, ``"verify"``, ``"stats"``, ``"tokenize"``, ``"merge"``, ``"stage"``, ``"create"`` or ``"capture"``.
        arguments: the arguments of the planning function, as JSON values; paths are absolute.
        inputs: input files: name, size and version (modification time, or ETag). :meth:`commit` raises an error if one has
            changed. Of more than 4,096 files, evenly spaced ones.
        tasks: a description of each task, as JSON values; its ``bytes`` is its share of the work.
        predicted: predicted size, memory and disk space.
        work: the working folder, which all machines must share. Tasks write there; :meth:`commit` removes it.
    """

    verb: Annotated[str, Rule(f"one of {', '.join(VERBS)}", VERBS.__contains__)]
    arguments: Mapping[str, object]
    inputs: tuple[Input, ...]
    tasks: tuple[Mapping[str, Any], ...]
    predicted: Predicted
    work: Path
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Notes of the planner: why there are fewer tasks than requested, and what the result will not contain."""

    def __len__(self) -> int:
        return len(self.tasks)

    def __repr__(self) -> str:
        return (
            f"<actshard plan {self.id[:8]}: {self.verb} in {many(len(self), 'task')}, {self.predicted.bytes:,} bytes>"
        )

    @cached_property
    def id(self) -> str:
        """32 hexadecimal digits that depend on all attributes except ``predicted``, ``notes`` and ``work``."""
        return identity(self.verb, self.arguments, self.inputs, self.tasks)

    @cached_property
    def _typed(self) -> dict[object, Any]:
        return {}

    def arguments_as(self, kind: type[Kind], path: Path | None = None) -> Kind:
        """The arguments as a dataclass. Raises FormatError if they do not fit; ``path`` is the plan's file, for messages."""
        if kind not in self._typed:
            self._typed[kind] = read(kind, self.arguments, path or self.work, "arguments")
        arguments: Kind = self._typed[kind]
        return arguments

    def tasks_as(self, kind: type[Kind], path: Path | None = None) -> tuple[Kind, ...]:
        """The tasks as dataclasses. Raises FormatError if one does not fit; ``path`` is the plan's file, for messages."""
        if kind not in self._typed:
            self._typed[kind] = tuple(
                read(kind, task, path or self.work, f"tasks[{i}]") for i, task in enumerate(self.tasks)
            )
        tasks: tuple[Kind, ...] = self._typed[kind]
        return tasks

    # -- as a file -------------------------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "actshard_plan": VERSION,
            "id": self.id,
            "verb": self.verb,
            "arguments": dict(self.arguments),
            "inputs": [list(file) for file in self.inputs],
            "tasks": [dict(task) for task in self.tasks],
            "predicted": json_values(self.predicted),
            "work": str(self.work),
            "notes": list(self.notes),
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the plan as JSON. Returns the file's path. Any number of processes may call it at once.

        Raises:
            ArgumentError: the plan is too large for :func:`actshard.plan.load`.
        """
        file, value = _arguments.local_path(path), self.as_dict()
        self.check_size()
        with boundary(file, "write"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json_at_once(file, value, None)
        return file

    def check_size(self) -> None:
        """Raises ArgumentError if :func:`actshard.plan.load` would refuse the plan's size or paths."""
        try:
            json.dumps([str(self.work), dict(self.arguments)], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(
                "expected paths and names that UTF-8 can encode: plans are JSON", path=self.work
            ) from error
        text = as_json(self.as_dict(), None)
        values = sum(map(text.count, (b",", b"[", b"{")))
        if len(text) > MAX_BYTES or values > MAX_VALUES:
            raise ArgumentError(
                f"expected a plan of at most {MAX_BYTES:,} bytes of JSON and {MAX_VALUES:,} values, so that processes can load it, "
                f"found {len(text):,} bytes, {values:,} values: plan fewer files or examples at a time"
            )

    @classmethod
    def from_dict(cls, value: Any, path: Path) -> Self:
        """Builds the plan from :meth:`as_dict`; ``path`` is the file, for messages.

        Raises:
            FormatError: the values are not a plan, or were changed after it was made.
        """
        version = Fields(value, path).integer("actshard_plan")
        if version > VERSION:
            raise FormatError(
                f"field 'actshard_plan': expected at most {VERSION}, found {version}: a later release made this plan",
                path=path,
            )
        plan = read(cls, {name: item for name, item in value.items() if name not in ("actshard_plan", "id")}, path)
        if plan.id != value.get("id"):
            raise FormatError(
                f"field 'id': expected {plan.id}, found {value.get('id')!r:.60}: the file was changed; make the plan again",
                path=path,
            )
        return plan


def fewer(count: int, requested_count: int, why: str) -> list[str]:
    """A note that there are fewer tasks than requested, if so."""
    return [f"{many(count, 'task')} instead of {requested_count:,}: {why}"] if count < requested_count else []


def identity(verb: str, arguments: object, inputs: Iterable[Input], tasks: Iterable[object]) -> str:
    """:attr:`Plan.id` of a plan with these parts."""
    parts = [VERSION, verb, arguments, list(inputs), list(tasks)]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=json_values)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
