"""Puts rows together that several processes made: joins the parts of files, consolidates shards, and moves the cache into place.

The last step of ``build_cache`` and of a plan's commit.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import actshard._native as _native
from actshard.base.errors import boundary, from_os
from actshard.base.work import make_folder, remove, sync_folders, sync_tree
from actshard.tokens import ledger as ledgers
from actshard.tokens import placing, shards
from actshard.tokens.ledger import CONSOLIDATED, Ledger
from actshard.tokens.recipe import Recipe
from actshard.tokens.sources import AnySource, RowProblem
from actshard.tokens.writing import FieldWriters

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
    if (ledger := shards.finished(folder, identity, list(recipe.fields))) is not None:
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
    return shards.complete_shard(staged, folder, writers, identity, skipped, dict(recipe.metadata))


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
