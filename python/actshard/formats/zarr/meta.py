"""What the metadata of a Zarr array say, and where its chunk files are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from actshard._json import Fields, exists, read_json, show
from actshard.errors import FormatError, MissingFileError, NotAFileError
from actshard.location import Location
from actshard.storage import Entry, Kind


@dataclass(frozen=True)
class ArrayMeta:
    """What an array's metadata say."""

    store: Location
    node: str
    """Its path in the store, such as ``arrays/activations``."""
    metadata: Location
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """The shape of what is read at once: a chunk, or a chunk inside a shard."""
    dtype: np.dtype[Any] | None
    """In native order; None for strings of any length."""
    swapped: bool
    fill: Any
    prefix: str
    separator: str
    how: str
    """"" if a chunk's file is the chunk, in C order; else what has to be undone, in words."""
    inner: bool
    """Chunks are those inside shards."""
    codecs: tuple[str, ...]
    """Names of all codecs, those inside shards included."""
    outer: tuple[int, ...]
    """The shape of a file: a chunk, or a shard."""
    json: bytes
    """The metadata as they were read, less attributes."""

    @property
    def folder(self) -> Location:
        """Where chunk files are."""
        return self.store / self.node

    def chunk_files(self) -> dict[tuple[int, ...], int]:
        """Sizes of the chunk files (shards) that are there, by their places in the grid. Lists folders; opens nothing.

        Raises:
            NotAFileError: a folder, a named pipe or another special file stands in place of a chunk.
            FileAccessError: a folder cannot be listed, or a chunk cannot be looked at.
        """
        found: dict[tuple[int, ...], int] = {}
        dims = len(self.shape)
        if dims == 0:
            path = self.path_of(())
            state = path.found()
            return {} if state is None else {(): _size(path, state.kind, state.size)}
        nested = self.separator == "/"
        folders: list[tuple[Location, tuple[int, ...]]] = [(self.chunks_in, ())]
        while folders:
            folder, place = folders.pop()
            for entry in _entries(folder):
                parts = [entry.name] if nested else entry.name.removeprefix(self.prefix).split(".")
                if not all(_INDEX.fullmatch(part) for part in parts):
                    continue
                at = (*place, *map(int, parts))
                if nested and len(at) < dims:
                    folders.append((folder / entry.name, at))
                elif len(at) == dims:
                    if entry.kind == "other" and (folder / entry.name).found() is None:
                        continue  # a link to nothing: as for a reader
                    found[at] = entry.size if entry.size is not None else _size(folder / entry.name, entry.kind, 0)
        return found

    @property
    def chunks_in(self) -> Location:
        """The folder that holds chunk files, or folders of them."""
        first = self.prefix.rstrip("/") if self.separator == "/" else ""
        return self.folder / first if first else self.folder

    def path_of(self, place: tuple[int, ...]) -> Location:
        """The file of a chunk (a shard)."""
        return self.folder / (
            self.prefix + self.separator.join(map(str, place)) if place else (self.prefix.rstrip("./") or "0")
        )

    def attributes(self) -> dict[str, Any]:
        """The array's attributes, read when asked for: version 2 keeps them in a file of their own."""
        path = self.folder / ("zarr.json" if self.metadata.name == "zarr.json" else ".zattrs")
        if not exists(path):
            return {}
        value = json_object(path)
        return json_mapping(value, "attributes", path) if path.name == "zarr.json" else value

    def fill_bytes(self) -> bytes:
        """The fill value as one element in native order."""
        assert self.dtype is not None
        return np.array([self.fill], self.dtype).tobytes()

    def error(self, what: str, field: str | None = None) -> FormatError:
        """About this array's metadata, or one field of them."""
        if field is None:
            return FormatError(what, path=self.metadata)
        return FormatError(f"field '{field}': {what}", path=self.metadata, code="metadata")


_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")


def _entries(folder: Location) -> list[Entry]:
    """With sizes; none where there is no folder."""
    try:
        return folder.entries(sizes=True)
    except (MissingFileError, NotAFileError):
        return []


def _size(path: Location, kind: Kind, size: int) -> int:
    if kind != "file":
        what = "a folder" if kind == "folder" else "a special file"
        raise NotAFileError(f"expected a regular file, a chunk, found {what}", path=path)
    return size


def json_object(path: Location) -> dict[str, Any]:
    """The object in a JSON file."""
    return Fields(read_json(path), path).value


def json_mapping(value: dict[str, Any], name: str, path: Location) -> dict[str, Any]:
    """A field that is an object; absent, an empty one."""
    found = value.get(name, {})
    if not isinstance(found, dict):
        raise FormatError(f"field '{name}': expected an object, found {show(found)}", path=path, code="metadata")
    return found
