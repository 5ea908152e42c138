"""``Merger``: the interface between merging and the formats."""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import actshard._native as _native
from actshard.base.errors import FormatError
from actshard.base.request import RECORD, Request
from actshard.base.work import files_below, make_folder, record_files, rename
from actshard.formats.tables import common_type, concatenated

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents


_COPIED_AT_ONCE = 256 << 20
"""Bytes that are copied between two progress reports."""


@dataclass(frozen=True)
class Assembled:
    """A file of a merged dataset that is copied from pieces of other files.

    Attributes:
        name: path relative to :attr:`Merge.path`, with ``/``.
        pieces: (source file, offset, bytes, offset in the new file). Bytes outside of all pieces are zero.
        size: size of the new file in bytes.
    """

    name: str
    pieces: tuple[tuple[Path, int, int, int], ...]
    size: int

    @property
    def bytes(self) -> int:
        """Bytes to copy."""
        return sum(count for _, _, count, _ in self.pieces)

    def write(self, target: Path, tell: Callable[[int], object] = lambda count: None) -> None:
        """Writes the file under a temporary name, syncs and renames it. ``tell`` is called with the bytes copied by each step."""
        temporary = target.with_name(f".{target.name}.part")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        temporary.touch()
        for source, first, count, offset in self.pieces:
            for position in range(0, count, _COPIED_AT_ONCE):
                part = min(_COPIED_AT_ONCE, count - position)
                _native.copy_range(source, first + position, part, temporary, offset + position)
                tell(part)
        os.truncate(temporary, self.size)
        _native.sync_files([temporary])
        rename(temporary, target)


@dataclass(frozen=True)
class Merge:
    """Arguments of a merge.

    Attributes:
        path: the folder of the merged dataset.
        format: the parts' format.
        parts: datasets to merge, in order.
        move: whether source files may be moved.
        options: the format's options.
        copies: files that tasks of a plan have already copied, by name relative to ``path``.
    """

    path: Path
    format: str
    parts: tuple[Path, ...]
    move: bool
    options: dict[str, Any]
    copies: Mapping[str, Path] = field(default_factory=dict)
    request: Request | None = None
    """What the merged dataset records; None if its parts have no record."""

    def assemble(self, file: Assembled) -> None:
        """Writes a file from its pieces, unless it exists or a task of a plan has copied it."""
        target = self.path / file.name
        record_files([target])
        if target.exists() or self._move_copy(target):
            return
        make_folder(target.parent)
        file.write(target)

    def take(self, source: Path, target: Path) -> None:
        """Moves a file or a store to its target, or links it if sources are kept. Copies if linking is impossible.

        What lies behind a symbolic link out of the dataset's folder is kept: the merge may move only what was written here.
        """
        record_files(target / path.relative_to(source) for path in files_below(source))
        if target.exists():
            return  # placed before a crash; copies are renamed only when complete
        make_folder(target.parent)
        is_here = Path(os.path.realpath(self.path)) in Path(os.path.realpath(source)).parents
        if self.move and is_here and not has_links(source):
            if source.is_dir():
                (source / RECORD).unlink(missing_ok=True)  # the merged dataset has its own
            rename(source, target)
            return
        if source.is_dir():
            temporary = target.with_name(f".{target.name}.part")
            shutil.rmtree(temporary, ignore_errors=True)
            linked = partial(self._link_of, temporary, target)
            shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(RECORD), copy_function=linked)
            rename(temporary, target)
            return
        if self._move_copy(target):
            return
        temporary = target.with_name(f".{target.name}.part")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        _link(source, temporary)
        rename(temporary, target)

    def _move_copy(self, target: Path, name: Path | None = None) -> bool:
        """Moves a task's copy to ``target``; False if there is no copy. ``name``: the final path, if it is not ``target``."""
        copy = self.copies.get((name or target).relative_to(self.path).as_posix()) if self.copies else None
        if copy is None or not copy.exists():
            return False
        make_folder(target.parent)
        rename(copy, target)
        return True

    def _link_of(self, temporary: Path, target: Path, source: str, copy: str) -> None:
        """Links a file of a store. The store gets its name when all of its files exist."""
        if not self._move_copy(Path(copy), target / Path(copy).relative_to(temporary)):
            _link(Path(source), Path(copy))


def has_links(path: Path) -> bool:
    """Whether a path is a symbolic link to something, or a folder with one below it. Moved, it may lead elsewhere."""
    if path.is_symlink():
        return path.exists()
    folders = [path] if path.is_dir() else []
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    if Path(entry.path).exists():
                        return True
                elif entry.is_dir():
                    folders.append(Path(entry.path))
    return False


def _link(source: Path, target: Path) -> None:
    if source.is_symlink():
        if not source.exists():
            # An editor's lock, or a file whose contents are elsewhere: as unreadable as before, and for the same reason.
            target.symlink_to(source.parent / source.readlink())
            return
        # A hard link of a symbolic link would lead wherever that leads from another folder.
        source = Path(os.path.realpath(source))
    try:
        os.link(source, target)
    except OSError:
        # another file system, or one without hard links
        size = source.stat().st_size
        _native.copy_range(source, 0, size, target, 0)
        _native.sync_files([target])


class Merger(ABC):
    """A format's implementation of merging.

    :meth:`check` detects all errors before anything is moved or written. :meth:`run` may be called again after a crash and
    resumes: it assembles and takes files, and :meth:`finish` writes the remaining files, which complete the dataset.
    """

    makes: ClassVar[tuple[str, ...]] = ()
    """Patterns of the names that a merge creates in the dataset's folder."""
    physical: ClassVar[str | None] = None
    """Plural name of this format's datasets, if a merge can produce a list of them; ``physical=True`` then produces one dataset."""
    names_itself: ClassVar[bool] = False
    """Whether the format chooses the name of the merged dataset's folder, below the given path."""

    def datasets(self, path: Path) -> list[Path]:
        """The datasets of a source: the source itself, unless it is a list of datasets."""
        return [path]

    def several(self, path: Path) -> bool:
        """Whether a merged dataset still consists of several datasets."""
        return False

    def kind(self, contents: Contents) -> Mapping[str, object]:
        """Properties that parts must share, besides layers, width, dtype and model: values by name."""
        return {}

    def predicted(self, parts: Sequence[tuple[int, int, int]], total: tuple[int, int, int]) -> tuple[int, int]:
        """Files and bytes of a dataset merged from parts, each given as (shards, files, bytes).

        ``total``: shards, files and bytes of a dataset that has all examples and is written at once.
        """
        other_files = total[1] - total[0]  # files other than shards, which the merged dataset has once
        return sum(shards for shards, _, _ in parts) + other_files, sum(size for _, _, size in parts)

    @abstractmethod
    def check(self, plan: Merge) -> None:
        """Raises if the merge is impossible. Writes nothing."""

    def assembled(self, plan: Merge) -> list[Assembled]:
        """Files that must be copied from pieces, because no part contains them unchanged."""
        return []

    @abstractmethod
    def taken(self, plan: Merge) -> list[tuple[Path, Path]]:
        """Files and stores that become part of the dataset unchanged: (source, target)."""

    @abstractmethod
    def finish(self, plan: Merge) -> Path:
        """Writes the other files, manifest last. Returns the dataset's path."""

    def place(self, plan: Merge) -> Path:
        """The dataset's path."""
        return plan.path

    @abstractmethod
    def beside(self, plan: Merge) -> tuple[Sequence[str], int, bool]:
        """Names, in the dataset's folder, and bytes of the files that :meth:`finish` writes, and whether the bytes are exact."""

    def run(self, plan: Merge) -> Path:
        """Merges. Returns the dataset's path."""
        for file in self.assembled(plan):
            plan.assemble(file)
        for source, target in self.taken(plan):
            plan.take(source, target)
        return self.finish(plan)


def check_column_types(plan: Merge, tables: Sequence[pa.Table]) -> None:
    """Raises FormatError if no type can store a column's values of all parts unchanged: they would become strings."""
    import pyarrow as pa

    types_by_name: dict[str, tuple[pa.DataType, Path]] = {}
    for path, table in zip(plan.parts, tables, strict=True):
        for column in table.schema:
            if column.type == pa.null():
                continue
            kind, first = types_by_name.setdefault(column.name, (column.type, path))
            common_kind = common_type(kind, column.type)
            if common_kind is None:
                raise FormatError(
                    f"column {column.name!r}: expected {kind} as in {first}, found {column.type}; no type holds both: write one of "
                    "the parts again with the other's type",
                    path=path,
                )
            types_by_name[column.name] = (common_kind, first)
    if mixed := concatenated(tables)[1]:
        raise FormatError(
            f"column {mixed[0]!r}: no type can represent the values of all parts exactly: write one part again with others",
            path=plan.path,
        )
