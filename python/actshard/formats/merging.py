"""``Merger``: the interface between merging and the formats."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import actshard._native as _native
from actshard.errors import FormatError
from actshard.formats.tables import common_type
from actshard.work import make_folder, rename

if TYPE_CHECKING:
    from actshard.formats.contents import Contents


@dataclass(frozen=True)
class Merge:
    """Arguments of a merge. ``move``: whether source files may be moved."""

    path: Path
    format: str
    parts: tuple[Path, ...]
    move: bool
    options: dict[str, Any]

    def take(self, source: Path, target: Path) -> None:
        """Moves a file or a store to its target, or links it if sources are kept. Copies if linking is impossible."""
        if target.exists():
            return  # placed before a crash; copies are renamed only when complete
        make_folder(target.parent)
        if self.move:
            rename(source, target)
            return
        if source.is_dir():
            temporary = target.with_name(f".{target.name}.part")
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.copytree(source, temporary, copy_function=_link)
            rename(temporary, target)
            return
        temporary = target.with_name(f".{target.name}.part")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        _link(source, temporary)
        rename(temporary, target)


def _link(source: Any, target: Any) -> None:
    try:
        os.link(source, target)
    except OSError:
        # another file system, or no support for links
        size = Path(source).stat().st_size
        _native.copy_range(source, 0, size, target, 0)
        _native.sync_files([target])


class Merger(ABC):
    """A format's implementation of merging.

    :meth:`check` detects all errors before anything is moved or written. :meth:`run` may be called again after a crash and
    resumes.
    """

    makes: ClassVar[tuple[str, ...]] = ()
    """Patterns of the names that a merge creates in the dataset's folder."""
    physical: ClassVar[str | None] = None
    """Plural name of this format's datasets, if a merged dataset can be a list of several; ``physical=True`` then makes it one."""
    files: ClassVar[re.Pattern[str] | None] = None
    """Names of files that a writer of the format creates, in any folder. Only these are removed from a merged part; None: all."""
    names_itself: ClassVar[bool] = False
    """Whether the format chooses the name of the merged dataset's folder, below the given path."""

    def datasets(self, path: Path) -> list[Path]:
        """The datasets of a source: itself, unless it is a list of several."""
        return [path]

    def several(self, path: Path) -> bool:
        """Whether a merged dataset still consists of several."""
        return False

    def kind(self, contents: Contents) -> dict[str, Any]:
        """Properties that parts must share, besides layers, width, dtype and model: values by name."""
        return {}

    def predicted(self, parts: Sequence[tuple[int, int, int]], whole: tuple[int, int, int]) -> tuple[int, int]:
        """Files and bytes of a dataset merged of parts of these (shards, files, bytes).

        ``whole``: shards, files and bytes of a dataset that has all examples and is written at once.
        """
        one = whole[1] - whole[0]  # files beside the shards, which the merged dataset has once
        return sum(shards for shards, _, _ in parts) + one, sum(size for _, _, size in parts)

    @abstractmethod
    def check(self, plan: Merge) -> None:
        """Raises if the merge is impossible. Writes nothing."""

    @abstractmethod
    def run(self, plan: Merge) -> Path:
        """Merges, manifest last. Returns the dataset's path."""


def check_column_types(plan: Merge, tables: Sequence[Any]) -> None:
    """Raises FormatError if no type holds a column's values of all parts, because they would become strings."""
    import pyarrow as pa

    known: dict[str, tuple[Any, Path]] = {}
    for path, table in zip(plan.parts, tables, strict=True):
        for field in table.schema:
            if field.type == pa.null():
                continue
            kind, first = known.setdefault(field.name, (field.type, path))
            both = common_type(kind, field.type)
            if both is None:
                raise FormatError(
                    f"column {field.name!r}: expected {kind} as in {first}, found {field.type}; no type holds both: write one of "
                    "the parts again with the other's type",
                    path=path,
                )
            known[field.name] = (both, first)
