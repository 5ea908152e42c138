"""``open_cache``: reads rows of a token cache in any layout."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base.codes import Remark
from actshard.base.errors import (
    ArgumentError,
    FileAccessError,
    FormatError,
    MissingFileError,
    NotStoredError,
    OutOfRangeError,
    UnfinishedError,
    UnsupportedError,
    warn,
)
from actshard.base.location import Location, network_io
from actshard.base.storage import Memory, Remote
from actshard.base.walking import find_cache
from actshard.base.work import PUSHING
from actshard.tokens import ledger as ledgers
from actshard.tokens.ledger import Ledger

TOKENS = "input_ids"


def open_cache(
    path: str | os.PathLike[str],
    *,
    io: str = "auto",
    memory: int | str = "256MiB",
    storage_options: Mapping[str, object] | None = None,
    cache: int | str | os.PathLike[str] | Literal[False] | None = None,
) -> TokenCache:
    """Opens a token cache that Levanter or actshard wrote.

    Reads consolidated and sharded caches, those of ``SerialCacheWriter``, and older versions (``docs/formats/levanter.md``). No
    data are read before their rows are requested. If a local cache is replaced or removed while it is open, reads return its old
    rows, or raise FormatError or MissingFileError.

    Args:
        path: the folder that contains ``shard_ledger.json``, or its parent if that contains a single split; or the URL of
            either. Of a remote cache only the ledger is read; a field or shard that disagrees with it is a FormatError when it
            is first read.
        io: ``"mmap"``, ``"pread"`` or ``"auto"``, as for :func:`actshard.open`.
        memory: size of the cache of decoded blocks, in bytes or as ``"256MiB"``. Plain caches need none.
        storage_options: options of a remote store, as for :func:`actshard.open`.
        cache: size or folder of a cache on disk for a remote store, as for :func:`actshard.open`.

    Raises:
        MissingFileError: there is no cache, or a file of a cache that actshard wrote is missing.
        UnfinishedError: its writer has not finished, or it is being uploaded to its bucket.
        FormatError: the ledger or an array is invalid.
        FileAccessError: the store cannot be read.
    """
    token_cache = TokenCache(path, io=io, memory=memory, storage_options=storage_options, cache=cache)
    for warning in token_cache.warnings:
        warn(f"{token_cache.path}: {warning}", code=warning.code)
    return token_cache


class TokenCache:
    """Rows of an open token cache. Create one with :func:`open_cache`.

    ``cache[i]`` is a row: a dict of numpy arrays by field, read-only views where data are stored plain. A cache can be pickled
    (by its path, ledger and options; FormatError if it was replaced meanwhile) and used after a fork and from many threads.

    Attributes:
        path: the cache's folder.
        ledger: contents of ``shard_ledger.json``.
        fields: field names; nested ones as ``"a/b"``.
        warnings: warnings of opening: texts, each with a ``code``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        io: str = "auto",
        memory: int | str = "256MiB",
        storage_options: Mapping[str, object] | None = None,
        cache: int | str | os.PathLike[str] | Literal[False] | None = None,
    ) -> None:
        if not _arguments.is_one_of(io, ("auto", "mmap", "pread")):
            raise ArgumentError(f"io must be 'auto', 'mmap' or 'pread', not {io!r}")
        root = find_cache(path, storage_options, cache)
        ledger = ledgers.read(root)
        _check_pushed(root)
        self._begin(root, io, memory, ledger)

    def _begin(self, root: Location, io: str, memory: int | str, ledger: Ledger) -> None:
        if isinstance(root.storage, Memory):
            raise UnsupportedError("expected a local path or a URL, found files in memory", path=root)
        self.path = root.place
        self._open_arguments = (root, io, memory)
        self.ledger = ledger
        self.io = io if io != "auto" else network_io(root)
        self._memory = _native.BlockCache(_arguments.size(memory, "memory"))
        self.warnings: tuple[Remark, ...] = ()
        names = sorted(self.ledger.field_counts) or _fields_on_disk(root, self.ledger)
        self.fields: tuple[str, ...] = tuple(names)
        # Fields of a remote cache are opened on first use: each takes several requests.
        self._is_lazy = not root.is_local and bool(self.ledger.field_counts)
        self._fields = {} if self._is_lazy else {name: self._open(name) for name in names}
        self._rows = self.ledger.total_num_rows if self._is_lazy else self._agreed_rows()
        # Fields that `_row_of` reads; the others take the short way.
        self._shaped = tuple(name for name in names if self._is_lazy or self._fields[name].has_shapes)
        self._plain = tuple((name, field.row) for name, field in self._fields.items() if name not in self._shaped)

    def __reduce__(self) -> tuple[object, ...]:
        root, io, memory = self._open_arguments
        return (_reopen, (root, io, memory, self.ledger))

    def _open(self, name: str) -> _native.TokenField:
        parts: list[tuple[str | os.PathLike[str], tuple[int, int] | None]]
        if self.ledger.layout == ledgers.SHARDED:
            rows, counts = self.ledger.shard_rows, self.ledger.field_counts_by_shard
            parts = [
                (self.path / shard / name, (rows[shard], counts.get(shard, {}).get(name, 0)))
                for shard in self.ledger.finished_shards
                if rows[shard]
            ]
        else:
            counted = (self.ledger.total_num_rows, self.ledger.field_counts[name]) if self._is_lazy else None
            parts = [(self.path / name, counted)]
        version = self.ledger.version
        state = None if version is None else (self.path / ledgers.NAME, *version)
        return _native.TokenField(parts, self.io, self._memory, state, is_complete=self.ledger.is_complete)

    def _agreed_rows(self) -> int:
        counted = self.ledger.total_num_rows
        counts = {name: field.num_rows for name, field in self._fields.items()}
        if not counts:
            if counted:
                raise FormatError(
                    f"the ledger counts {_arguments.many(counted, 'row')}, but the cache has no fields", path=self.path
                )
            return 0
        if len(set(counts.values())) > 1:
            raise FormatError(f"fields have different numbers of rows: {counts}", path=self.path)
        rows = next(iter(counts.values()))
        if rows == 0 and counted:
            raise FormatError(
                f"the ledger counts {_arguments.many(counted, 'row')}, but offsets contain none: their chunks are missing or empty",
                path=self.path,
            )
        notes = []
        if rows != counted:
            notes.append(f"the ledger counts {_arguments.many(counted, 'row')}, but offsets[0] is {rows}; using {rows}")
        for name, elements in self.ledger.field_counts.items():
            if name in self._fields and self._fields[name].num_elements != elements:
                stored_elements = self._fields[name].num_elements
                notes.append(
                    f"the ledger counts {elements} elements of {name}, but the last row ends at {stored_elements}"
                )
        self.warnings = tuple(Remark("count-claim", note) for note in notes) + self._missing_files()
        return rows

    def _missing_files(self) -> tuple[Remark, ...]:
        """Warnings of missing files, which read as zeros. Shards of caches without gaps are checked when they are read.

        Raises:
            MissingFileError: the ledger is that of a writer which leaves out no file.
        """
        if not Location.at(self.path).is_local:
            return ()
        remarks = []
        for path, files in (missing for field in self._fields.values() for missing in field.missing_files()):
            count = "is missing" if files == 1 else f"and {_arguments.many(files - 1, 'more file')} are missing"
            if self.ledger.is_complete:
                raise MissingFileError(
                    f"the file {count}, so the cache is incomplete: copy it again, or build it again", path=path
                )
            remarks.append(Remark("chunk-missing", f"{path} {count}; the rows read as zeros"))
        return tuple(remarks)

    def __repr__(self) -> str:
        return f"TokenCache({str(self.path)!r}, rows={self._rows:,}, fields={', '.join(self.fields)})"

    def __len__(self) -> int:
        return self._rows

    @property
    def num_tokens(self) -> int:
        """Number of elements in the token field."""
        if self._is_lazy:
            return self.ledger.field_counts[self.token_field]
        return self._fields[self.token_field].num_elements if self._fields else 0

    @property
    def token_field(self) -> str:
        """The field of token ids: ``input_ids``, or the name given in the ledger."""
        name = self.ledger.preprocessor.get("input_ids_key", TOKENS)
        if name in self.fields or not self.fields:
            return str(name)
        return next((n for n in (TOKENS, *self.fields) if n in self.fields and n.endswith(TOKENS)), self.fields[0])

    def field(self, name: str) -> _native.TokenField:
        """The native object of a field."""
        field = self._fields.get(name)
        if field is None and self._is_lazy and name in self.fields:
            field = self._fields[name] = self._open(name)
        if field is None:
            raise NotStoredError(
                f"the cache has no field '{name}'; it has {', '.join(self.fields) or 'none'}", path=self.path
            )
        return field

    def dtype(self, name: str) -> np.dtype[np.generic]:
        """The stored dtype of a field."""
        return self.field(name).descr

    def __getitem__(self, row: int) -> dict[str, NDArray[Any]]:
        """Returns a row: an array for every field, a read-only view where it is contiguous in a plain chunk, otherwise a copy.

        Raises:
            OutOfRangeError: the index is out of range.
        """
        row = self._row(row)
        # Hot path of single rows; see benches/tokens.py.
        arrays = {name: read(row) for name, read in self._plain}
        for name in self._shaped:
            arrays[name] = self._row_of(name, row)
        return arrays

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

    def _row_of(self, name: str, row: int) -> NDArray[np.generic]:
        field = self.field(name)
        return _in_shape(field.row(row), field.shape(row), name, self.path) if field.has_shapes else field.row(row)

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        return (self[row] for row in range(self._rows))

    def rows(self, indices: Sequence[int] | NDArray[np.generic]) -> list[dict[str, NDArray[Any]]]:
        """Reads many rows in parallel. Indices may repeat.

        Returns:
            One dict of arrays per index. The arrays are slices of one new array per field.
        """
        numbers = self.numbers(indices, self._rows, "row")
        batch: list[dict[str, NDArray[np.generic]]] = [{} for _ in range(len(numbers))]
        for name in self.fields:
            field = self.field(name)
            flat, offsets = field.rows(numbers)
            ends = offsets.tolist()
            for i, row in enumerate(batch):
                row[name] = flat[ends[i] : ends[i + 1]]
                if field.has_shapes:
                    row[name] = _in_shape(row[name], field.shape(int(numbers[i])), name, self.path)
        return batch

    def numbers(self, indices: Sequence[int] | NDArray[np.generic], most: int, what: str) -> NDArray[np.int64]:
        """Converts indices to int64. Negative indices count from the end.

        Raises:
            OutOfRangeError: an index is out of range.
            ArgumentError: an index is not an integer.
        """
        return _arguments.members(indices, most, what, self.path)

    def view(self, field: str) -> JaggedView:
        """The rows of one field."""
        return JaggedView(self, field)


def _check_pushed(root: Location) -> None:
    """Raises UnfinishedError for a cache in a bucket that is being replaced: its ledger may still be the old one.

    Sends one request. Skipped for web servers, where a missing file would cost several requests.
    """
    if not isinstance(root.storage, Remote) or not root.lists or str(root).startswith("hf://"):
        return  # commits of the hub are complete
    try:
        has_marker = root.storage.glance((root / PUSHING).key)
    except FileAccessError:  # it refuses names that it does not list
        return
    if has_marker:
        raise UnfinishedError(
            "is being uploaded, or its upload was interrupted: the same actshard.push completes it", path=root
        )


def _reopen(root: Location, io: str, memory: int | str, ledger: Ledger | None = None) -> TokenCache:
    if ledger is None:
        return TokenCache(root, io=io, memory=memory)
    if root.is_local:
        current = ledgers.read(root)
        if current != ledger:
            raise FormatError(
                "the cache was replaced after it was opened and pickled: numbers and orders of its rows would be those of other "
                "rows. Open it again, and make datasets and streams from that",
                path=root / ledgers.NAME,
            )
        ledger = current  # the version of the file is this machine's
    cache = TokenCache.__new__(TokenCache)
    cache._begin(root, io, memory, ledger)
    return cache


def _in_shape(flat: NDArray[np.generic], axes: list[int], name: str, path: Path) -> NDArray[np.generic]:
    leading_size = math.prod(axes)
    if len(flat) % leading_size == 0 if leading_size else len(flat) == 0:
        with suppress(ValueError):  # numpy limits the size of a shape even if it has no elements
            return flat.reshape(*axes, len(flat) // leading_size if leading_size else 0)
    raise FormatError(
        f"field '{name}': {len(flat)} elements cannot be reshaped to rows of shape {axes}", path=path, code="metadata"
    )


class JaggedView:
    """One field of a cache: ``view[i]`` is a row; ``view.elements(a, b)`` a range of all rows' elements, concatenated.

    Arrays are read-only views of the mapped file where data are stored plain and contiguous (rows that cross a chunk boundary,
    every 262,144 elements, are not), otherwise copies.
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
            return self.cache._row_of(self.name, row)
        return self._field.row(row)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The stored dtype."""
        return self._field.descr

    @property
    def num_elements(self) -> int:
        """Number of elements in all rows."""
        return self._field.num_elements

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Row boundaries: (rows + 1,) int64, a copy. Row i is elements ``offsets[i]`` to ``offsets[i + 1]``."""
        return self._field.bounds(0, len(self)).view(np.int64)

    def elements(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Elements ``start`` to ``stop`` of all rows, concatenated."""
        first, last, _ = slice(start, stop).indices(self.num_elements)
        return self._field.elements(first, max(last - first, 0))


def _fields_on_disk(root: Location, ledger: Ledger) -> list[str]:
    """Fields of a cache whose ledger lists none: folders that contain an ``offsets`` array."""
    shards = set(ledger.finished_shards)
    if not root.lists:
        if not ledger.total_num_rows:
            return []
        raise UnsupportedError(
            "the ledger lists no fields (it is of an older Levanter), and a web server cannot be listed: copy the cache to a "
            "local folder, or open it from its bucket",
            path=root,
        )
    if not root.is_local:
        return sorted(_fields_in_store(root, root, shards))
    fields = []
    for file, _ in root.files():
        name, _, array = file.relative_to(root).rpartition("/offsets/")
        if array != "zarr.json" or not name or name.split("/")[0] in shards or name.startswith("__"):
            continue
        parts = name.split("/")
        if not any(ledgers.exists(root / "/".join(parts[: n + 1])) for n in range(len(parts))):
            fields.append(name)
    return fields


def _fields_in_store(root: Location, folder: Location, shards: set[str]) -> Iterator[str]:
    """As :func:`_fields_on_disk`, without listing chunks."""
    entries = {entry.name: entry.kind for entry in folder.entries()}
    if folder != root and ledgers.NAME in entries:
        return
    subfolders = {name for name, kind in entries.items() if kind == "folder"}
    if "offsets" in subfolders and folder != root:
        yield folder.relative_to(root)
    for name in sorted(subfolders - {"offsets", "data", "shapes"}):
        if not (folder == root and (name in shards or name.startswith("__"))):
            yield from _fields_in_store(root, folder / name, shards)
