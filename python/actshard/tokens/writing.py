"""``CacheWriter``: rows that are tokens already, into a cache of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from actshard import _native
from actshard._arguments import dtype as native_dtype
from actshard.errors import ArgumentError, ClosedError, DtypeError, ExistsError, from_os
from actshard.tokens import ledger as ledgers
from actshard.tokens.ledger import Ledger

STORAGES = ("plain", "lz4")
_NO_SHAPES: NDArray[np.int64] = np.empty(0, np.int64)


def checked_storage(storage: str) -> str:
    """A storage that there is."""
    if storage not in STORAGES:
        raise ArgumentError(f"storage must be one of {', '.join(STORAGES)}, not {storage!r}")
    return storage


class FieldWriters:
    """The fields of a cache that are being written into a folder; the ledger is somebody else's."""

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
        self, name: str, elements: NDArray[Any], lengths: NDArray[np.int64], shapes: NDArray[np.int64] = _NO_SHAPES
    ) -> None:
        """Rows of a field: their elements end to end, and how many each has."""
        flat = np.ascontiguousarray(elements, self.fields[name]).reshape(-1).view(np.uint8)
        self._writers[name].append(flat, np.ascontiguousarray(lengths, np.int64), shapes)

    def extend(self, name: str, field: _native.TokenField) -> None:
        """All rows of a field of another cache; what is stored there is copied and not decoded."""
        self._writers[name].extend(field)

    def finish(self) -> tuple[int, dict[str, int]]:
        """Writes what is left and waits for the disk: rows, and elements of each field."""
        counts = {name: writer.finish() for name, writer in self._writers.items()}
        rows = next(iter(counts.values()))[0] if counts else 0
        return rows, {name: elements for name, (_, elements) in counts.items()}


def _native_name(dtype: np.dtype[Any]) -> str:
    if dtype.kind not in "iuf":
        raise DtypeError(f"a token cache holds integers and floats, not {dtype}")
    return native_dtype(dtype)[1]


class CacheWriter:
    """Writes a cache from arrays: what Levanter's ``SerialCacheWriter`` is for.

    >>> with tokens.CacheWriter("cache/train", {"input_ids": np.int32}) as writer:
    ...     writer.append([{"input_ids": ids} for ids in documents])

    Nothing is at the path before the writer is closed without an error; then all of it is.

    Args:
        path: the folder to make.
        fields: names and types. Nested fields are named ``"a/b"``.
        storage: ``"plain"`` or ``"lz4"``; see :func:`~actshard.tokens.build_cache`.
        metadata: the ledger's ``preprocessor_metadata``, for readers that look at it.
        overwrite: replace what is there.

    Raises:
        ExistsError: something is at the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Mapping[str, DTypeLike],
        *,
        storage: str = "plain",
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path).expanduser()
        if not fields:
            raise ArgumentError("fields: expected at least one")
        for name in fields:
            if not name or any(part in ("", ".", "..") for part in name.split("/")):
                raise ArgumentError(f"fields: {name!r} is no name of a field")
        if self.path.exists() and not overwrite and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ExistsError("something is here already; overwrite=True replaces it", path=self.path)
        self._fields = {name: np.dtype(dtype) for name, dtype in fields.items()}
        self._storage = checked_storage(storage)
        self._metadata = dict(metadata) if metadata is not None else None
        self._staged = self.path.parent / f"{self.path.name}.tmp.{os.getpid()}"
        self._writers: FieldWriters | None = None
        self._axes: dict[str, int] = {}
        self._open = True

    def append(self, rows: Sequence[Mapping[str, Any]] | Iterable[Mapping[str, Any]]) -> None:
        """Appends rows: for each a dict with an array, or a list, for every field.

        Raises:
            ArgumentError: a row lacks a field, has another, or an array of another kind.
            ClosedError: the writer was closed.
        """
        if not self._open:
            raise ClosedError("the writer was closed", path=self.path)
        batch = list(rows)
        if not batch:
            return
        arrays = {name: [self._array(row, name, i) for i, row in enumerate(batch)] for name in self._fields}
        for i, row in enumerate(batch):
            if len(row) != len(self._fields):
                unknown = sorted(set(row) - set(self._fields))
                raise ArgumentError(f"row {i}: unknown field '{unknown[0]}'; the cache has {', '.join(self._fields)}")
        if self._writers is None:
            self._axes = {name: max(made[0].ndim, 1) for name, made in arrays.items()}
            self._begin()
        assert self._writers is not None
        for name, made in arrays.items():
            axes = self._axes[name]
            for i, array in enumerate(made):
                if array.ndim != axes:
                    raise ArgumentError(f"row {i}: field '{name}': expected {axes} axes, found {array.ndim}")
            lengths = np.fromiter((a.size for a in made), np.int64, len(made))
            flat = np.concatenate([a.reshape(-1) for a in made]) if len(made) > 1 else made[0].reshape(-1)
            shapes = np.array([a.shape[:-1] for a in made], np.int64).reshape(-1) if axes > 1 else _NO_SHAPES
            self._writers.append(name, flat, lengths, shapes)

    def append_flat(self, elements: Mapping[str, NDArray[Any]], lengths: Mapping[str, Any] | NDArray[Any]) -> None:
        """Appends rows as flat arrays: elements end to end, and how many each row has (the same in all fields, or by field)."""
        if not self._open:
            raise ClosedError("the writer was closed", path=self.path)
        if set(elements) != set(self._fields):
            raise ArgumentError(f"expected the fields {', '.join(self._fields)}, found {', '.join(elements) or 'none'}")
        if self._writers is None:
            self._axes = dict.fromkeys(self._fields, 1)
            self._begin()
        assert self._writers is not None
        for name, values in elements.items():
            counts = np.asarray(lengths[name] if isinstance(lengths, Mapping) else lengths, np.int64)
            if counts.ndim != 1 or (counts < 0).any() or int(counts.sum()) != np.size(values):
                raise ArgumentError(f"field '{name}': lengths that do not sum to its {np.size(values)} elements")
            self._writers.append(name, self._cast(np.asarray(values), name), counts)

    def _begin(self) -> None:
        shutil.rmtree(self._staged, ignore_errors=True)
        try:
            self._staged.mkdir(parents=True)
        except OSError as error:
            raise from_os(error, self._staged, "make") from error
        self._writers = FieldWriters(self._staged, self._fields, self._storage, self._axes)

    def _array(self, row: Mapping[str, Any], name: str, i: int) -> NDArray[Any]:
        try:
            value = row[name]
        except KeyError:
            raise ArgumentError(f"row {i}: expected the field '{name}', found {', '.join(row) or 'none'}") from None
        made = value if type(value) is np.ndarray else np.asarray(value)
        return made if made.dtype == self._fields[name] else self._cast(made, name)

    def _cast(self, values: NDArray[Any], name: str) -> NDArray[Any]:
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

    def close(self) -> None:
        """Writes what is left, the ledger last, and puts the cache where it belongs."""
        if not self._open:
            return
        self._open = False
        if self._writers is None:
            self._axes = dict.fromkeys(self._fields, 1)
            self._begin()
        assert self._writers is not None
        rows, counts = self._writers.finish()
        Ledger(
            total_num_rows=rows,
            shard_rows={"": rows},
            is_finished=True,
            finished_shards=("",),
            field_counts=dict(sorted(counts.items())),
            metadata={"preprocessor_metadata": self._metadata},
        ).write(self._staged)
        replace_folder(self._staged, self.path)

    def abort(self) -> None:
        """Leaves nothing behind."""
        self._open = False
        self._writers = None
        shutil.rmtree(self._staged, ignore_errors=True)

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def replace_folder(source: Path, target: Path) -> None:
    """Renames a folder to a place where another may be. A kill leaves one of them, or none and the new one beside it."""
    try:
        if target.exists():
            old = target.parent / f"{target.name}.old.{os.getpid()}"
            target.rename(old)
            source.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            source.rename(target)
        ledgers.sync_folder(target.parent)
    except OSError as error:
        raise from_os(error, target, "put the cache at") from error
