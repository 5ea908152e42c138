"""Plans of merges: tasks copy the files that cannot be linked, and the commit links the others and renames the copies.

.. code-block:: text

    DST/.actshard/plan-XXXXXXXX/tasks/00017/files/...         the task's copies, with the names that they get below DST

For most formats nothing is copied: files are linked, and the merged metadata lists them. saev's shards are copied if a part does
not start at a shard border of the merged dataset. All files are copied if ``dst`` is on another file system than the parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from actshard import formats
from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._schema import Rule, is_file_text, json_values
from actshard.base.errors import ActshardError, ArgumentError, ArgumentTypeError, InternalError, boundary
from actshard.base.request import RECORD, Request
from actshard.base.work import (
    as_json,
    existing_above,
    look,
    make_folder,
    names_like,
    sync_folders,
)
from actshard.formats.merging import Assembled, Merge
from actshard.plan import process
from actshard.plan.book import remove_work_folders, work_folder
from actshard.plan.data import Planned, Predicted, fewer, identity
from actshard.plan.plan import Plan
from actshard.plan.verb import Beat, FilesTask, Result, Span, Verb, check_spans
from actshard.reading.finding import is_finished
from actshard.reading.inputs import LOOKED_AT, Input, inputs_of
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.writing.converting.blocks import balanced
from actshard.writing.converting.previewing import refuse_full
from actshard.writing.existing import check_written
from actshard.writing.merging import MergeRequest, check_merge, merger_of, run_merge

FILES = "files"
_LISTED = 1000
"""Bytes of memory per file of the plan."""
_FILE_WEIGHT = 4096
"""Bytes added to the size of each file, so that small files are divided, too."""
_LEAST_INPUTS = 16


def merge(
    dst: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]],
    *,
    tasks: int = 64,
    physical: bool = False,
    different_models: bool = False,
    work: str | os.PathLike[str] | None = None,
) -> Plan:
    """Plans a merge. The result is byte-identical to that of :func:`actshard.merge`.

    Runs all checks and reads the metadata of the parts, but writes nothing.

    Args:
        dst: a new folder, which all machines must share.
        parts: datasets of one format, merged in this order; they are not changed.
        tasks: maximum number of tasks. There are fewer if fewer files must be copied, and one if none; see ``plan.notes``.
        physical: for Zarr, write one store.
        different_models: also merge datasets of different models.
        work: working folder, on the file system of ``dst``; None: a hidden folder in ``dst``.

    Raises:
        Errors of :func:`actshard.merge`, before anything is written.
        DiskFullError: the file system of ``dst`` has too little free space for the copies.
    """
    root = _arguments.local_path(dst, "dst")
    tasks = _arguments.whole(tasks, "tasks", 1)
    if parts is None:
        raise ArgumentTypeError(
            "parts: expected a list of paths, found None; actshard.merge merges parts written below one folder"
        )
    request = MergeRequest.of(parts, physical, different_models)
    with boundary(root, "plan a merge to"):
        return _make_plan(root, request, tasks, None if work is None else _arguments.local_path(work, "work"))


def _make_plan(root: Path, request: MergeRequest, tasks: int, work: Path | None) -> Plan:
    merge_spec = check_merge(root, request)
    merger = merger_of(merge_spec.format)
    stores = [open_quietly(path, merge_spec.format, "auto") for path in merge_spec.parts]
    copies_all = any(_device(part) != _device(root) for part in merge_spec.parts)
    if merge_spec.request is None:
        raise InternalError("expected the request of the merge", path=root)
    arguments = MergeArguments(
        root,
        request.parts or (),
        merge_spec.parts,
        merge_spec.format,
        request.physical,
        request.different_models,
        copies_all,
        os.path.relpath(merger.place(merge_spec), root),
        merge_spec.request.as_dict(),
    )
    files = _files(merge_spec, copies_all)
    plan_tasks, notes = _split_tasks(files, tasks, merge_spec.format)
    inputs = _inputs(stores)
    plan_id = identity("merge", arguments, inputs, plan_tasks)
    if work is not None and plan_tasks[-1].files.end and _device(work) != _device(root):
        raise ArgumentError(
            "work: expected a folder on the file system of dst, so that the commit can rename copies", path=work
        )
    work = work or work_folder(root, plan_id, dumps=merger.names_itself)
    look(root).refuse("planned", "planned dumps", "staging", own_plan=work)
    predicted = _predict(merge_spec, files, copies_all, stores, inputs)
    if not work.exists():
        refuse_full(root, predicted.read, len(files) + 4 * len(plan_tasks))
    return Plan("merge", json_values(arguments), inputs, tuple(json_values(plan_tasks)), predicted, work, tuple(notes))


def _is_place(text: str) -> bool:
    return is_file_text(text) and text not in ("", "..") and "/" not in text


def _is_merged(format: str) -> bool:
    return format in formats.names() and formats.get(format).merger() is not None


@dataclass(frozen=True)
class MergeArguments:
    """The arguments of :func:`merge`.

    Attributes:
        dst, parts, physical, different_models: as they were passed.
        datasets: the datasets at ``parts``.
        format: their format.
        apart: whether all files are copied, because the parts are on another file system.
        place: the merged dataset's folder, relative to ``dst``.
        request: the record of the merged dataset.
    """

    dst: Path
    parts: tuple[Path, ...]
    datasets: tuple[Path, ...]
    format: Annotated[str, Rule("a format whose datasets can be merged", _is_merged)]
    physical: bool
    different_models: bool
    apart: bool
    place: Annotated[str, Rule("the name of a folder in dst, or .", _is_place)]
    request: Mapping[str, object]


def _device(path: Path) -> int:
    return existing_above(path).stat().st_dev


def _files(merge_spec: Merge, copies_all: bool) -> list[Assembled]:
    """The files that tasks copy. With ``copies_all`` all files, because files on another file system cannot be linked."""
    merger = merger_of(merge_spec.format)
    return [*merger.assembled(merge_spec), *(_linked_files(merge_spec) if copies_all else ())]


def _linked_files(merge_spec: Merge) -> Iterator[Assembled]:
    """The files that a merge moves or links."""
    for source, target in merger_of(merge_spec.format).taken(merge_spec):
        name = target.relative_to(merge_spec.path).as_posix()
        yield from (Assembled(f"{name}{suffix}", ((file, 0, n, 0),), n) for file, suffix, n in _below(source))


def _below(source: Path) -> Iterator[tuple[Path, str, int]]:
    """Yields the files of a folder, or a single file: (file, ``/`` and its path in the folder, bytes)."""
    if not source.is_dir():
        yield source, "", source.stat().st_size
        return
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted({*names} - {RECORD}):  # the merged dataset has its own
            file = Path(folder, name)
            yield file, f"/{file.relative_to(source).as_posix()}", file.stat().st_size


def _split_tasks(files: Sequence[Assembled], tasks: int, format: str) -> tuple[list[FilesTask], list[str]]:
    """Returns the tasks, and notes about them."""
    if not files:
        why = f"1 task: no files of {format} datasets on one file system are copied; the commit links them"
        return [FilesTask(Span(0, 0), 0)], [why]
    weights = np.array([file.bytes + _FILE_WEIGHT for file in files])
    firsts = balanced(weights, np.arange(len(files)), tasks)
    ends = [*firsts[1:], len(files)]
    plan_tasks = [FilesTask(Span(a, b), sum(f.bytes for f in files[a:b])) for a, b in zip(firsts, ends, strict=True)]
    return plan_tasks, fewer(
        len(plan_tasks), tasks, f"{many(len(files), 'file', 'is', 'are')} copied, each by one task"
    )


def _inputs(stores: Sequence[Store]) -> tuple[Input, ...]:
    """The files of the parts, to detect changes. The more parts, the fewer files of each are checked."""
    most = max(_LEAST_INPUTS, LOOKED_AT // len(stores))
    sample: list[Input] = []
    for store in stores:
        inputs = inputs_of(store) or ()
        # The last inputs are the files in the dataset's folder, including its metadata.
        sample += dict.fromkeys((*inputs[:: max(1, -(-len(inputs) // most))], *inputs[-_LEAST_INPUTS:]))
    return tuple(sample)


def _predict(
    merge_spec: Merge, files: Sequence[Assembled], copies_all: bool, stores: Sequence[Store], inputs: Sequence[Input]
) -> Predicted:
    merger = merger_of(merge_spec.format)
    names, size, exact = merger.beside(merge_spec)
    count = len(names)
    memory = process.importing(__name__)
    if files:  # otherwise tasks open no part
        memory = process.importing(__name__, type(merger).__module__, *process.readers(inputs))
        memory += sum(store.rows.table_bytes() for store in stores if store.layers) + _LISTED * len(files)
    copied = sum(file.bytes for file in files)
    every = list(files) if copies_all else [*files, *_linked_files(merge_spec)]
    if merge_spec.request is not None:
        names = [*names, *(f.name.partition("/")[2] if merger.names_itself else f.name for f in every)]
        checksums = dict.fromkeys(names_like(formats.get(merge_spec.format).checked_files, names), "0" * 8)
        count, size = count + 1, size + len(as_json(replace(merge_spec.request, checksums=checksums).as_dict()))
    return Predicted(size + sum(f.size for f in every), count + len(every), copied, memory, exact=exact)


class Merging(Verb[list[Assembled]]):
    """Runs the tasks of a merge."""

    name = "merge"

    def open(self, plan: Planned) -> list[Assembled]:
        """The files that tasks copy."""
        arguments = plan.arguments_as(MergeArguments)
        options = {"physical": arguments.physical}
        return _files(Merge(arguments.dst, arguments.format, arguments.datasets, False, options), arguments.apart)

    def check_plan(self, plan: Planned, path: Path) -> None:
        """Raises FormatError for arguments or tasks that :func:`merge` does not make."""
        arguments = plan.arguments_as(MergeArguments, path)
        Request.from_dict(arguments.request, path)
        spans = [task.files for task in plan.tasks_as(FilesTask, path)]
        check_spans(spans, "files", spans[-1].end if spans else 0, path)

    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> Mapping[str, object]:
        """Copies the task's files."""
        part = plan.tasks_as(FilesTask)[task]
        copied_bytes = 0

        def copied(count: int) -> None:
            nonlocal copied_bytes
            copied_bytes += count
            tell(copied_bytes, part.bytes)

        for file in self._files(plan, part):
            target = folder / FILES / file.name
            make_folder(target.parent)
            try:
                file.write(target, copied)
            except ActshardError as error:
                error.detail = f"copying to {file.name}: {error.detail}"
                raise
        sync_folders(Path(path) for path, _, _ in os.walk(folder))
        return {"files": part.files, "bytes": part.bytes, "units": part.files.end - part.files.first}

    def check(self, plan: Planned, results: Sequence[Result]) -> None:
        """Raises FormatError if a copy is missing or has another size."""
        for result in results:
            for file, copy in self._copies(plan, result):
                size = copy.stat().st_size if copy.is_file() else None
                if size != file.size:
                    what = f"expected {file.size:,} bytes, found {'no file' if size is None else f'{size:,}'}"
                    raise result.error(what, copy)

    def _files(self, plan: Planned, task: FilesTask) -> list[Assembled]:
        return self.opened(plan)[slice(*task.files)] if task.files.end > task.files.first else []

    def _copies(self, plan: Planned, result: Result) -> list[tuple[Assembled, Path]]:
        """The files of a finished task, with the paths of their copies."""
        files = self._files(plan, plan.tasks_as(FilesTask)[result.task])
        return [(file, result.folder / FILES / file.name) for file in files]

    def commit(self, plan: Planned, results: Sequence[Result]) -> Path:
        """Merges the parts, using the tasks' copies; returns the dataset's path."""
        if (over := self.committed(plan)) is not None:
            return over
        arguments = plan.arguments_as(MergeArguments)
        copies = {file.name: copy for result in results for file, copy in self._copies(plan, result)}
        request = MergeRequest(
            arguments.parts, arguments.physical, arguments.different_models, plan=plan.work, copies=copies
        )
        return run_merge(arguments.dst, request)

    def committed(self, plan: Planned) -> Path | None:
        """The path of the merged dataset, if it is finished."""
        arguments = plan.arguments_as(MergeArguments)
        dataset_path = arguments.dst / arguments.place
        if "merging" in look(arguments.dst).kinds() or not is_finished(dataset_path, arguments.format):
            return None
        check_written(Request.from_dict(arguments.request, plan.work), dataset_path)
        return dataset_path

    def after(self, plan: Planned) -> None:
        """Removes the folder of working folders if it is empty."""
        remove_work_folders(plan.arguments_as(MergeArguments).dst)
