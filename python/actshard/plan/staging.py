"""Plans of staged copies: tasks copy groups of files, or convert parts of some layers; the commit renames their files.

.. code-block:: text

    .FOLDER.actshard-stage/plan-XXXXXXXX/tasks/00017/files/...   the task's copies, with their names in the source
    .FOLDER.actshard-stage/plan-XXXXXXXX/new/                    the copy while the commit assembles it

Tasks copy whole files. If several tasks copied ranges of one file, they would have to write to a shared file, which a late task
could change after it is finished; or the commit would have to copy the ranges.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

import actshard._native as _native
from actshard import formats
from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._schema import OMITTED, Amount, MismatchError, Rule, is_file_name, is_file_text, json_values
from actshard.base.errors import (
    ActshardError,
    ChangedInputError,
    FormatError,
    MissingFileError,
    UnsupportedError,
    boundary,
)
from actshard.base.layers import Layer, several
from actshard.base.location import Location, is_url
from actshard.base.request import RECORD
from actshard.base.work import COLUMNS, FOLDER, PLAN_FOLDER, look, make_folder, refuse_within, remove, staging_folder
from actshard.plan import converting_checks, process
from actshard.plan.converting import Converting, convert
from actshard.plan.data import Planned, Predicted, fewer, identity
from actshard.plan.plan import Plan
from actshard.plan.verb import Beat, FilesTask, Result, Span, Verb, check_spans
from actshard.reading.inputs import told_versions
from actshard.writing.converting.blocks import balanced
from actshard.writing.converting.previewing import refuse_full
from actshard.writing.staging import find_source, put_layers
from actshard.writing.staging.folder import (
    Listed,
    Marker,
    Staged,
    check_digests,
    check_target,
    complete,
    copy,
    leave,
    link,
    list_files,
    most_in_memory,
    origin_of,
    put,
    recover,
    size_of,
    target_of,
    turn,
    unchanged,
    within,
)

# The arguments and tasks of plans of staged copies: their names and sizes determine which files are accessed.


def _is_source(text: str) -> bool:
    try:
        return (is_url(text) or (is_file_text(text) and Path(text).is_absolute())) and Location.of_any(text) is not None
    except ActshardError:
        return False


def _is_name(text: str) -> bool:
    """Whether a text is a relative path below a folder, and not a path that staging itself creates."""
    return is_file_name(text) and all(
        part in (RECORD, COLUMNS) or not part.startswith(FOLDER) for part in text.split("/")
    )


def _are_layers(layers: tuple[Layer, ...]) -> bool:
    try:
        return several(layers) == layers
    except ActshardError:
        return False


_Folder = Annotated[Path, Rule("a folder below /", lambda path: bool(path.name))]
_Below = Annotated[str, Rule("the name of a folder below the source", lambda name: name == "." or _is_name(name))]
_Inside = Annotated[str, Rule("the name of a folder", lambda name: not name or ("/" not in name and _is_name(name)))]


class StagedFile(NamedTuple):
    """A file of the source: its name below the dataset, size and version."""

    name: Annotated[str, Rule("the name of a file below the source", _is_name)]
    size: Amount
    version: str


def _are_apart(files: tuple[StagedFile, ...]) -> bool:
    names, folders = {file.name for file in files}, set[str]()
    for name in names:
        while (name := name.rpartition("/")[0]) and name not in folders:
            folders.add(name)
    return 0 < len(files) == len(names) and not names & folders


@dataclass(frozen=True)
class StageArguments:
    """The arguments of :func:`actshard.plan.stage`, and the source's files; see :class:`actshard.writing.staging.folder.Marker`.

    Attributes:
        folder: the folder to create.
        format: the source's format.
        files: the source's files.
        convert: the arguments of the conversion of some layers, except ``dst``; None: whole files are copied.
    """

    source: Annotated[str, Rule("an absolute path, or a URL", _is_source)]
    folder: _Folder
    layers: Annotated[tuple[Layer, ...], Rule("a list of names of layers", _are_layers)] | None
    revision: str | None
    origin: str | None
    below: _Below
    inside: _Inside
    format: str
    files: Annotated[
        tuple[StagedFile, ...], Rule("different names of files, none of which is a folder of others", _are_apart)
    ]
    convert: Mapping[str, object] | None = field(default=None, metadata=OMITTED)

    def __post_init__(self) -> None:
        if self.revision is not None and (not self.is_hub or len(self.source.split("/")) < 5):
            raise MismatchError("null, because the source is not a dataset on the hub", self.revision, "revision")
        if self.layers is None:
            return
        if self.format not in formats.written():
            raise MismatchError("a format that can be written", self.format, "format")
        convert = {} if self.convert is None else self.convert
        same = {"src": self.place, "format": self.format}
        if convert and ("dst" in convert or same != {name: convert.get(name) for name in same}):
            raise MismatchError(f"the arguments of a conversion of {self.place}", convert, "convert")

    @property
    def staging(self) -> Path:
        """The hidden folder next to the copy."""
        return staging_folder(self.folder)

    @property
    def is_hub(self) -> bool:
        """Whether the source is on the hub."""
        return self.source.startswith("hf://")

    def location(self) -> Location:
        """A new location of the source, without cached listings."""
        return Location.of_any(self.source)

    @property
    def place(self) -> str:
        """Path or URL of the dataset; on the hub, with the commit that the plan was made for."""
        text = self.source
        if self.is_hub and self.revision is not None:
            parts = text.split("/")
            parts[4] = f"{parts[4].partition('@')[0]}@{self.revision}"  # hf://datasets/ORG/NAME@REVISION
            text = "/".join(parts)
        return text if self.below == "." else f"{text.rstrip('/')}/{self.below}"

    def listed(self, first: int = 0, end: int | None = None) -> Listed:
        """Files of the dataset."""
        return {file.name: (file.size, file.version) for file in self.files[first:end]}

    def marker(self) -> Marker:
        """The copy's marker, without the copy's files."""
        layers = None if self.layers is None else list(self.layers)
        return Marker(
            self.source, self.revision, layers, self.below, self.inside, self.listed(), {}, [], origin=self.origin
        )

    def done(self) -> Staged | None:
        """The copy in the folder, if it is complete and consists of these files."""
        prefix = "" if self.below == "." else f"{self.below}/"
        files = {f"{prefix}{name}": entry for name, entry in self.listed().items()}
        return complete(self.location(), self.folder, self.layers, files)


def check_tasks(plan: Planned, files: tuple[StagedFile, ...], path: Path) -> None:
    """Raises FormatError unless the tasks copy all files; ``path`` is the plan's file."""
    tasks = plan.tasks_as(FilesTask, path)
    check_spans([task.files for task in tasks], "files", len(files), path)
    for i, task in enumerate(tasks):
        total = sum(file.size for file in files[slice(*task.files)])
        if total != task.bytes or task.files.first == task.files.end:
            raise FormatError(
                f"field 'tasks[{i}].bytes': expected {total:,}, the size of its files, found {task.bytes:,}",
                path=path,
                code="metadata",
            )


FILES = "files"
_NETWORK = 14 << 20
"""Bytes of memory of the threads, certificates and connections of a remote source, measured on Linux. A constant, because a
measurement would need more requests."""
_LISTED = 1000
"""Bytes of memory per file of the plan."""
_FILE_WEIGHT = 4096
"""Bytes added to the size of each file, so that small files are divided, too."""


def stage(
    url: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    layers: Sequence[Layer] | Layer | None = None,
    *,
    tasks: int = 64,
) -> Plan:
    """Plans a staged copy. The result is the same folder as that of :func:`actshard.stage`.

    Lists the source's files, reads metadata, and writes nothing. A task copies whole files; unchanged files of an older copy in
    ``folder`` are linked. With ``layers`` the tasks are those of a conversion. If the copy is already complete,
    ``plan.status().committed`` is True.

    Args:
        url: as for :func:`actshard.stage`. Credentials come from each machine's environment; the plan contains none.
        folder: the folder to create, which all machines must share. Tasks write to a hidden folder next to it. An older copy stays
            readable until the commit replaces it.
        layers: as for :func:`actshard.stage`.
        tasks: maximum number of tasks. There are fewer if the source has fewer files; see ``plan.notes``.

    Returns:
        The plan; its ``commit()`` returns a :class:`~actshard.writing.staging.Staged`. The predicted ``bytes`` and ``files`` do not
        count the marker file.

    Raises:
        Errors of :func:`actshard.stage`, before anything is written.
        UnfinishedError: another plan is staging to the folder.
        DiskFullError: the file system of ``folder`` has too little free space.
    """
    target = target_of(folder)
    chosen = None if layers is None else several(layers)
    tasks = _arguments.whole(tasks, "tasks", 1)
    source = Location.of_any(url)
    if not source.lists:
        raise UnsupportedError("a web server cannot list files to stage. Use actshard.convert", path=source)
    if source.is_local:
        refuse_within(target, source.local)
    with boundary(target, "plan to stage to"):
        return _make_plan(source, target, chosen, tasks)


def _make_plan(source: Location, target: Path, layers: tuple[Layer, ...] | None, tasks: int) -> Plan:
    location, format, marker = find_source(source, list_files(source), layers)
    files = tuple(StagedFile(name, size, version) for name, (size, version) in marker.listed.items())
    arguments = StageArguments(
        marker.source, target, layers, marker.revision, marker.origin, marker.below, marker.inside, format, files
    )
    if layers is None:
        plan_tasks, notes = _split_tasks(marker.listed, tasks)
        total = sum(size for size, _ in marker.listed.values())
        predicted = Predicted(total, len(marker.listed), total, _memory(marker.listed, plan_tasks, source), exact=True)
        work = _work(target, arguments, (), plan_tasks)
        plan = Plan("stage", json_values(arguments), (), tuple(json_values(plan_tasks)), predicted, work, tuple(notes))
        unchanged_files = unchanged(marker.listed, target, source)
        needed = sum(size for name, (size, _) in marker.listed.items() if name not in unchanged_files)
    else:
        inner = convert(
            arguments.place,
            staging_folder(target) / "new",
            format,
            tasks=tasks,
            layers=layers,
            src_format=format,
            **formats.get(format).carrying().copy_options(location, marker.listed),
        )
        arguments = replace(arguments, convert={k: value for k, value in inner.arguments.items() if k != "dst"})
        work = _work(target, arguments, inner.inputs, inner.tasks)
        plan = Plan("stage", json_values(arguments), inner.inputs, inner.tasks, inner.predicted, work, inner.notes)
        needed = inner.predicted.bytes
    look(target).refuse("staging", own_plan=plan.work)
    if plan.implementation.committed(plan) is None:
        check_target(source, target, layers)
        if not plan.book.exists():
            refuse_full(target, needed, plan.predicted.files + 4 * len(plan))
    return plan


def _memory(files: Listed, tasks: Sequence[FilesTask], source: Location) -> int:
    """Bytes of memory of the process of the largest task."""
    sizes = [size for size, _ in files.values()]
    buffers = max(most_in_memory(sizes[slice(*task.files)]) for task in tasks)
    return process.importing(__name__) + _NETWORK * source.is_remote + _LISTED * len(sizes) + buffers


def _work(target: Path, *parts: Any) -> Path:
    return staging_folder(target) / f"{PLAN_FOLDER}{identity('stage', *parts)[:8]}"


def _split_tasks(files: Listed, tasks: int) -> tuple[list[FilesTask], list[str]]:
    """Returns the tasks, and notes about them."""
    sizes = [size for size, _ in files.values()]
    firsts = balanced(np.array(sizes, np.int64) + _FILE_WEIGHT, np.arange(len(sizes)), tasks)
    plan_tasks = [
        FilesTask(Span(a, b), sum(sizes[a:b])) for a, b in zip(firsts, [*firsts[1:], len(sizes)], strict=True)
    ]
    notes = fewer(len(plan_tasks), tasks, f"{many(len(sizes), 'file', 'is', 'are')} copied, each by one task")
    share, (largest, name) = sum(sizes) / len(plan_tasks), max(zip(sizes, files, strict=True))
    if largest > 2 * share:
        notes.append(f"one task copies {largest:,} bytes, the average is {share:,.0f}: {name} is copied by one task")
    return plan_tasks, notes


@dataclass(frozen=True)
class _StageResult:
    """The result of a task that copies files; ``fetched``: bytes that it read from the source."""

    files: Span
    bytes: Amount
    fetched: Amount
    units: Amount


class Staging(Verb[tuple[Planned, Converting]]):
    """Runs the tasks of a staged copy."""

    name = "stage"

    def open(self, plan: Planned) -> tuple[Planned, Converting]:
        """The plan and verb that convert the layers to a folder in this plan's working folder."""
        arguments = {**(plan.arguments_as(StageArguments).convert or {}), "dst": str(plan.work / "new")}
        inner = Planned("convert", arguments, plan.inputs, plan.tasks, plan.predicted, plan.work)
        return inner, Converting()

    def check_plan(self, plan: Planned, path: Path) -> None:
        """Raises FormatError for arguments or tasks that :func:`stage` does not make."""
        arguments = plan.arguments_as(StageArguments, path)
        if plan.work != (hidden := _work(arguments.folder, plan.arguments, plan.inputs, plan.tasks)):
            raise FormatError(f"field 'work': expected {hidden}, found {plan.work}", path=path)
        if arguments.layers is None:
            check_tasks(plan, arguments.files, path)
        else:
            converting_checks.check_plan(self.opened(plan)[0], path)  # without check_work: its folder is this plan's

    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> object:
        """Copies the task's files, or converts its part of the layers."""
        arguments = plan.arguments_as(StageArguments)
        source = arguments.location()
        origin, expected = origin_of(source), arguments.origin
        if origin is not None and expected is not None and origin != expected:
            raise ChangedInputError(
                f"expected origin {expected}, found {origin}: this URL refers to another server or account than when the plan was "
                "made. Restore the environment variables, or make the plan again.",
                path=source,
            )
        if arguments.layers is not None:
            inner, verb = self.opened(plan)
            return verb.run(inner, task, folder, tell)
        span = plan.tasks_as(FilesTask)[task].files
        task_files, base, dataset = arguments.listed(*span), folder / FILES, Location.of_any(arguments.place)
        make_folder(base)
        unchecked = link(base, task_files, arguments.folder, source)
        missing = {name: entry for name, entry in task_files.items() if size_of(f"{base}/{name}") != entry[0]}
        _copy(dataset, missing, folder, tell)
        if arguments.is_hub:
            check_digests(base, {name: version for name, (_, version) in unchecked.items()})
        else:
            # A remote store remembers the version that it read, so this sends no requests.
            _compare(dataset, missing)
        try:
            formats.get(arguments.format).check_copy(base, dataset, task_files)
        except FormatError:
            _compare(dataset, arguments.listed())  # if the ledger is a newer one, raises ChangedInputError instead
            raise
        total, fetched = (sum(size for size, _ in files.values()) for files in (task_files, missing))
        return _StageResult(span, total, fetched, len(task_files))

    def check(self, plan: Planned, results: Sequence[Result]) -> None:
        """Raises FormatError if a copy is missing or has another size, ChangedInputError if the source changed."""
        arguments = plan.arguments_as(StageArguments)
        if arguments.layers is not None:
            inner, verb = self.opened(plan)
            verb.check(inner, results)
        else:
            for result in results:
                result.read(_StageResult)
                for name, (size, _) in arguments.listed(*plan.tasks_as(FilesTask)[result.task].files).items():
                    if (copied_size := size_of(f"{result.folder}/{FILES}/{name}")) != size:
                        what = f"expected {size:,} bytes, found {'no file' if copied_size < 0 else f'{copied_size:,}'}"
                        raise result.error(what, result.folder / FILES / name)
        if arguments.is_hub:  # files of a commit do not change
            return
        source, subfolder = arguments.location(), arguments.below
        try:
            current = within(list_files(source), subfolder)
        except MissingFileError:
            current = {}
        before = arguments.listed()
        for name in dict.fromkeys([*before, *current]):
            if current.get(name) != before.get(name):
                raise _changed(source / subfolder / name, before.get(name), current.get(name))

    def commit(self, plan: Planned, results: Sequence[Result]) -> Staged:
        """Assembles the tasks' copies to a folder, and renames it to its place."""
        arguments = plan.arguments_as(StageArguments)
        if (over := arguments.done()) is not None:
            return over
        new_folder, old = plan.work / "new", arguments.staging / "old"
        with turn(arguments.staging):  # actshard.stage may have started before the plan
            recover(arguments.folder, new_folder, old)
            if (over := arguments.done()) is not None:
                return over
            check_target(arguments.location(), arguments.folder, arguments.layers)
            if arguments.layers is not None:
                inner, verb = self.opened(plan)
                return put_layers(
                    arguments.marker(), verb.commit(inner, results), None, arguments.folder, new_folder, old
                )
            marker, base = arguments.marker(), new_folder / arguments.inside
            make_folder(base)
            # Files that a killed commit has renamed are missing here.
            _native.move_files([result.folder / FILES for result in results], base, [])
            files = {name: size for name, (size, _) in marker.listed.items()}
            fetched = sum(result.read(_StageResult).fetched for result in results)
            return put(marker, files, fetched, arguments.folder, new_folder, old)

    def committed(self, plan: Planned) -> Staged | None:
        """The copy, if it is complete."""
        return plan.arguments_as(StageArguments).done()

    def after(self, plan: Planned) -> None:
        """Removes the folder of working folders if it is empty."""
        leave(plan.arguments_as(StageArguments).staging)


def _copy(dataset: Location, missing: Listed, folder: Path, tell: Beat) -> None:
    """Copies files of a dataset into a task's folder."""
    base, parts = folder / FILES, folder / "parts"
    if dataset.is_local:  # a local source may be written meanwhile, so versions are compared before and after
        _compare(dataset, missing)
    try:
        copy(
            dataset,
            {name: size for name, (size, _) in missing.items()},
            base,
            parts,
            lambda _, n, total: tell(n, total),
        )
    except (FormatError, MissingFileError):
        _compare(dataset, missing)  # if a file was truncated or removed, raises ChangedInputError instead
        raise
    remove(parts)


def _compare(dataset: Location, files: Listed) -> None:
    for name, (size, version) in files.items():
        stat = (dataset / name).found()
        current = None if stat is None else (stat.size, stat.version)
        if current != (size, version):
            raise _changed(dataset / name, (size, version), current)


def _changed(file: Location, before: tuple[int, str] | None, current: tuple[int, str] | None) -> ChangedInputError:
    if before is None:
        what = "expected no file, as when the plan was made, found one"
    elif current is None:
        what = f"expected a file of {before[0]:,} bytes, as when the plan was made, found nothing"
    elif current[0] != before[0]:
        what = f"expected {before[0]:,} bytes, as when the plan was made, found {current[0]:,}"
    else:
        # The version of a local file contains its size, modification time and number.
        versions = [int(v.split("-")[1]) if file.is_local else v for v in (before[1], current[1])]
        what = f"was written again since the plan was made: {told_versions(*versions)}"
    return ChangedInputError(f"{what}. Make the plan again.", path=file)
