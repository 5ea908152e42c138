"""Metadata of a Zarr array, and paths of its chunk files."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actshard.base._json import Fields, exists, read_json, show
from actshard.base.errors import FormatError, MissingFileError, NotAFileError, UnsupportedError
from actshard.base.location import Location, read_together
from actshard.base.storage import Entry, Kind, Stat

PLANES = "actshard.planes"
"""The codec of packed rows (docs/formats/planes.md)."""


@dataclass(frozen=True)
class ArrayMeta:
    """Metadata of an array."""

    store: Location
    node: str
    """Path in the store, such as ``arrays/activations``."""
    metadata: Location
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """Shape of a unit of reading: a chunk, or an inner chunk of a shard."""
    dtype: np.dtype[np.generic] | None
    """In native byte order; None for strings of variable length."""
    swapped: bool
    fill: Any
    prefix: str
    separator: str
    how: str
    """Empty if files contain plain chunks in C order; otherwise a description of the encoding."""
    inner: bool
    """Whether ``chunks`` are inner chunks of shards."""
    codecs: tuple[str, ...]
    """Names of all codecs, including those inside shards."""
    outer: tuple[int, ...]
    """Shape of a file: a chunk, or a shard."""
    json: bytes
    """The metadata as read, without attributes."""
    complete: bool
    """Whether the store's writer stores every chunk of stored tokens: a missing chunk is then an error, not a fill value."""

    @property
    def folder(self) -> Location:
        """The folder of chunk files."""
        return self.store / self.node

    def chunk_files(self) -> dict[tuple[int, ...], int]:
        """Sizes of existing chunk files (shards) by grid position. Lists folders, opens no files.

        If names cannot be listed, requests each chunk of a small grid by name.

        Raises:
            NotAFileError: a folder, a named pipe or another special file has the name of a chunk.
            FileAccessError: a folder cannot be listed, or a chunk's size cannot be read.
            UnsupportedError: the store cannot list names, and the grid has more than 64 chunk files.
        """
        sizes: dict[tuple[int, ...], int] = {}
        dims = len(self.shape)
        if dims == 0:
            path = self.path_of(())
            state = path.found() if path.lists else _stat_of(path)
            return {} if state is None else {(): _size(path, state.kind, state.size)}
        if not self.folder.lists:
            return self._chunk_sizes()
        nested = self.separator == "/"
        folders: list[tuple[Location, tuple[int, ...]]] = [(self.chunks_in, ())]
        while folders:
            folder, prefix = folders.pop()
            for entry in _entries(folder):
                parts = [entry.name] if nested else entry.name.removeprefix(self.prefix).split(".")
                if not all(_INDEX.fullmatch(part) for part in parts):
                    continue
                coords = (*prefix, *map(int, parts))
                if entry.kind == "other" and (folder / entry.name).found() is None:
                    raise MissingFileError(
                        "expected a chunk, found a link that leads nowhere", path=folder / entry.name
                    )
                if nested and len(coords) < dims:
                    folders.append((folder / entry.name, coords))
                elif len(coords) == dims:
                    sizes[coords] = entry.size if entry.size is not None else _size(folder / entry.name, entry.kind, 0)
        return sizes

    def stored(self) -> dict[tuple[int, ...], int]:
        """Like :meth:`chunk_files`, but only for chunks inside the grid. See :func:`stored`."""
        return stored([self])[0]

    def _chunk_paths(self) -> dict[tuple[int, ...], Location] | None:
        """All possible chunk files of a small remote array, to be requested by name; None if their folder must be listed."""
        item = 1 if self.dtype is None else self.dtype.itemsize
        count = math.prod(self.grid)
        few = (
            count <= (_FEW if self.folder.lists else _ASKED_FOR) and count * math.prod(self.outer) * item <= _MOST_BYTES
        )
        if not (few and self.folder.is_remote):
            return None
        return {coords: self.path_of(coords) for coords in itertools.product(*map(range, self.grid))}

    @property
    def grid(self) -> tuple[int, ...]:
        """Numbers of files (chunks, or shards) along the axes."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.outer, strict=True))

    def _chunk_sizes(self) -> dict[tuple[int, ...], int]:
        """Like :meth:`chunk_files`, for a store that cannot list names."""
        if math.prod(self.grid) > _ASKED_FOR:
            self.chunks_in.entries()  # raises an error with the reason
            raise UnsupportedError("names cannot be listed", path=self.chunks_in)
        sizes = {}
        for coords in itertools.product(*map(range, self.grid)):
            path = self.path_of(coords)
            if (state := _stat_of(path)) is not None:
                sizes[coords] = _size(path, state.kind, state.size)
        return sizes

    @property
    def chunks_in(self) -> Location:
        """The folder that contains chunk files, or subfolders of them."""
        first = self.prefix.rstrip("/") if self.separator == "/" else ""
        return self.folder / first if first else self.folder

    def path_of(self, coords: tuple[int, ...]) -> Location:
        """Path of a chunk (shard) by grid position."""
        return self.folder / (
            self.prefix + self.separator.join(map(str, coords)) if coords else (self.prefix.rstrip("./") or "0")
        )

    def attributes(self) -> dict[str, object]:
        """The array's attributes. Read on demand, because version 2 stores them in a separate file."""
        path = self.folder / ("zarr.json" if self.metadata.name == "zarr.json" else ".zattrs")
        if not exists(path):
            return {}
        value = json_object(path)
        return json_mapping(value, "attributes", path) if path.name == "zarr.json" else value

    def fill_bytes(self) -> bytes | None:
        """The fill value as the bytes of one element, in native byte order; None if a missing chunk is an error."""
        if self.complete:
            return None
        assert self.dtype is not None
        return np.array([self.fill], self.dtype).tobytes()

    def first_missing(self, present: Container[tuple[int, ...]]) -> tuple[int, ...] | None:
        """The first position of the grid that is not present. Visits at most one more than those present."""
        return next((coords for coords in itertools.product(*map(range, self.grid)) if coords not in present), None)

    def check_chunks(self, present: Container[tuple[int, ...]]) -> None:
        """Raises MissingFileError if the array is complete and a chunk of its grid is not present."""
        missing = self.first_missing(present) if self.complete else None
        if missing is not None:
            raise self.missing_chunk(missing)

    def missing_chunk(self, coords: tuple[int, ...]) -> MissingFileError:
        """The error of a complete array for a chunk without a file."""
        text = "expected a chunk, found nothing: its writer stores every chunk; restore the file"
        return MissingFileError(text, path=self.path_of(coords))

    def error(self, what: str, field: str | None = None) -> FormatError:
        """An error about the array's metadata or one field of them."""
        if field is None:
            return FormatError(what, path=self.metadata)
        return FormatError(f"field '{field}': {what}", path=self.metadata, code="metadata")


_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")


_ASKED_FOR = 64
"""Limit on chunk files that are requested by name if they cannot be listed."""

_FEW = 8
"""Limit on chunk files that are requested by name although they can be listed, to save the request that lists them."""
_MOST_BYTES = 4 << 20
"""Limit on bytes of an array that are requested before it is known which chunks exist."""


def stored(arrays: Sequence[ArrayMeta]) -> list[dict[tuple[int, ...], int]]:
    """Sizes of the existing chunk files of small arrays, inside their grids.

    Small remote chunk files are also read, in parallel, so that reading the arrays takes no further request.

    Raises:
        NotAFileError, FileAccessError, UnsupportedError: as in :meth:`ArrayMeta.chunk_files`.
        MissingFileError, FormatError: a chunk does not exist, and the array is complete, or its metadata have disappeared or were
            replaced.
    """
    paths_by_array = [array._chunk_paths() for array in arrays]
    paths = [path for array_paths in paths_by_array if array_paths for path in array_paths.values()]
    size = {
        path: None if data is None else len(data)
        for path, data in zip(paths, read_together(paths, 2 * _MOST_BYTES), strict=True)
    }
    chunk_sizes = []
    for array, names in zip(arrays, paths_by_array, strict=True):
        if names is None:
            chunk_sizes.append(array.chunk_files())
            array.check_chunks(chunk_sizes[-1])
            continue
        present = {coords: n for coords, path in names.items() if (n := size[path]) is not None}
        if len(present) < len(names):
            array.metadata.check_still_there()
        array.check_chunks(present)
        chunk_sizes.append(present)
    return chunk_sizes


def _stat_of(path: Location) -> Stat | None:
    """State of a chunk in a store that cannot list names; None if it does not exist.

    A refused request raises, and a missing chunk is requested twice: a restarting proxy may return a single 404, and fill values
    would then be wrong.
    """
    for _ in range(2):
        try:
            return path.stat()
        except MissingFileError:
            pass
    return None


def _entries(folder: Location) -> list[Entry]:
    """Entries with sizes; empty if the folder does not exist."""
    try:
        return folder.entries(sizes=True)
    except (MissingFileError, NotAFileError):
        return []


def _size(path: Location, kind: Kind, size: int) -> int:
    if kind != "file":
        what = "a folder" if kind == "folder" else "a special file"
        raise NotAFileError(f"expected a regular file, a chunk, found {what}", path=path)
    return size


def json_object(path: Location) -> dict[str, object]:
    """Reads a JSON file that must contain an object."""
    return Fields(read_json(path), path).value


def json_mapping(value: dict[str, object], name: str, path: Location) -> dict[str, Any]:
    """A field that must be an object; empty if absent."""
    mapping = value.get(name, {})
    if not isinstance(mapping, dict):
        raise FormatError(f"field '{name}': expected an object, found {show(mapping)}", path=path, code="metadata")
    return mapping
