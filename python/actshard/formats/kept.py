"""Cached indexes of folders with many files: opening such a folder again parses none of its files.

.. code-block:: text

    $ACTSHARD_CACHE-index/, or ~/.cache/actshard-index/
      <SHA-256 of the folder's real path, its format and description>.idx
        8 bytes    b"actsidx1"
        32 bytes   SHA-256 of the rest of the file
        u64        bytes of the JSON
        JSON       {"state": ..., "header": {...}, "arrays": [[dtype, elements], ...]}, padded to 8 bytes
        arrays     one after another, little-endian, each padded to 8 bytes

``state`` is a SHA-256 of the names, sizes, modification times, change times and inodes of all files that the index depends on. An
index with another state is not used. An index is stored only if no file changed in the last seconds: a second change within the
resolution of the file system's clock would not alter the state.

Indexes are untrusted, like any file. They contain numbers but no paths, and formats check every number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actshard.base.errors import ActshardError, boundary
from actshard.base.location import Location, cache_folder
from actshard.base.logs import LOG

LEAST_FILES = 256
"""No index is stored for a folder with fewer files."""
LARGEST = 256 << 20
"""Size limit of one index in bytes, for storing and reading."""
MOST_BYTES = 1 << 30
"""Size limit of all stored indexes in bytes. The least recently used are removed first."""
SETTLED_NS = 5_000_000_000
"""Nanoseconds that must have passed since the last change of any file before an index is stored."""
_MAGIC = b"actsidx1"
_DTYPES = ("<u4", "<u8", "<i8", "|u1")


class Listing:
    """The files of a local folder that an index depends on. Each file's state is read once, on first access."""

    def __init__(self, root: Location) -> None:
        self.root = root
        self.began = time.time_ns()
        self.newest = 0
        self._folders: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._single: dict[str, str | None] = {}

    def entries(self, folder: Location, front: str) -> list[str]:
        """The names in a folder that begin with ``front``, sorted."""
        key = (os.fspath(folder), front)
        if key not in self._folders:
            self._folders[key] = []
            with (
                boundary(key[0], "list"),
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                os.scandir(key[0]) as entries,
            ):
                self._folders[key] = sorted(
                    (entry.name, self._version(entry)) for entry in entries if entry.name.startswith(front)
                )
        return [name for name, _ in self._folders[key]]

    def exists(self, path: Location) -> bool:
        """Whether a file exists."""
        key = os.fspath(path)
        if key not in self._single:
            try:
                self._single[key] = self._version_of(os.stat(key))  # noqa: PTH116 -- a key is a str; Path would cost time for many files
            except OSError:
                self._single[key] = None
        return self._single[key] is not None

    def _version(self, entry: os.DirEntry[str]) -> str:
        try:
            return self._version_of(entry.stat())
        except OSError:  # a broken link, or removed since
            return ""

    def _version_of(self, stat: os.stat_result) -> str:
        self.newest = max(self.newest, stat.st_mtime_ns, stat.st_ctime_ns)
        return f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}-{stat.st_ino}"

    @property
    def state(self) -> str:
        """A hash that changes if a file is added, removed, replaced or written."""
        digest = hashlib.sha256()
        for key in sorted(self._folders):
            lines = [f"{name}\0{version}" for name, version in self._folders[key]]
            digest.update("\0\0".join([*key, *lines, "\0"]).encode("utf-8", "surrogateescape"))
        for path in sorted(self._single):
            digest.update(f"{path}\0{self._single[path]}\0\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    @property
    def is_settled(self) -> bool:
        """Whether the last change is older than the resolution of any file system's clock."""
        return self.newest < self.began - SETTLED_NS


def folder() -> Path | None:
    """The folder of stored indexes; None if ``ACTSHARD_INDEX=0``, or if there is no cache folder."""
    if os.environ.get("ACTSHARD_INDEX") == "0":
        return None
    try:
        base = cache_folder()
    except ActshardError:  # no home folder
        return None
    return base.with_name(f"{base.name}-index")


class KeptIndex:
    """The cached index of one folder.

    Args:
        listing: the files that the index depends on, all of them listed.
        format: the name of the format.
        version: version of the format's index layout.
        key: further data that the index depends on, such as a description.
    """

    def __init__(self, listing: Listing, format: str, version: int, key: str = "") -> None:
        self.listing = listing
        parent = folder()
        identity = json.dumps([os.path.realpath(listing.root), format, version, key])
        name = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:40]
        self.path = None if parent is None else parent / f"{name}.idx"

    def load(self) -> tuple[dict[str, object], list[NDArray[np.generic]]] | None:
        """Returns the header and the arrays; None if no index is stored, or if it is stale or damaged."""
        if self.path is None:
            return None
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_uid != os.geteuid() or not 48 <= stat.st_size <= LARGEST:
                    return None
                data = file.read(LARGEST + 1)
            with contextlib.suppress(OSError):  # of a read-only file system
                os.utime(self.path)  # marks the index as recently used
        except OSError:
            return None
        return parsed(data, self.listing.state)

    def save(self, header: Mapping[str, object], arrays: Sequence[NDArray[np.generic]]) -> None:
        """Stores an index, if no file changed recently. A failure to write is only logged."""
        if self.path is None or not self.listing.is_settled:
            return
        data = packed(self.listing.state, header, arrays)
        if len(data) > LARGEST:
            return
        part = self.path.with_name(f".{self.path.stem}.{os.getpid()}-{os.urandom(4).hex()}.part")
        try:
            self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
            _make_room(self.path.parent, len(data))
            with part.open("xb") as file:
                file.write(data)
            part.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):  # a read-only file system refuses this too
                part.unlink(missing_ok=True)
            LOG.info("%s: index not kept: %s", self.listing.root, error)


def _make_room(parent: Path, size: int) -> None:
    """Removes the least recently used indexes and files left by killed processes, until ``size`` bytes fit the limit."""
    files = []
    for entry in os.scandir(parent):
        if entry.name.endswith((".idx", ".part")) and entry.is_file(follow_symlinks=False):
            state = entry.stat(follow_symlinks=False)
            files.append((state.st_mtime_ns, state.st_size, entry.path))
    total = size + sum(file[1] for file in files)
    for _, file_size, path in sorted(files):
        if total <= MOST_BYTES:
            return
        Path(path).unlink(missing_ok=True)
        total -= file_size


def clear() -> None:
    """Removes all stored indexes."""
    parent = folder()
    if parent is None or not parent.is_dir():
        return
    for entry in os.scandir(parent):
        if entry.name.endswith((".idx", ".part")):
            Path(entry.path).unlink(missing_ok=True)


def packed(state: str, header: Mapping[str, object], arrays: Sequence[NDArray[np.generic]]) -> bytes:
    """The bytes of an index."""
    descriptors = [[array.dtype.newbyteorder("<").str, array.size] for array in arrays]
    text = json.dumps({"state": state, "header": dict(header), "arrays": descriptors}).encode()
    text += b" " * (-len(text) % 8)
    parts = [len(text).to_bytes(8, "little"), text]
    for array in arrays:
        raw = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        parts += [raw, bytes(-len(raw) % 8)]
    body = b"".join(parts)
    return _MAGIC + hashlib.sha256(body).digest() + body


def parsed(data: bytes, state: str) -> tuple[dict[str, object], list[NDArray[np.generic]]] | None:
    """The header and arrays of an index; None if it is damaged or its state differs."""
    if data[:8] != _MAGIC or len(data) < 48 or hashlib.sha256(memoryview(data)[40:]).digest() != data[8:40]:
        return None
    offset = 48 + int.from_bytes(data[40:48], "little")
    try:
        value = json.loads(data[48:offset]) if offset <= len(data) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("state") != state or not isinstance(value.get("header"), dict):
        return None
    arrays: list[NDArray[np.generic]] = []
    descriptors = value.get("arrays")
    for descriptor in descriptors if isinstance(descriptors, list) else ():
        if (
            not isinstance(descriptor, list)
            or len(descriptor) != 2
            or descriptor[0] not in _DTYPES
            or type(descriptor[1]) is not int
        ):
            return None
        dtype, count = np.dtype(descriptor[0]), descriptor[1]
        if not 0 <= count <= (len(data) - offset) // dtype.itemsize:
            return None
        arrays.append(np.frombuffer(data, dtype, count, offset).astype(dtype.newbyteorder("="), copy=False))
        offset += -(-count * dtype.itemsize // 8) * 8
    return value["header"], arrays
