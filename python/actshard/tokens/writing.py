"""``CacheWriter``: writes a token cache from rows that are already tokenized."""

from __future__ import annotations

import glob as globbing
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base._arguments import dtype as native_dtype
from actshard.base._arguments import flat, local_path, numpy_type
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    DtypeError,
    ExistsError,
    InternalError,
    boundary,
)
from actshard.base.work import Lock, locked, remove, sync_folders, sync_tree
from actshard.tokens import ledger as ledgers
from actshard.tokens import placing
from actshard.tokens.ledger import OURS, Ledger

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

STORAGES = ("plain", "lz4")
WRITE_HERE = "Write the cache to a local folder, then copy it."
_NO_SHAPES: NDArray[np.int64] = np.empty(0, np.int64)
_STAGED = re.compile(r"\.tmp\.\d+\.\d+$")
_WRITTEN = "written"


def checked_storage(storage: str) -> str:
    """Returns ``storage`` if it is supported; raises ArgumentError otherwise."""
    return _arguments.one_of(storage, STORAGES, "storage")


@dataclass(frozen=True)
class WrittenFields:
    """Fields that are written and synced.

    Attributes:
        rows: number of rows.
        elements: number of elements by field.
        checksums: CRC-32 of each data file by its path in the folder, as in a ledger.
    """

    rows: int
    elements: dict[str, int]
    checksums: dict[str, str]


class FieldWriters:
    """Writers of a cache's fields in one folder. They do not write the ledger."""

    def __init__(
        self,
        folder: Path,
        fields: Mapping[str, np.dtype[Any]],
        storage: str,
        axes: Mapping[str, int] | None = None,
        *,
        read_soon: bool = False,
    ) -> None:
        self.folder = folder
        self.fields = dict(fields)
        self.axes = {name: (axes or {}).get(name, 1) for name in fields}
        self._writers = {
            name: _native.TokenFieldWriter(folder / name, _native_name(dtype), self.axes[name], storage, not read_soon)
            for name, dtype in fields.items()
        }

    def append(
        self,
        name: str,
        elements: NDArray[np.generic],
        lengths: NDArray[np.int64],
        shapes: NDArray[np.int64] = _NO_SHAPES,
    ) -> None:
        """Appends rows to a field: ``elements`` concatenated over rows, and the number of elements of each row."""
        flat = np.ascontiguousarray(elements, self.fields[name]).reshape(-1).view(np.uint8)
        self._writers[name].append(flat, np.ascontiguousarray(lengths, np.int64), shapes)

    def extend(self, name: str, field: _native.TokenField) -> None:
        """Appends all rows of another cache's field. Stored blocks are copied without decoding."""
        self._writers[name].extend(field)

    def extend_all(self, folders: Iterable[Path]) -> None:
        """Appends all rows of the same fields in other folders, which each have rows; see :meth:`extend`."""
        cache, parts = _native.BlockCache(0), list(folders)
        for name in self.fields:
            for part in parts:
                self.extend(name, _native.TokenField([(part / name, None)], "mmap", cache, is_complete=True))

    def finish(self) -> WrittenFields:
        """Writes buffered data and syncs it to disk."""
        fields = {name: writer.finish() for name, writer in self._writers.items()}
        rows = {name: count for name, (count, _, _) in fields.items()}
        if len(set(rows.values())) > 1:
            row_counts = ", ".join(f"{name} {count}" for name, count in rows.items())
            raise InternalError(f"fields have different numbers of rows: {row_counts}", path=self.folder)
        return WrittenFields(
            next(iter(rows.values()), 0),
            {name: elements for name, (_, elements, _) in fields.items()},
            {
                f"{name}/{path}": ledgers.shown_crc(crc)
                for name, (_, _, checksums) in fields.items()
                for path, crc in checksums
            },
        )


def _field_dtype(name: str, dtype: DTypeLike) -> np.dtype[Any]:
    field_dtype = numpy_type(dtype, f"field '{name}': ")
    _native_name(field_dtype)
    return field_dtype


def _native_name(dtype: np.dtype[np.generic]) -> str:
    if dtype.kind not in "iuf":
        raise DtypeError(f"expected an integer or float dtype, found {dtype}")
    return native_dtype(dtype)[1]


class CacheWriter:
    """Writes a cache from arrays, like Levanter's ``SerialCacheWriter``.

    >>> with tokens.CacheWriter("cache/train", {"input_ids": np.int32}) as writer:
    ...     writer.append([{"input_ids": ids} for ids in documents])

    The complete cache appears at the path when the writer is closed without an error; nothing is there before. A rejected call
    changes nothing. After a failed write (such as a full disk) only :meth:`abort` is allowed, because fields may differ in length.

    Args:
        path: the folder to create.
        fields: dtypes by field name. Nested fields are named ``"a/b"``.
        storage: ``"plain"`` or ``"lz4"``; see :func:`~actshard.tokens.build_cache`.
        metadata: the ledger's ``preprocessor_metadata``; must be serializable as JSON.
        overwrite: replace an existing cache. Only files listed in its ledger are removed.

    Raises:
        ExistsError: the path exists.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Mapping[str, DTypeLike],
        *,
        storage: str = "plain",
        metadata: Mapping[str, object] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = local_path(path, remedy=WRITE_HERE)
        if not isinstance(fields, Mapping):
            raise ArgumentTypeError(f"fields: expected dtypes by name, found {type(fields).__name__}")
        if not fields:
            raise ArgumentError("fields: expected at least one")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise ArgumentTypeError(f"metadata: expected a dict, found {type(metadata).__name__}")
        for name in fields:
            if not isinstance(name, str) or not name or any(part in ("", ".", "..") for part in name.split("/")):
                raise ArgumentError(f"fields: {name!r} is not a valid field name")
        self._overwrite = overwrite
        self._fields = {name: _field_dtype(name, dtype) for name, dtype in fields.items()}
        self._storage = checked_storage(storage)
        self._metadata = dict(metadata) if metadata is not None else None
        try:
            json.dumps(self._metadata, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"metadata: expected values that JSON can represent: {error}") from error
        with boundary(self.path, "look at"):
            self._refuse_foreign()
        self._staged: Path | None = None
        self._lock: Lock | None = None
        self._writers: FieldWriters | None = None
        self._axes: dict[str, int] = {}
        self._open = True
        self._failed = ""
        self._whole: Path | None = None

    def _refuse_foreign(self) -> None:
        exists = os.path.lexists(self.path)
        if not exists or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not self._overwrite:
            raise ExistsError("the path exists; pass overwrite=True to replace a cache", path=self.path)
        if not self.path.is_dir():
            raise ExistsError("expected a token cache to replace, found a file; remove the file first", path=self.path)
        arrays = [f"{name}/{part}" for name in self._fields for part in ("offsets", "data", "shapes")]
        if (self.path / placing.WORK / placing.SWAP).exists():
            return  # a swap was interrupted: checked when it is completed
        try:
            existing = placing.owned(self.path)
        except ActshardError as error:
            raise ExistsError(
                f"cannot replace this cache: its ledger cannot be read ({error.detail}), so its files are unknown; "
                "remove the folder first",
                path=self.path,
            ) from error
        placing.refuse_foreign(self.path, [ledgers.NAME, *arrays], existing)

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError("the writer is closed", path=self.path)
        if self._failed:
            raise ClosedError(
                f"an earlier write failed ({self._failed}); call abort() and write the cache again",
                path=self.path,
            )
        if self._whole is not None:
            raise ClosedError("the cache is complete but not in place; call close() again, or abort()", path=self.path)

    def append(self, rows: Sequence[Mapping[str, object]] | Iterable[Mapping[str, object]]) -> None:
        """Appends rows: one dict per row, with an array or list for every field.

        Raises:
            ArgumentError: a row has a missing or unknown field, or an array of the wrong type or rank. Nothing was appended.
            ClosedError: the writer is closed, or an earlier write failed.
        """
        self._check_open()
        batch = list(rows)
        if not batch:
            return
        for i, row in enumerate(batch):
            if not isinstance(row, Mapping):
                raise ArgumentTypeError(f"row {i}: expected a dict of arrays, found {type(row).__name__}")
            unknown = [name for name in row if name not in self._fields]
            if unknown:
                raise ArgumentError(f"row {i}: unknown field '{unknown[0]}'; the cache has {', '.join(self._fields)}")
        arrays = {name: [self._array(row, name, i) for i, row in enumerate(batch)] for name in self._fields}
        axes_by_field = self._axes or {name: max(field_arrays[0].ndim, 1) for name, field_arrays in arrays.items()}
        pieces = {}
        for name, field_arrays in arrays.items():
            axes = axes_by_field[name]
            for i, array in enumerate(field_arrays):
                if array.ndim != axes:
                    raise ArgumentError(f"row {i}: field '{name}': expected {axes} axes, found {array.ndim}")
            lengths = np.fromiter((a.size for a in field_arrays), np.int64, len(field_arrays))
            flat = (
                np.concatenate([a.reshape(-1) for a in field_arrays])
                if len(field_arrays) > 1
                else field_arrays[0].reshape(-1)
            )
            shapes = np.array([a.shape[:-1] for a in field_arrays], np.int64).reshape(-1) if axes > 1 else _NO_SHAPES
            pieces[name] = (flat, lengths, shapes)
        self._put(axes_by_field, pieces)

    def append_flat(
        self, elements: Mapping[str, NDArray[np.generic]], lengths: Mapping[str, ArrayLike] | ArrayLike
    ) -> None:
        """Appends rows from concatenated arrays.

        Args:
            elements: for each field a 1-D array of all rows' elements.
            lengths: the number of elements of each row, (n,): one array for all fields, or one by field.

        Raises:
            ArgumentError: fields, lengths or values do not match. Nothing was appended.
            ClosedError: the writer is closed, or an earlier write failed.
        """
        self._check_open()
        if not isinstance(elements, Mapping):
            raise ArgumentTypeError(f"elements: expected arrays by field, found {type(elements).__name__}")
        if set(elements) != set(self._fields):
            names = ", ".join(map(str, elements)) or "none"
            raise ArgumentError(f"expected the fields {', '.join(self._fields)}, found {names}")
        axes_by_field = self._axes or dict.fromkeys(self._fields, 1)
        pieces = {}
        rows: int | None = None
        for name in self._fields:
            if axes_by_field[name] != 1:
                raise ArgumentError(
                    f"field '{name}': expected 1-D rows, found rows with {axes_by_field[name]} axes; use append()"
                )
            values = self._asarray(elements[name], f"field '{name}'")
            counts = _counts(lengths, name)
            if counts.ndim != 1 or (counts < 0).any() or int(counts.sum()) != values.size:
                raise ArgumentError(
                    f"field '{name}': expected lengths that sum to {values.size}, the number of elements"
                )
            if rows is not None and len(counts) != rows:
                raise ArgumentError(f"field '{name}': expected the lengths of {rows} rows, found {len(counts)}")
            rows = len(counts)
            pieces[name] = (self._cast(values, name).reshape(-1), counts, _NO_SHAPES)
        self._put(axes_by_field, pieces)

    def _put(
        self,
        axes: dict[str, int],
        pieces: Mapping[str, tuple[NDArray[np.generic], NDArray[np.int64], NDArray[np.int64]]],
    ) -> None:
        """Writes checked rows. A failure here leaves fields of different lengths, so the writer refuses further writes."""
        if self._writers is None:
            self._writers = self._start_writers(axes)
            self._axes = axes
        try:
            for name, (flat, lengths, shapes) in pieces.items():
                self._writers.append(name, flat, lengths, shapes)
        except BaseException as error:
            self._failed = str(error) or type(error).__name__
            raise

    def _start_writers(self, axes: dict[str, int]) -> FieldWriters:
        """Creates and locks a temporary folder next to the cache's. Removes those that killed writers left."""
        with boundary(self.path, "make"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for stale_folder in self.path.parent.glob(f"{globbing.escape(self.path.name)}.tmp.*"):
                if (
                    _STAGED.search(stale_folder.name)
                    and (stale_folder / placing.LOCK).is_file()
                    and not stale_folder.is_symlink()
                ):
                    with suppress(ActshardError):
                        lock = locked(stale_folder)
                        placing.clear(stale_folder)
                        lock.release()
            number = 0
            while True:
                staged = self.path.parent / f"{self.path.name}.tmp.{os.getpid()}.{number}"
                try:
                    staged.mkdir()
                    break
                except FileExistsError:
                    number += 1
        self._staged = staged
        try:
            self._lock = locked(staged)
            return FieldWriters(staged / placing.NEW, self._fields, self._storage, axes)
        except BaseException:
            self._unstage()
            raise

    def _array(self, row: Mapping[str, object], name: str, i: int) -> NDArray[np.generic]:
        try:
            value = row[name]
        except KeyError:
            raise ArgumentError(f"row {i}: expected the field '{name}', found {', '.join(row) or 'none'}") from None
        array = self._asarray(value, f"row {i}: field '{name}'")
        return array if array.dtype == self._fields[name] else self._cast(array, name)

    @staticmethod
    def _asarray(value: object, what: str) -> NDArray[np.generic]:
        if type(value) is np.ndarray:
            return value
        try:
            return np.asarray(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"{what}: expected an array of numbers: {error}") from error

    def _cast(self, values: NDArray[np.generic], name: str) -> NDArray[np.generic]:
        dtype = self._fields[name]
        if values.dtype == dtype or not values.size:
            return values.astype(dtype, copy=False)
        if values.dtype.kind not in "iuf" or (values.dtype.kind == "f" and dtype.kind != "f"):
            raise DtypeError(f"field '{name}': {values.dtype} cannot be stored as {dtype}")
        if dtype.kind in "iu":
            low, high = int(values.min()), int(values.max())
            if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
                raise DtypeError(f"field '{name}': values from {low} to {high} do not fit {dtype}")
            return values.astype(dtype)
        with np.errstate(over="ignore"):
            cast = values.astype(dtype)
        if np.isinf(cast).any() and np.isinf(cast).sum() != np.isinf(values).sum():
            raise DtypeError(f"field '{name}': values up to {np.abs(values).max()} do not fit {dtype}")
        return cast

    def close(self) -> None:
        """Writes buffered data, the ledger last, and moves the cache to its path.

        Raises:
            ExistsError: the path was created by another process. Move it away and call ``close`` again.
            ClosedError: an earlier write failed; nothing was kept.
        """
        if not self._open:
            return
        if self._whole is None:
            try:
                self._check_open()
                self._whole = self._finish_writers()
            except BaseException:
                self.abort()
                raise
        with boundary(self.path, "put the cache at"):
            self._place(self._whole)
        self.abort()

    def _finish_writers(self) -> Path:
        """Returns the folder of the cache: complete and synced to disk, but not yet at its path."""
        if self._writers is None:
            self._writers = self._start_writers(dict.fromkeys(self._fields, 1))
        written = self._writers.finish()
        folder = self._writers.folder
        Ledger(
            total_num_rows=written.rows,
            shard_rows={"": written.rows},
            is_finished=True,
            finished_shards=("",),
            field_counts=dict(sorted(written.elements.items())),
            metadata={"preprocessor_metadata": self._metadata},
            extra={OURS: {}},
        ).write(folder, written.checksums)
        sync_tree(folder)
        return folder

    def _place(self, folder: Path) -> None:
        self._refuse_foreign()
        if not self.path.is_symlink():
            with suppress(OSError):  # not empty
                self.path.rmdir()
        if not os.path.lexists(self.path):
            folder.rename(self.path)
            sync_folders([self.path.parent])
            return
        with placing.turn(self.path) as work:
            remove(work / _WRITTEN)
            folder.rename(work / _WRITTEN)
            placing.swap(self.path, work, _WRITTEN, sorted(p.name for p in (work / _WRITTEN).iterdir()))

    def abort(self) -> None:
        """Closes the writer and removes everything it wrote."""
        self._open = False
        self._writers = None
        self._unstage()

    def _unstage(self) -> None:
        """Removes the temporary folder and its lock."""
        if self._staged is not None:
            placing.clear(self._staged)
            self._staged = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _counts(lengths: Mapping[str, ArrayLike] | ArrayLike, name: str) -> NDArray[np.int64]:
    if isinstance(lengths, Mapping) and name not in lengths:
        raise ArgumentError(
            f"lengths: expected an entry for field '{name}', found {', '.join(map(str, lengths)) or 'none'}"
        )
    field_lengths = lengths[name] if isinstance(lengths, Mapping) else lengths
    return flat(field_lengths, "row") if np.size(field_lengths) else np.empty(0, np.int64)
