"""``open_cache``: the rows of a token cache, whatever layout it has."""

from __future__ import annotations

import math
import operator
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard import _arguments
from actshard.codes import Remark
from actshard.errors import (
    ActshardWarning,
    ArgumentError,
    FormatError,
    NotStoredError,
    OutOfRangeError,
)
from actshard.location import Location, network_io
from actshard.tokens import ledger as ledgers
from actshard.tokens.ledger import Ledger
from actshard.walking import find_cache

TOKENS = "input_ids"


def open_cache(path: str | os.PathLike[str], *, io: str = "auto", memory: int | str = "256MiB") -> TokenCache:
    """Opens a token cache that Levanter or actshard wrote.

    Consolidated and sharded caches, those of ``SerialCacheWriter``, and older ones are all read
    (``docs/formats/levanter.md``). No ``data`` array is looked at before rows of it are asked for.

    Args:
        path: the folder that holds ``shard_ledger.json``, or the folder above it if it holds a single split.
        io: ``"mmap"``, ``"pread"`` or ``"auto"``, as for :func:`actshard.open`.
        memory: how much may be kept of what had to be decoded, in bytes or as ``"256MiB"``. Caches stored plain need none.

    Raises:
        MissingFileError: there is no cache.
        UnfinishedError: its writer has not finished.
        FormatError: ledger or arrays are not what they should be.
    """
    cache = TokenCache(path, io=io, memory=memory)
    for warning in cache.warnings:
        warnings.warn(ActshardWarning(f"{cache.path}: {warning}", code=warning.code), stacklevel=2)
    return cache


class TokenCache:
    """Rows of a token cache, open; :func:`open_cache` makes one.

    ``cache[i]`` is a row: a dict of numpy arrays by field, read-only views where the numbers are stored plain. It can be pickled
    (the path travels) and used after a fork and from many threads.

    Attributes:
        path: the cache's folder.
        ledger: what ``shard_ledger.json`` says.
        fields: names of the fields; nested ones as ``"a/b"``.
        warnings: what a reader should know: texts, each with a ``code``.
    """

    def __init__(self, path: str | os.PathLike[str], *, io: str = "auto", memory: int | str = "256MiB") -> None:
        if not _arguments.is_one_of(io, ("auto", "mmap", "pread")):
            raise ArgumentError(f"io must be 'auto', 'mmap' or 'pread', not {io!r}")
        root = find_cache(path)
        self.path = root.place
        self._asked = (root, io, memory)
        self.ledger: Ledger = ledgers.read(root)
        self.io = io if io != "auto" else network_io(root)
        self._memory = _native.BlockCache(_arguments.size(memory, "memory"))
        self.warnings: tuple[Remark, ...] = ()
        names = sorted(self.ledger.field_counts) or _fields_on_disk(root, self.ledger)
        self._fields = {name: self._open(name) for name in names}
        self.fields: tuple[str, ...] = tuple(names)
        self._rows = self._agreed_rows()
        self._shaped = frozenset(name for name, field in self._fields.items() if field.has_shapes)
        self._plain = tuple((name, field.row) for name, field in self._fields.items() if name not in self._shaped)

    def __reduce__(self) -> tuple[Any, ...]:
        path, io, memory = self._asked
        return (_reopen, (path, io, memory))

    def _open(self, name: str) -> _native.TokenField:
        if self.ledger.layout == ledgers.SHARDED:
            rows, counts = self.ledger.shard_rows, self.ledger.field_counts_by_shard
            parts: list[tuple[str | os.PathLike[str], tuple[int, int] | None]] = [
                (self.path / shard / name, (rows[shard], counts.get(shard, {}).get(name, 0)))
                for shard in self.ledger.finished_shards
                if rows[shard]
            ]
            return _native.TokenField(parts, self.io, self._memory)
        return _native.TokenField([(self.path / name, None)], self.io, self._memory)

    def _agreed_rows(self) -> int:
        told = self.ledger.total_num_rows
        counts = {name: field.num_rows for name, field in self._fields.items()}
        if not counts:
            if told:
                raise FormatError(f"the ledger counts {told} rows, but there are no fields", path=self.path)
            return 0
        if len(set(counts.values())) > 1:
            raise FormatError(f"fields have different numbers of rows: {counts}", path=self.path)
        rows = next(iter(counts.values()))
        if rows == 0 and told:
            raise FormatError(
                f"the ledger counts {told} rows, but offsets hold none: their chunks are missing or empty",
                path=self.path,
            )
        notes = []
        if rows != told:
            notes.append(f"the ledger counts {told} rows, offsets[0] is {rows}, which is what counts")
        for name, elements in self.ledger.field_counts.items():
            if name in self._fields and self._fields[name].num_elements != elements:
                held = self._fields[name].num_elements
                notes.append(f"the ledger counts {elements} elements of {name}, the last row ends at {held}")
        self.warnings = tuple(Remark("count-claim", note) for note in notes)
        return rows

    def __repr__(self) -> str:
        return f"TokenCache({str(self.path)!r}, rows={self._rows:,}, fields={', '.join(self.fields)})"

    def __len__(self) -> int:
        return self._rows

    @property
    def num_tokens(self) -> int:
        """Elements of the field of tokens."""
        return self._fields[self.token_field].num_elements if self._fields else 0

    @property
    def token_field(self) -> str:
        """The field that holds token ids: ``input_ids``, or what the ledger calls so."""
        told = self.ledger.preprocessor.get("input_ids_key", TOKENS)
        if told in self._fields or not self._fields:
            return str(told)
        return next((n for n in (TOKENS, *self.fields) if n in self._fields and n.endswith(TOKENS)), self.fields[0])

    def field(self, name: str) -> _native.TokenField:
        """The native half of a field."""
        found = self._fields.get(name)
        if found is None:
            raise NotStoredError(f"holds no field '{name}'; it has {', '.join(self.fields) or 'none'}", path=self.path)
        return found

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type in which a field is stored."""
        return self.field(name).descr

    def __getitem__(self, row: int) -> dict[str, NDArray[Any]]:
        """A row: its array in every field, a read-only view where it lies in one piece, otherwise a copy.

        Raises:
            OutOfRangeError: there is no such row.
        """
        row = self._row(row)
        # Everything else is what a single row costs; see benches/tokens.py.
        made = {name: read(row) for name, read in self._plain}
        for name in self._shaped:
            made[name] = self._shaped_row(name, row)
        return made

    def _row(self, row: int) -> int:
        rows = self._rows
        try:
            number = operator.index(row)
        except TypeError as error:
            raise ArgumentError(f"row: expected an integer, found {type(row).__name__}; rows() takes many") from error
        if -rows <= number < 0:
            number += rows
        if not 0 <= number < rows:
            raise OutOfRangeError(f"row {row}: the cache has {rows}", path=self.path)
        return number

    def _shaped_row(self, name: str, row: int) -> NDArray[Any]:
        field = self._fields[name]
        return _in_shape(field.row(row), field.shape(row), name, self.path)

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        return (self[row] for row in range(self._rows))

    def rows(self, indices: Sequence[int] | NDArray[Any]) -> list[dict[str, NDArray[Any]]]:
        """Many rows, read in parallel; the same index may occur more than once.

        Returns:
            For each index a dict of arrays, slices of one new array per field.
        """
        numbers = self.numbers(indices, self._rows, "row")
        made: list[dict[str, NDArray[Any]]] = [{} for _ in range(len(numbers))]
        for name, field in self._fields.items():
            flat, offsets = field.rows(numbers)
            ends = offsets.tolist()
            for i, row in enumerate(made):
                row[name] = flat[ends[i] : ends[i + 1]]
                if name in self._shaped:
                    row[name] = _in_shape(row[name], field.shape(int(numbers[i])), name, self.path)
        return made

    def numbers(self, indices: Sequence[int] | NDArray[Any], most: int, what: str) -> NDArray[np.int64]:
        """Indices as int64, negative ones counted from the end.

        Raises:
            OutOfRangeError: there is no such member.
            ArgumentError: they are no integers.
        """
        return _arguments.members(indices, most, what, self.path)

    def view(self, field: str) -> JaggedView:
        """A field's rows, without the others."""
        return JaggedView(self, field)


def _reopen(path: str | Location, io: str, memory: int | str) -> TokenCache:
    return TokenCache(path, io=io, memory=memory)


def _in_shape(flat: NDArray[Any], axes: list[int], name: str, path: Path) -> NDArray[Any]:
    known = math.prod(axes)
    if len(flat) % known == 0 if known else len(flat) == 0:
        with suppress(ValueError):  # more than numpy takes, even of rows without elements
            return flat.reshape(*axes, len(flat) // known if known else 0)
    raise FormatError(f"field '{name}': {len(flat)} elements are no rows of shape {axes}", path=path, code="metadata")


class JaggedView:
    """One field of a cache: ``view[i]`` is a row, ``view.elements(a, b)`` a range of all rows' elements laid end to end.

    Arrays are read-only views of the mapped file where the numbers are stored plain and lie in one piece (rows that cross one of
    the borders every 262,144 elements do not), otherwise copies.
    """

    def __init__(self, cache: TokenCache, name: str) -> None:
        self.cache = cache
        self.name = name
        self._field = cache.field(name)

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, row: int) -> NDArray[Any]:
        row = self.cache._row(row)
        if self._field.has_shapes:
            return self.cache._shaped_row(self.name, row)
        return self._field.row(row)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored type."""
        return self._field.descr

    @property
    def num_elements(self) -> int:
        """Elements of all rows."""
        return self._field.num_elements

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each row begins, and the last ends: (rows + 1,) int64, a copy."""
        return self._field.bounds(0, len(self)).view(np.int64)

    def elements(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Elements of all rows laid end to end, from one number to another."""
        first, last, _ = slice(start, stop).indices(self.num_elements)
        return self._field.elements(first, max(last - first, 0))


def _fields_on_disk(root: Location, ledger: Ledger) -> list[str]:
    """Fields of a cache whose ledger does not name them: folders that hold an array of offsets."""
    shards = set(ledger.finished_shards)
    found = []
    for file, _ in root.files():
        name, _, array = file.relative_to(root).rpartition("/offsets/")
        if array != "zarr.json" or not name or name.split("/")[0] in shards or name.startswith("__"):
            continue
        parts = name.split("/")
        if not any(ledgers.exists(root / "/".join(parts[: n + 1])) for n in range(len(parts))):
            found.append(name)
    return found
