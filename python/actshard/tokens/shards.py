"""Builds one shard of a cache from one file of records. ``build_cache`` runs this in parallel, in this process or in workers.

As a program it is a worker (:mod:`actshard.base.work.pool`). Processes are used because rendering chats and reading records hold
the GIL; only the tokenizers library has threads of its own.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._json import read_json
from actshard.base._schema import AnyText, json_values, read_value
from actshard.base.errors import ActshardError, FormatError, as_plain, boundary, from_os
from actshard.base.work import make_folder, remove, sync_folders, sync_tree
from actshard.base.work.pool import Driver
from actshard.tokens import formats, placing
from actshard.tokens import ledger as ledgers
from actshard.tokens.columns import ColumnBlock
from actshard.tokens.ledger import CONSOLIDATED, Ledger
from actshard.tokens.pieces import source_of
from actshard.tokens.placing import SUCCESS
from actshard.tokens.processing import Prepared, Processor, processor_of
from actshard.tokens.recipe import Recipe, shard_ledger
from actshard.tokens.sources import AnySource, Record, RecordOrBlock, RowProblem, Source
from actshard.tokens.tokenizer import Tokenizer
from actshard.tokens.writing import FieldWriters

_CHARS = 1 << 19
"""Characters encoded per batch: enough work for all processors, and bounded memory."""
_RECORDS = 2048
_PROBLEMS = 5
"""Number of unusable records that are named."""
_TELL_EVERY = 0.25


@dataclass
class Counts:
    """Progress of one source.

    Attributes:
        rows, tokens: number produced.
        bytes: number of bytes read.
        skipped: number of unusable records.
        unusable: the first few of them.
        elements: number of elements by field.
    """

    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0
    unusable: tuple[RowProblem, ...] = ()
    elements: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """How to build one source.

    Attributes:
        folder: path of the finished shard.
        staged: path while it is built.
        identity: digest of the source, the format and the options; a finished shard with the same identity is reused.
        storage: ``"plain"`` or ``"lz4"``.
        skip: whether to skip bad records.
        read_soon: whether the shard will be read again to consolidate the cache, so that it is kept in the page cache.
        now: the time passed to chat templates, as a ``time.struct_time`` tuple; a resumed build keeps it.
    """

    folder: Path
    staged: Path
    identity: str
    storage: str
    skip: bool
    read_soon: bool
    now: tuple[object, ...] | None = None

    @classmethod
    def of_shard(
        cls, recipe: Recipe, source: AnySource, folder: Path, staged: Path, now: tuple[object, ...] | None
    ) -> Task:
        """The task of a whole source of a recipe, whose shard appears in ``folder``."""
        identity, rereads = recipe.identity(source, now), recipe.reads_shards
        return cls(folder / source.shard, staged, identity, recipe.shard_storage, recipe.skip, rereads, now)


TellCounts = Callable[[Counts], object]


def build_shard(source: AnySource, process: Processor, task: Task, tell: TellCounts) -> Counts:
    """Builds the shard of a source. The shard appears at its path when complete.

    Raises:
        FormatError: a record is unusable (file and line are given), unless bad records are skipped.
        ChangedInputError: the source changed while it was read.
    """
    with boundary(task.staged, "make"):
        remove(task.staged)
        task.staged.mkdir(parents=True)
    process.now = None if task.now is None else time.struct_time(task.now)
    writers = FieldWriters(task.staged, process.fields, task.storage, read_soon=task.read_soon)
    counts = write_rows(source, process, writers, skip=task.skip, tell=tell)
    complete_shard(task.staged, task.folder, writers, task.identity, counts.skipped, process.metadata())
    tell(counts)
    return counts


class Records(Protocol):
    """The interface of records for :func:`write_rows`: a source, or a sample of several sources."""

    @property
    def what(self) -> str:
        """The unit of record numbers."""

    def records(
        self, columns: Sequence[str], tell: Callable[[int], object] | None = None, *, blocks: bool = False
    ) -> Iterator[RecordOrBlock]:
        """Yields records with their numbers. With ``blocks``, consecutive ones may be one block of flat columns."""

    def error(self, problem: RowProblem) -> FormatError:
        """The exception to raise for an unusable record."""


def write_rows(
    source: Records, process: Processor, writers: FieldWriters, *, skip: bool, tell: TellCounts | None = None
) -> Counts:
    """Appends the rows of a source to fields.

    Raises:
        FormatError: a record is unusable (file and line are given), and ``skip`` is False.
        ChangedInputError: the source changed while it was read.
    """
    counts = Counts()
    last = time.monotonic()

    def read(n: int) -> None:
        counts.bytes += n

    records = source.records(process.columns, read, blocks=process.takes_blocks)
    first_field = next(iter(process.fields))
    for prepared, encoded in _encoded_ahead(process, _batches(records, process, source.what)):
        rows = process.finish(prepared, encoded, source.what)
        for problem in rows.problems:
            if not skip:
                raise source.error(problem)
            counts.skipped += 1
            if len(counts.unusable) < _PROBLEMS:
                counts.unusable += (problem,)
        for name, elements in rows.elements.items():
            writers.append(name, elements, rows.lengths[name])
            counts.elements[name] = counts.elements.get(name, 0) + int(elements.size)
        counts.rows += len(rows)
        counts.tokens += int(rows.elements[first_field].size)
        if tell is not None and time.monotonic() - last >= _TELL_EVERY:
            tell(counts)
            last = time.monotonic()
    if isinstance(source, Source):
        source.check_version()
    return counts


def complete_shard(
    staged: Path, folder: Path, writers: FieldWriters, identity: str, skipped: int, metadata: dict[str, object]
) -> Ledger:
    """Makes a shard of written fields: adds its ledger, syncs it, and renames it to its path. Returns the ledger."""
    written = writers.finish()
    ledger = shard_ledger(folder.name, written.rows, written.elements, identity, skipped, metadata).write(
        staged, written.checksums
    )
    with boundary(folder, "write"):
        if written.rows:
            (staged / SUCCESS).touch()
            _native.sync_files([staged / SUCCESS])
        sync_tree(staged)
        remove(folder)
        staged.rename(folder)
        sync_folders([folder.parent])
    return ledger


def finished(folder: Path, identity: str, fields: list[str], *, is_built: bool = False) -> Ledger | None:
    """The ledger of a shard that is finished and has this identity; None if it must be built.

    With ``is_built`` (it was just built), errors of reading its ledger are raised.
    """
    try:
        ledger = ledgers.read(folder)
    except ActshardError:
        if is_built:
            raise
        return None
    is_whole = all((folder / name / "offsets" / "zarr.json").is_file() for name in fields)
    if not is_whole or (ledger.actshard or {}).get("identity") != identity:
        return None
    if ledger.total_num_rows and not ledger.checksums:  # a build that a release without checksums began
        return ledger.write(folder)
    return ledger


def _batches(records: Iterator[RecordOrBlock], process: Processor, what: str) -> Iterator[Prepared]:
    batch: list[Record] = []
    chars = 0
    for number, record in records:
        if isinstance(record, ColumnBlock):
            if batch:
                yield process.prepare(batch, what)
                batch, chars = [], 0
            yield process.prepare_block(number, record, what)
            continue
        batch.append((number, record))
        if not isinstance(record, RowProblem):
            for value in record.values():
                if isinstance(value, str):
                    chars += len(value)
                elif isinstance(value, list):
                    # Messages or numbers: a rough estimate is enough to limit a batch.
                    chars += len(value) * 100
        if chars >= _CHARS or len(batch) >= _RECORDS:
            yield process.prepare(batch, what)
            batch, chars = [], 0
    if batch:
        yield process.prepare(batch, what)


def _encoded_ahead(
    process: Processor, batches: Iterator[Prepared]
) -> Iterator[tuple[Prepared, list[NDArray[np.int64]]]]:
    """Yields batches with their token ids. Later batches are read and prepared while one is encoded."""
    if process.tokenizer is None:
        yield from ((prepared, []) for prepared in batches)
        return
    waiting: list[tuple[Prepared, Future[list[NDArray[np.int64]]]]] = []
    # Two threads: one encodes while the other converts ids to Python integers.
    with ThreadPoolExecutor(2, thread_name_prefix="actshard-encode") as encoder:
        for prepared in batches:
            waiting.append((prepared, encoder.submit(process.encode, prepared.texts)))
            if len(waiting) > 3:
                ready, future = waiting.pop(0)
                yield ready, future.result()
        for ready, future in waiting:
            yield ready, future.result()


@dataclass(frozen=True)
class RowSetup:
    """How to make rows: the format, the tokenizer and the options, as JSON values for another process."""

    format: Mapping[str, object]
    tokenizer: Mapping[str, object] | None
    options: Mapping[str, object]

    @classmethod
    def of(cls, format: formats.RowFormat, tokenizer: Tokenizer | None, options: Mapping[str, object]) -> RowSetup:
        """The settings of a recipe's processor."""
        return cls(formats.as_dict(format), None if tokenizer is None else tokenizer.as_dict(), options)

    def processor(self) -> Processor:
        """The processor with these settings."""
        tokenizer = None if self.tokenizer is None else Tokenizer.from_dict(dict(self.tokenizer))
        return processor_of(formats.as_format(self.format), tokenizer, dict(self.options))


@dataclass(frozen=True)
class Order:
    """A task for a worker.

    Attributes:
        path, shard, version: the source; its path may be relative.
        numbers: the part of it, as in a piece of :func:`actshard.tokens.pieces.as_list` after the number of the source.
        task: how to build its rows.
    """

    path: AnyText
    shard: str
    version: tuple[int, int] | None
    numbers: tuple[int, ...]
    task: Task

    def records(self) -> Source:
        """The records of the part."""
        return source_of([0, *self.numbers], [Source(Path(self.path), self.shard, self.version)])


def main() -> None:
    """Runs a worker. Its settings are the path of a file with a :class:`RowSetup`; each line after it is an :class:`Order`."""
    driver = Driver()
    try:
        with boundary(None, "begin"):
            process = read_value(RowSetup, read_json(Path(driver.settings()))).processor()
        for line in driver.orders():
            order = read_value(Order, json.loads(line))
            with boundary(order.task.folder, "build"):
                build_shard(order.records(), process, order.task, lambda counts: driver.send(json_values(counts)))
            driver.send({"done": True})
    except ActshardError as error:
        driver.send(as_plain(error))
        sys.exit(3)
    except BrokenPipeError:
        sys.exit(4)


# Puts rows together that several processes made: joins the parts of files, consolidates shards, and moves the cache into place.
#
# The last step of ``build_cache`` and of a plan's commit.


_STAGED, _MERGED = "staged", "merged"


@dataclass(frozen=True)
class PartRows:
    """The rows of a part of a source.

    Attributes:
        folder: folder with the rows, which may also contain rows of adjoining parts; or the shard.
        is_shard: whether it is the finished shard of the whole source.
        rows, elements: number of rows, and of elements by field.
        skipped: number of unusable records.
        piece: the part, as of :func:`actshard.tokens.pieces.as_list`.
        unusable: the first unusable records, if known, with their numbers in the part.
        ledger: the ledger of the folder, if it has one and that was read.
    """

    folder: Path
    is_shard: bool
    rows: int
    elements: Mapping[str, int]
    skipped: int
    piece: Sequence[int]
    unusable: Sequence[RowProblem]
    ledger: Ledger | None = None


def combine(
    recipe: Recipe,
    parts: Mapping[str, Sequence[PartRows]],
    out: Path,
    work: Path,
    now: Sequence[object] | None,
    tell: Callable[[], object] = lambda: None,
) -> None:
    """Makes a cache of the rows of all parts, and moves it into place. The caller holds the lock of the working folder.

    Args:
        recipe: the cache's recipe.
        parts: the parts of each source in order, by shard, in the order of the sources.
        out: the cache's folder.
        work: its working folder.
        now: the time passed to chat templates.
        tell: called before shards are consolidated.
    """
    cache_folder = work / placing.NEW
    make_folder(cache_folder)
    rows = {shard: sum(part.rows for part in shard_parts) for shard, shard_parts in parts.items()}
    elements = {
        shard: {name: sum(part.elements.get(name, 0) for part in shard_parts) for name in recipe.fields}
        for shard, shard_parts in parts.items()
    }
    checksums: Mapping[str, str] | None
    with boundary(work, "combine rows in"):
        shard_ledgers = {
            source.shard: _put_shard(
                recipe, recipe.identity(source, now), parts[source.shard], cache_folder / source.shard, work
            )
            for source in (recipe.sources if recipe.kept else ())
        }
        sync_folders([cache_folder])
        if recipe.layout == CONSOLIDATED:
            tell()
            folders = (
                {cache_folder / shard: shard_ledgers[shard] for shard, count in rows.items() if count}
                if shard_ledgers
                else _filled(parts)
            )
            checksums = _consolidate(folders, work / _MERGED, cache_folder, recipe.fields, recipe.storage)
        else:
            checksums = {shard: ledger.own_checksum for shard, ledger in shard_ledgers.items()}
    recipe.ledger(rows, elements, skipped_by_shard(parts), now).write(cache_folder, checksums)
    placing.swap(out, work, placing.NEW, [*recipe.entries, ledgers.NAME])


def skipped_by_shard(parts: Mapping[str, Sequence[PartRows]]) -> dict[str, int]:
    """The number of unusable records by shard, without zeros."""
    return {shard: n for shard, shard_parts in parts.items() if (n := sum(part.skipped for part in shard_parts))}


def problems_in(sources: Sequence[AnySource], parts: Mapping[str, Sequence[PartRows]]) -> list[str]:
    """Messages about the first unusable records of each part, with their numbers in the file."""
    messages = []
    for source in sources:
        lines = 0
        for part in parts[source.shard]:
            problems = [problem._replace(number=problem.number + lines) for problem in part.unusable]
            messages += [str(source.error(problem)) for problem in problems]
            if len(part.piece) == 3:  # lines are numbered from 1 in each range
                lines += part.rows + part.skipped
    return messages


def _filled(parts: Mapping[str, Sequence[PartRows]]) -> dict[Path, Ledger | None]:
    """Folders with rows, in order, and their ledgers."""
    return {part.folder: part.ledger for shard_parts in parts.values() for part in shard_parts if part.rows}


def _put_shard(recipe: Recipe, identity: str, parts: Sequence[PartRows], folder: Path, work: Path) -> Ledger:
    """Creates a source's shard in the new cache: renames a finished one, or copies the rows of several parts."""
    if parts[0].folder == folder and parts[0].ledger is not None:
        return parts[0].ledger
    if (ledger := finished(folder, identity, list(recipe.fields))) is not None:
        return ledger
    staged = work / _STAGED / folder.name
    remove(folder)
    if parts[0].is_shard:
        _rename(parts[0].folder, folder, staged)
        return ledgers.read(folder)
    remove(staged)
    writers = FieldWriters(staged, recipe.fields, recipe.shard_storage, read_soon=recipe.layout == CONSOLIDATED)
    writers.extend_all(_filled({folder.name: parts}))
    skipped = sum(part.skipped for part in parts)
    return complete_shard(staged, folder, writers, identity, skipped, dict(recipe.metadata))


def _rename(source: Path, folder: Path, staged: Path) -> None:
    """Renames a shard; copies it if the working folder is on another file system."""
    try:
        source.rename(folder)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise from_os(error, source, "rename") from error
    remove(staged)
    shutil.copytree(source, staged)
    _native.sync_files([Path(path, name) for path, _, names in os.walk(staged) for name in names])
    sync_tree(staged)
    staged.rename(folder)


def _consolidate(
    parts: Mapping[Path, Ledger | None],
    merged: Path,
    out: Path,
    fields: Mapping[str, np.dtype[np.generic]],
    storage: str,
) -> Mapping[str, str] | None:
    """Creates one array per field from folders with rows, by copying stored bytes. A single folder's files are linked.

    Returns the checksum of each data file by its path; None if they are unknown.

    Args:
        parts: folders with at least one row each, in order, and their ledgers; None: a folder without one.
        merged: the folder to work in, on the file system of ``out``.
        out: the folder that gets the fields.
        fields: dtypes by name.
        storage: ``"plain"`` or ``"lz4"``.
    """
    checksums: Mapping[str, str] | None
    if len(parts) == 1 and storage == "plain" and _linked(next(iter(parts)), merged, list(fields)):
        (ledger,) = parts.values()
        checksums = (ledger.checksums or None) if ledger is not None else None
    else:
        writers = FieldWriters(merged, fields, storage)
        writers.extend_all(parts)
        checksums = writers.finish().checksums
    sync_tree(merged)
    for entry in sorted(merged.iterdir()):
        entry.rename(out / entry.name)
    sync_folders([out])
    return checksums


def _linked(source: Path, target: Path, names: list[str]) -> bool:
    """Hard-links the files of fields into another folder. Returns False if the file system cannot."""
    try:
        for name in names:
            for file in (source / name).rglob("*"):
                if file.is_file():
                    to = target / name / file.relative_to(source / name)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    to.hardlink_to(file)
    except OSError:
        shutil.rmtree(target, ignore_errors=True)
        return False
    return True


if __name__ == "__main__":
    main()
