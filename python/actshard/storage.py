"""Storages that a :class:`~actshard.location.Location` refers to: the local file system, or files in memory.

A new kind of storage is one more class with the methods of :class:`Storage`.
"""

from __future__ import annotations

import os
import stat as modes
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from actshard.errors import TruncatedFileError

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["file", "folder", "other"]
"""``"other"``: a device, a pipe or a broken link. It is never opened, because that may block."""


@dataclass(frozen=True, slots=True)
class Stat:
    """The state of a file or folder.

    Attributes:
        kind: file, folder or other.
        size: size of a file in bytes; 0 for other kinds.
        version: changes when the file is replaced or written. Compare for equality only.
        stored: allocated bytes: fewer than ``size`` for a sparse file, whose size may be arbitrary.
        modified: time of the last write in nanoseconds since 1970; 0 if unknown.
    """

    kind: Kind
    size: int
    version: str
    stored: int
    modified: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """An entry of a folder.

    Attributes:
        name: the name.
        kind: file, folder or other; for a link, the kind of its target.
        size: size of a file in bytes; None if not requested and not free.
        is_link: whether the entry is a symbolic link.
    """

    name: str
    kind: Kind = field(compare=False)
    size: int | None = field(compare=False, default=None)
    is_link: bool = field(compare=False, default=False)


class Storage(Protocol):
    """A file system or an object store, addressed by keys.

    Implementations support comparison, hashing and pickling, and are thread-safe. Methods raise OSError or ActshardError.
    """

    local: ClassVar[bool]
    """Whether keys are paths of this machine's file system."""

    def text(self, key: str) -> str:
        """The path or URL of a key."""

    def stat(self, key: str) -> Stat:
        """Returns the state of a file or folder. Follows links."""

    def scan(self, key: str, sizes: bool) -> Iterator[Entry]:
        """Yields the entries of a folder in any order; with ``sizes``, including the size of each file."""

    def read(self, key: str, start: int, length: int) -> bytes:
        """Reads up to ``length`` bytes from an offset; fewer at the end of the file."""

    def fill(self, key: str, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Fills each buffer with bytes from its offset. Raises TruncatedFileError at the end of the file."""

    def arrow(self, key: str) -> pa.NativeFile:
        """Opens the file for pyarrow, with random access."""


@dataclass(frozen=True, slots=True)
class Local:
    """The file system of this machine. Keys are absolute paths."""

    local: ClassVar[bool] = True

    def text(self, key: str) -> str:
        return key

    def stat(self, key: str) -> Stat:
        found = os.stat(key)  # noqa: PTH116 -- a key is a str; Path would cost time for many files
        version = f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"
        if modes.S_ISREG(found.st_mode):
            return Stat("file", found.st_size, version, found.st_blocks * 512, found.st_mtime_ns)
        return Stat("folder" if modes.S_ISDIR(found.st_mode) else "other", 0, version, 0, found.st_mtime_ns)

    def scan(self, key: str, sizes: bool) -> Iterator[Entry]:
        with os.scandir(key) as entries:
            for entry in entries:
                kind = _kind_of(entry)
                try:
                    size = entry.stat().st_size if sizes and kind == "file" else None
                except FileNotFoundError:  # removed since scandir listed it
                    continue
                yield Entry(entry.name, kind, size, entry.is_symlink())

    def read(self, key: str, start: int, length: int) -> bytes:
        with Path(key).open("rb", buffering=0) as file:
            file.seek(start)
            made = bytearray()
            while len(made) < length and (more := file.read(length - len(made))):  # Linux reads at most 2 GiB per call
                made += more
            return bytes(made)

    def fill(self, key: str, parts: Iterable[tuple[int, memoryview]]) -> None:
        with Path(key).open("rb", buffering=0) as file:
            for start, into in parts:
                done = 0
                while done < len(into):
                    got = os.preadv(file.fileno(), [into[done:]], start + done)
                    if got == 0:
                        raise _ended(start, into, done)
                    done += got

    def arrow(self, key: str) -> pa.NativeFile:
        import pyarrow as pa

        try:
            key.encode()
        except UnicodeEncodeError:  # pyarrow accepts only UTF-8 paths
            return pa.PythonFile(Path(key).open("rb"), mode="r")
        return pa.OSFile(key)


def _kind_of(entry: os.DirEntry[str]) -> Kind:
    try:
        return "folder" if entry.is_dir() else "file" if entry.is_file() else "other"
    except OSError:  # a link to itself
        return "other"


def _ended(start: int, into: memoryview, done: int) -> TruncatedFileError:
    return TruncatedFileError(f"expected {len(into)} bytes at {start}, the file ends", offset=start + done)


@dataclass(frozen=True, slots=True)
class Memory:
    """Files in a dict: ``{"web/train/0.bin": b"..."}``. Folders are prefixes of keys, as in object stores."""

    name: str
    files: Mapping[str, bytes] = field(default_factory=dict, hash=False)
    local: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (Memory, (self.name, dict(self.files)))  # a MappingProxyType cannot be pickled

    def text(self, key: str) -> str:
        return f"memory://{self.name}/{key}"

    def stat(self, key: str) -> Stat:
        data = self.files.get(key)
        if data is not None:
            return Stat("file", len(data), f"{len(data)}-{zlib.crc32(data):08x}", len(data))
        if key and not any(name.startswith(f"{key}/") for name in self.files):
            raise FileNotFoundError(2, "No such file or directory")
        return Stat("folder", 0, "", 0)

    def scan(self, key: str, sizes: bool) -> Iterator[Entry]:
        if self.stat(key).kind != "folder":
            raise NotADirectoryError(20, "Not a directory")
        above = f"{key}/" if key else ""
        below = {name[len(above) :].partition("/")[0] for name in self.files if name.startswith(above)}
        for name in below:
            data = self.files.get(above + name)
            yield Entry(name, "folder") if data is None else Entry(name, "file", len(data))

    def read(self, key: str, start: int, length: int) -> bytes:
        self.stat(key)
        return self.files[key][start : start + length]

    def fill(self, key: str, parts: Iterable[tuple[int, memoryview]]) -> None:
        for start, into in parts:
            data = self.files[key][start : start + len(into)]
            if len(data) < len(into):
                raise _ended(start, into, len(data))
            into[:] = data

    def arrow(self, key: str) -> pa.NativeFile:
        import pyarrow as pa

        return pa.BufferReader(self.files[key])
