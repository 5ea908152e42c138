"""Where bytes lie: a local path now, a key in a remote store later, behind one type.

Formats list, stat and read user data through a :class:`Location`, never through ``pathlib``, so that a new kind of storage is a
new :class:`~actshard.storage.Storage` and nothing else.

Every method raises :class:`~actshard.ActshardError` only, with the location as its path.
"""

from __future__ import annotations

import fnmatch
import io
import itertools
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import actshard._native as _native
from actshard._arguments import local_path
from actshard.errors import (
    ArgumentError,
    FileAccessError,
    FormatError,
    MissingFileError,
    NotAFileError,
    TruncatedFileError,
    UnsupportedError,
    boundary,
    from_os,
    place_of,
)
from actshard.storage import Entry, Kind, Local, Memory, Stat, Storage

if TYPE_CHECKING:
    import pyarrow as pa


MOST_ENTRIES = 10_000_000
"""Entries that :meth:`Location.entries` returns at most."""


def network_io(path: Path | Location) -> str:
    """How ``io="auto"`` reads a path: ``"mmap"`` on file systems of this machine, ``"pread"`` elsewhere."""
    if isinstance(path, Location):
        if not path.is_local:
            return "pread"
        path = path.local
    return "pread" if _native.is_network(path) else "mmap"


_NAME = operator.attrgetter("name")
_LOCAL = Local()


@dataclass(frozen=True, slots=True, eq=True)
class Location:
    """A file or folder, which need not be there. Immutable, hashable, sortable by its names, and cheap to pickle.

    A local location is an ``os.PathLike``: ``open``, ``pathlib.Path`` and the native half take it.

    Attributes:
        storage: the file system or object store.
        key: the name in that storage: an absolute path if it is local, otherwise names joined by ``/`` (``""`` is the root).
    """

    storage: Storage
    key: str

    @classmethod
    def of(cls, value: Any, what: str = "path") -> Location:
        """The location that a user's path means: itself, or a local path made absolute with ``~`` expanded.

        Raises:
            ArgumentTypeError: not a path.
            ArgumentError: a URL, or a name that no local file can have.
        """
        if isinstance(value, Location):
            return value
        return cls(_LOCAL, os.fspath(local_path(value, what)))

    @classmethod
    def at(cls, place: str | os.PathLike[str]) -> Location:
        """The location of a path that was checked when its user gave it; nothing is looked at."""
        return place if isinstance(place, Location) else cls(_LOCAL, os.fspath(place))

    @classmethod
    def in_memory(cls, files: Mapping[str, bytes], name: str = "memory") -> Location:
        """The root of files held in memory."""
        return cls(Memory(name, MappingProxyType(dict(files))), "")

    def __str__(self) -> str:
        return self.storage.text(self.key)

    def __repr__(self) -> str:
        return f"Location({str(self)!r})"

    def __lt__(self, other: Location) -> bool:
        return str(self).split("/") < str(other).split("/")  # a folder before its siblings "folder-2", as pathlib does

    def __fspath__(self) -> str:
        return self.key if self.storage.local else os.fspath(self.local)

    def __hash__(self) -> int:
        return hash(self.key)

    def __truediv__(self, name: str) -> Location:
        if "/" in name or "\0" in name or name in ("", ".", "..") or self.key in ("", "/"):
            return self.joinpath(name)
        return Location(self.storage, f"{self.key}/{name}")  # a dataset may have many thousands of files

    @property
    def is_local(self) -> bool:
        """Whether this is a path of this machine's file system."""
        return self.storage.local

    @property
    def local(self) -> Path:
        """The local path.

        Raises:
            UnsupportedError: it is not local.
        """
        if not self.is_local:
            raise UnsupportedError("expected a local path, found a remote one", path=self)
        return Path(self.key)

    @property
    def place(self) -> Path:
        """What users are shown: the local path, or itself where it is not local."""
        return place_of(self)

    @property
    def name(self) -> str:
        """The last name of the key; ``""`` for a root."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The folder that holds it; the parent of a root is itself."""
        above = self.key.rpartition("/")[0]
        return Location(self.storage, above or ("/" if self.is_local else ""))

    def joinpath(self, *names: str) -> Location:
        """A location below this one. A name may hold several names joined by ``/``.

        Raises:
            ArgumentError: a name is absolute, empty, or holds ``..``: it may come from a file, and must not lead elsewhere.
        """
        key = self.key.rstrip("/")
        for name in names:
            parts = name.split("/")
            if not name or parts[0] == "" or ".." in parts or "\0" in name:
                raise ArgumentError(f"expected a name below the folder, found {name!r:.80}", path=self)
            kept = [part for part in parts if part not in ("", ".")]
            key = "/".join([key, *kept] if key or self.is_local else kept)
        return Location(self.storage, key or self.key)

    def relative_to(self, above: Location) -> str:
        """The names that lead here from a folder above, joined by ``/``; ``"."`` for the folder itself.

        Raises:
            ArgumentError: it is not below that folder.
        """
        if self == above:
            return "."
        start = above.key.rstrip("/") + "/" if above.key else ""
        if self.storage != above.storage or not self.key.startswith(start):
            raise ArgumentError(f"expected a location below {above}", path=self)
        return self.key[len(start) :]

    def stat(self, doing: str = "look at") -> Stat:
        """Kind, size and version; links are followed.

        Args:
            doing: a verb, for messages: what it is looked at for.

        Raises:
            MissingFileError: nothing is there.
            FileAccessError: this user may not know.
        """
        found = self.found(doing)
        if found is None:
            raise MissingFileError("expected a file, found nothing", path=self)
        return found

    def found(self, doing: str = "look at") -> Stat | None:
        """As :meth:`stat`; None where there is nothing."""
        try:
            return self.storage.stat(self.key)
        except (FileNotFoundError, NotADirectoryError):  # a file stands where a folder above should
            return None
        except ValueError:  # a name that no file can have: a null byte, a lone surrogate
            return None
        except OSError as error:
            raise from_os(error, self, doing) from error

    def kind(self) -> Kind | None:
        """``"file"``, ``"folder"``, ``"other"``, or None where there is nothing.

        Raises:
            FileAccessError: this user may not know.
        """
        found = self.found()
        return None if found is None else found.kind

    def exists(self) -> bool:
        """Whether something is there. Raises FileAccessError where this user may not know."""
        return self.kind() is not None

    def is_named(self) -> bool:
        """Whether something of this name is there, even a link that leads nowhere."""
        return os.path.lexists(self.key) if self.is_local else self.exists()

    def entries(self, pattern: str = "*", *, sizes: bool = False, limit: int = MOST_ENTRIES) -> list[Entry]:
        """Entries of a folder whose names match a shell pattern, sorted by name.

        Args:
            pattern: ``"acts*.bin"``; case counts.
            sizes: whether each file's size is wanted too: a request each on a local file system.
            limit: how many names, matching or not, are read at most.

        Raises:
            MissingFileError, NotAFileError, FileAccessError: it is not there, not a folder, or not readable.
            FormatError: there are more than ``limit`` names.
        """
        found = []
        with boundary(self, "look into"):
            try:
                for count, entry in enumerate(self.storage.scan(self.key, sizes)):
                    if count >= limit:
                        raise FormatError(f"expected at most {limit} files and folders, found more", path=self)
                    if pattern == "*" or fnmatch.fnmatchcase(entry.name, pattern):
                        found.append(entry)
            except NotADirectoryError as error:
                raise NotAFileError("expected a folder, found a file", path=self) from error
        return sorted(found, key=_NAME)

    def count(self, most: int) -> int:
        """How many names a folder holds, counted up to ``most``; 0 where there is no folder.

        Raises:
            FileAccessError: it cannot be listed.
        """
        with boundary(self, "look into"):
            try:
                return sum(1 for _ in itertools.islice(self.storage.scan(self.key, False), most))
            except (FileNotFoundError, NotADirectoryError):
                return 0

    def first(self, most: int) -> list[Entry]:
        """The first entries of a folder in the order of its storage, at most ``most``: for looking at huge folders.

        Raises:
            MissingFileError, NotAFileError, FileAccessError: it is not there, not a folder, or not readable.
        """
        with boundary(self, "look into"):
            return list(itertools.islice(self.storage.scan(self.key, False), most))

    def files(self, *, sizes: bool = False) -> Iterator[tuple[Location, Entry]]:
        """All files below, by their names. Linked folders, and those that this user may not list, are left out."""
        try:
            entries = self.entries(sizes=sizes)
        except FileAccessError:
            return
        for entry in entries:
            below = self / entry.name
            if entry.kind == "file":
                yield below, entry
            elif entry.kind == "folder" and not entry.is_link:
                yield from below.files(sizes=sizes)

    def read(self, start: int = 0, length: int | None = None, *, limit: int | None = None) -> bytes:
        """Bytes of a file: all, or ``length`` from an offset on.

        Args:
            start: the first byte.
            length: how many; None: all that follow.
            limit: bytes that are read at most.

        Raises:
            MissingFileError, NotAFileError, FileAccessError: it cannot be read.
            TruncatedFileError: the file ends before.
            FormatError: more than ``limit`` bytes.
        """
        # Looking before opening: opening a named pipe would wait for a writer.
        size = self.regular("read").size
        wanted = max(size - start, 0) if length is None else length
        if limit is not None and wanted > limit:
            raise FormatError(f"expected at most {limit} bytes, found {wanted}", path=self)
        if start < 0 or wanted < 0:
            raise ArgumentError(f"expected a range of bytes, found {length} bytes from {start}", path=self)
        if start + wanted > size:
            raise TruncatedFileError(f"expected {start + wanted} bytes, found {size}", path=self)
        with boundary(self, "read"):
            data = self.storage.read(self.key, start, wanted)
        if len(data) < wanted:
            raise TruncatedFileError(f"expected {start + wanted} bytes, found {start + len(data)}", path=self)
        return data

    def read_utf8(self) -> str:
        """A file of text, in UTF-8, Unix line breaks.

        Raises:
            MissingFileError, NotAFileError, FileAccessError: it cannot be read.
            FormatError: it is not UTF-8.
        """
        try:
            return self.read().decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise FormatError("expected UTF-8 text", path=self, offset=error.start) from error

    def fill(self, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Fills buffers with the bytes from offsets on; the file is opened once.

        Raises:
            MissingFileError, NotAFileError, FileAccessError: it cannot be read.
            TruncatedFileError: the file ends before.
        """
        self.regular("read")
        with boundary(self, "read"):
            try:
                self.storage.fill(self.key, parts)
            except TruncatedFileError as error:
                error.path = self.place
                raise

    def open(self, doing: str = "open", *, pipes: bool = False) -> io.BufferedReader | io.BytesIO:
        """The file as Python reads it, from its beginning; for files that are read line by line.

        Args:
            doing: a verb, for messages.
            pipes: whether a pipe is opened too, which waits for its writer.
        """
        found = self.stat(doing)
        size = found.size if pipes and found.kind == "other" else self.regular(doing).size
        if self.is_local:
            with boundary(self, doing):
                return self.local.open("rb")
        return io.BytesIO(self.read(0, size))

    def arrow(self) -> pa.NativeFile:
        """The file as pyarrow reads it, at any position: ``pq.ParquetFile(location.arrow())``. Close it, or use it in ``with``."""
        self.regular("open")
        with boundary(self, "open"):
            return self.storage.arrow(self.key)

    def regular(self, doing: str = "look at") -> Stat:
        """The state of what has to be a regular file: opening a named pipe would wait for a writer.

        Raises:
            MissingFileError, FileAccessError: as :meth:`stat`.
            NotAFileError: a folder, a device, a pipe.
        """
        found = self.stat(doing)
        if found.kind != "file":
            raise NotAFileError("expected a regular file, found a folder or a special file", path=self)
        return found
