"""How datasets of one format become one: the interface between the verb and the formats."""

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
    """One merge: where to, of what, and whether sources may be moved."""

    path: Path
    format: str
    parts: tuple[Path, ...]
    move: bool
    options: dict[str, Any]

    def take(self, source: Path, target: Path) -> None:
        """Gives a file or a store its place: moved, linked, or copied where neither can be."""
        if target.exists():
            return  # before a crash; copies come under their names when they are whole
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
        # Another file system, or one that has no links.
        size = Path(source).stat().st_size
        _native.copy_range(source, 0, size, target, 0)
        _native.sync_files([target])


class Merger(ABC):
    """What a format adds to a merge.

    Everything that can be refused is refused by :meth:`check`, before anything is moved or written. :meth:`run` may be called again
    after a crash, and goes on where it was.
    """

    makes: ClassVar[tuple[str, ...]] = ()
    """Patterns of the names that a merge makes in the folder of the dataset."""
    physical: ClassVar[str | None] = None
    """What datasets of the format are called, if merged ones can be a list of several, which ``physical=True`` makes one."""
    files: ClassVar[re.Pattern[str] | None] = None
    """Names of the files that a writer of the format makes, in whatever folder of a dataset. Of a part that was merged only these
    are removed; None: all."""
    names_itself: ClassVar[bool] = False
    """Whether the format names the merged dataset's folder, below the path that is asked for."""

    def datasets(self, path: Path) -> list[Path]:
        """The datasets that a source consists of: itself, unless it is a list of several."""
        return [path]

    def several(self, path: Path) -> bool:
        """Whether a merged dataset still consists of several."""
        return False

    def kind(self, contents: Contents) -> dict[str, Any]:
        """What parts have to agree on, beside layers, width, type and model: values by names."""
        return {}

    @abstractmethod
    def check(self, plan: Merge) -> None:
        """Raises for whatever is wrong with a merge. Writes nothing."""

    @abstractmethod
    def run(self, plan: Merge) -> Path:
        """Merges, manifest last; returns the dataset's path."""


def check_column_types(plan: Merge, tables: Sequence[Any]) -> None:
    """Raises FormatError if no type holds a column's values of all parts as they are: it would be read as texts."""
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
                    f"column {field.name!r}: expected {kind} as in {first}, found {field.type}: no type holds both; write one of "
                    "the parts again with values of the other's type",
                    path=path,
                )
            known[field.name] = (both, first)
