"""Where bytes lie: a local path now, a key in a remote store later, behind one type.

Formats list, stat and read user data through a :class:`Location`, never through ``pathlib``, so that a new kind of storage is a
new :class:`Storage` and nothing else. :class:`Local` is the file system; :class:`Memory` holds files in a dict, for tests.

Every method raises :class:`~actshard.ActshardError` only, with the location as its path.
"""

from __future__ import annotations

import fnmatch
import io
import itertools
import operator
import os
import stat as modes
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

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

if TYPE_CHECKING:
    import pyarrow as pa

Kind = Literal["file", "folder", "other"]
"""``"other"``: a device, a pipe, a broken link. Opening one may block, so it is never read."""

MOST_ENTRIES = 10_000_000
"""Entries that :meth:`Location.entries` returns at most."""


def network_io(path: Path | Location) -> str:
    """How ``io="auto"`` reads a path: ``"mmap"`` on file systems of this machine, ``"pread"`` elsewhere."""
    if isinstance(path, Location):
        if not path.is_local:
            return "pread"
        path = path.local
    return "pread" if _native.is_network(path) else "mmap"


@dataclass(frozen=True, slots=True)
class Stat:
    """The state of a file or folder.

    Attributes:
        kind: a file, a folder, or neither.
        size: bytes of a file; 0 for anything else.
        version: changes when the file is replaced or written to. Compare it for equality only.
        stored: bytes that are there: fewer than ``size`` for a sparse file, which claims any size.
        modified: when it was last written to, in nanoseconds since 1970; 0 where the storage does not know.
    """

    kind: Kind
    size: int
    version: str
    stored: int
    modified: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A name in a folder.

    Attributes:
        name: the name.
        kind: that of a link's target.
        size: bytes of a file; None where it was not asked for and would cost a request.
        is_link: whether it is a symbolic link.
    """

    name: str
    kind: Kind = field(compare=False)
    size: int | None = field(compare=False, default=None)
    is_link: bool = field(compare=False, default=False)


class Storage(Protocol):
    """A file system or an object store; a key names a file or folder in it.

    A storage can be compared, hashed and pickled, and used from many threads. Its methods raise OSError or ActshardError.
    """

    local: ClassVar[bool]
    """Whether keys are paths of this machine's file system."""

    def text(self, key: str) -> str:
        """The key as people write it: a path or a URL."""

    def stat(self, key: str) -> Stat:
        """The state of a file or folder; links are followed."""

    def scan(self, key: str, sizes: bool) -> Iterator[Entry]:
        """Names in a folder, in any order; with ``sizes``, the size of each file."""

    def read(self, key: str, start: int, length: int) -> bytes:
        """Bytes from an offset; fewer than asked for where the file ends."""

    def fill(self, key: str, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Fills buffers with the bytes from offsets on; TruncatedFileError where the file ends."""

    def arrow(self, key: str) -> pa.NativeFile:
        """A file that pyarrow reads at random positions."""


@dataclass(frozen=True, slots=True)
class Local:
    """The file system of this machine. Keys are absolute paths."""

    local: ClassVar[bool] = True

    def text(self, key: str) -> str:
        return key

    def stat(self, key: str) -> Stat:
        found = os.stat(key)  # noqa: PTH116 -- a key is a str, and many are looked at
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
                except FileNotFoundError:  # removed since
                    continue
                yield Entry(entry.name, kind, size, entry.is_symlink())

    def read(self, key: str, start: int, length: int) -> bytes:
        with Path(key).open("rb", buffering=0) as file:
            file.seek(start)
            made = bytearray()
            while len(made) < length and (more := file.read(length - len(made))):  # one read gives 2 GiB at most
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
        except UnicodeEncodeError:  # pyarrow takes no path that is not UTF-8
            return pa.PythonFile(Path(key).open("rb"), mode="r")
        return pa.OSFile(key)


def _kind_of(entry: os.DirEntry[str]) -> Kind:
    try:
        return "folder" if entry.is_dir() else "file" if entry.is_file() else "other"
    except OSError:  # a link to itself
        return "other"


def _ended(start: int, into: memoryview, done: int) -> TruncatedFileError:
    return TruncatedFileError(f"expected {len(into)} bytes at {start}, the file ends", offset=start + done)


_NAME = operator.attrgetter("name")
_LOCAL = Local()


@dataclass(frozen=True, slots=True)
class Memory:
    """Files in a dict: ``{"web/train/0.bin": b"..."}``. Folders are the beginnings of keys, as in object stores."""

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
