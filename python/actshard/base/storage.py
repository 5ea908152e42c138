"""Storages that a :class:`~actshard.base.location.Location` refers to: the local file system, remote stores, or files in memory.

A new kind of storage is one more class with the methods of :class:`Storage`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import stat as modes
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import actshard._native as _native
from actshard.base.errors import (
    FileAccessError,
    MissingFileError,
    TruncatedFileError,
    UnsupportedError,
    place_of,
    warn,
)

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
        """Yields the entries of a folder in any order; with ``sizes``, including the size of each file.

        Raises UnsupportedError if names cannot be listed, so that such a folder never looks empty or missing.
        """

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
        look = _LOOK.get()
        return _stat(key) if look is None else look.stat(key)

    def scan(self, key: str, sizes: bool) -> Iterator[Entry]:
        look = _LOOK.get()
        return _scanned(key, sizes) if look is None or sizes else iter(look.listing(key))

    def read(self, key: str, start: int, length: int) -> bytes:
        look = _LOOK.get()
        if look is None or start or length > _SMALL:
            return self._read(key, start, length)
        if key not in look.small:
            look.small[key] = self._read(key, 0, length)
        data = look.small[key]
        return data[:length] if len(data) >= length else self._read(key, 0, length)

    def _read(self, key: str, start: int, length: int) -> bytes:
        with Path(key).open("rb", buffering=0) as file:
            file.seek(start)
            data = bytearray()
            while len(data) < length and (chunk := file.read(length - len(data))):  # Linux reads at most 2 GiB per call
                data += chunk
            return bytes(data)

    def fill(self, key: str, parts: Iterable[tuple[int, memoryview]]) -> None:
        with Path(key).open("rb", buffering=0) as file:
            for start, into in parts:
                position = 0
                while position < len(into):
                    got = os.preadv(file.fileno(), [into[position:]], start + position)
                    if got == 0:
                        raise _ended(start, into, position)
                    position += got

    def arrow(self, key: str) -> pa.NativeFile:
        import pyarrow as pa

        try:
            key.encode()
        except UnicodeEncodeError:  # pyarrow accepts only UTF-8 paths
            return pa.PythonFile(Path(key).open("rb"), mode="r")
        return pa.OSFile(key)


def _scanned(key: str, sizes: bool) -> Iterator[Entry]:
    with os.scandir(key) as entries:
        for entry in entries:
            kind = _kind_of(entry)
            try:
                size = entry.stat().st_size if sizes and kind == "file" else None
            except FileNotFoundError:  # removed since scandir listed it
                continue
            yield Entry(entry.name, kind, size, entry.is_symlink())


def _stat(key: str) -> Stat:
    status = os.stat(key)  # noqa: PTH116 -- a key is a str; Path would cost time for many files
    version = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"
    if modes.S_ISREG(status.st_mode):
        return Stat("file", status.st_size, version, status.st_blocks * 512, status.st_mtime_ns)
    return Stat("folder" if modes.S_ISDIR(status.st_mode) else "other", 0, version, 0, status.st_mtime_ns)


class _Entries:
    """The entries of a folder, listed once and only as far as requested."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries
        self._seen: list[Entry] = []
        self._error: OSError | None = None

    def __iter__(self) -> Iterator[Entry]:
        index = 0
        while True:
            if index == len(self._seen) and not self._more():
                return
            yield self._seen[index]
            index += 1

    def _more(self) -> bool:
        """Reads one more entry. A failure is stored and raised again: a failed generator would look empty to the next reader."""
        if self._error is not None:
            raise _copied(self._error)
        try:
            self._seen.append(next(self._entries))
        except StopIteration:
            return False
        except OSError as error:
            self._error = _copied(error)
            raise
        return True

    def names(self) -> frozenset[str] | None:
        """The names of all entries; None for a folder that has many, or that cannot be listed."""
        try:
            names = frozenset(entry.name for entry in itertools.islice(self, _NAMES + 1))
        except OSError:
            return None
        return names if len(names) <= _NAMES else None


class _Look:
    """What was seen since the look began: local folders, states and small files, each read once; and what servers do not have."""

    def __init__(self, folder: str) -> None:
        self._above = f"{folder.rstrip('/')}/"
        self._listings: dict[str, _Entries] = {}
        self._stats: dict[str, Stat | OSError] = {}
        self._names: frozenset[str] | None = None
        self._is_listed = False
        self.small: dict[str, bytes] = {}
        """Files that were read from their first byte."""
        self.absent: set[tuple[Remote, str]] = set()
        """Objects that a server was asked for, and does not have."""

    def listing(self, key: str) -> _Entries:
        """The entries of a folder."""
        if key not in self._listings:
            self._listings[key] = _Entries(_scanned(key, False))
        return self._listings[key]

    def stat(self, key: str) -> Stat:
        """As :meth:`Local.stat`. What the listing of the folder lacks is absent, without another look at the disk."""
        outcome = self._stats.get(key)
        if outcome is None:
            outcome = self._stats[key] = (
                FileNotFoundError(2, "No such file or directory") if self._lacks(key) else _state(key)
            )
        if isinstance(outcome, Stat):
            return outcome
        raise _copied(outcome)

    def _lacks(self, key: str) -> bool:
        if not key.startswith(self._above):
            return False
        if not self._is_listed:
            self._is_listed = True
            self._names = self.listing(self._above.rstrip("/") or "/").names()
        return self._names is not None and key[len(self._above) :].partition("/")[0] not in self._names


def _state(key: str) -> Stat | OSError:
    try:
        return _stat(key)
    except OSError as error:
        return _copied(error)


def _copied(error: OSError) -> OSError:
    """The same error without its traceback, which keeps the frames of all callers alive, and what they opened, in a cycle."""
    return OSError(error.errno, error.strerror, error.filename)


_NAMES = 10_000
"""Maximum number of names that are listed to know which files a folder lacks; a larger folder is asked for each."""
_LOOK: ContextVar[_Look | None] = ContextVar("_LOOK", default=None)


@contextlib.contextmanager
def one_look(folder: str | os.PathLike[str]) -> Iterator[None]:
    """In this context, all see one state of a folder: a local one is listed once, and files are looked at and read once.

    Several formats look for their files in the same folder, and must not see it before and after a change. A server is asked once
    for each name that it does not have. Within another look, the outer one lasts.
    """
    if _LOOK.get() is not None:
        yield
        return
    token = _LOOK.set(_Look(os.fspath(folder)))
    try:
        yield
    finally:
        _LOOK.reset(token)


def _kind_of(entry: os.DirEntry[str]) -> Kind:
    try:
        return "folder" if entry.is_dir() else "file" if entry.is_file() else "other"
    except OSError:  # a link to itself
        return "other"


def _ended(start: int, into: memoryview, position: int) -> TruncatedFileError:
    return TruncatedFileError(f"expected {len(into)} bytes at {start}, the file ends", offset=start + position)


class DeniedError(FileNotFoundError):
    """A server refused access to a name. It may not exist: servers that do not allow listing also refuse missing names.

    Attributes:
        error: the server's error, to be raised for names that must exist.
    """

    def __init__(self, error: FileAccessError) -> None:
        super().__init__(2, "No such object")
        self.error = error


@dataclass(frozen=True, slots=True, eq=False)
class Remote:
    """A bucket, a web server or a dataset of the Hugging Face hub. Keys are names joined by ``/``.

    A folder is listed once. Objects of up to 1 MiB that were read completely are cached, up to 16 MiB, because several formats read
    the same metadata. A web server has no listings: the folder of the URL is assumed to exist, and names are requested one by one.

    Pickles contain the URL, its options (including secrets, so that other processes can open it), the revision, and all known
    names, sizes and versions, for which the copy makes no request.
    """

    native: _native.RemoteStore
    small: dict[str, bytes] = field(default_factory=dict, repr=False)
    denied: dict[str, FileAccessError] = field(default_factory=dict, repr=False)
    local: ClassVar[bool] = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and (self.native is other.native or self.native.is_same(other.native))

    def __hash__(self) -> int:
        return hash(self.native.name)

    def __reduce__(self) -> tuple[object, ...]:
        # Small files are included, so that opening the copy makes no request.
        objects, room = {}, _PICKLED
        for key, data in sorted(self.small.items(), key=lambda item: len(item[1])):
            room -= len(data)
            if room < 0:
                break
            objects[key] = data
        return (_remote_again, (self.native.state(), objects))

    def text(self, key: str) -> str:
        return self.native.text(key)

    def stat(self, key: str) -> Stat:
        if reason := self.denied.get(key):
            raise DeniedError(reason)
        look = _LOOK.get()
        if look is not None and (self, key) in look.absent:
            raise FileNotFoundError(2, "No such object")
        try:
            status = self.native.stat(key)
        except FileAccessError as error:
            if error.reason != "absent-or-denied":
                raise
            self.denied[key] = error
            raise DeniedError(error) from None
        if status is None:
            if look is not None:
                look.absent.add((self, key))
            raise FileNotFoundError(2, "No such object")
        size, version = status
        return Stat("folder", 0, "", 0) if size is None else Stat("file", size, version or "", size)

    def request_together(self, keys: Sequence[str]) -> None:
        """Looks for objects whose names cannot be listed, with one request each; the rest of the look knows the answers.

        The first is requested before the others, so that a server that fails gets one request.
        """
        look = _LOOK.get()
        assert look is not None
        for group in (keys[:1], keys[1:]):
            look.absent |= {(self, key) for key in self.absent_among(group, again=False)}

    def absent_among(self, keys: Sequence[str], *, again: bool = True) -> set[str]:
        """Those of some keys, whose names cannot be listed, that do not exist, requested concurrently. The others are known.

        ``again=False`` takes the first answer of a web server for true: its proxies may report an object as absent.
        """
        absent = set()
        for key, answer in zip(keys, self.native.stat_together(list(keys), again), strict=True):
            if answer is None:
                absent.add(key)
            elif isinstance(answer, FileAccessError):
                self.denied[key] = answer
        return absent

    @contextlib.contextmanager
    def without(self, keys: Iterable[str]) -> Iterator[None]:
        """In this context, which is within a look, these objects count as absent, and are not requested."""
        look = _LOOK.get()
        assert look is not None
        absent = {(self, key) for key in keys} - look.absent
        look.absent |= absent
        try:
            yield
        finally:
            look.absent -= absent

    def scan(self, key: str, sizes: bool) -> Iterator[Entry]:
        names: list[tuple[str, int | None]] = []
        try:
            if self.stat(key).kind == "file":
                raise NotADirectoryError(20, "Not a directory")
            if self.native.lists:
                names = self.native.scan(key, False)
        except (FileNotFoundError, FileAccessError) as error:
            if self.native.lists:
                raise
            raise self._unlisted(key) from error
        if not self.native.lists:
            raise self._unlisted(key)
        if not names:  # folders are prefixes of keys: an empty one does not exist
            raise FileNotFoundError(2, "No such object")
        for name, size in names:
            yield Entry(name, "folder") if size is None else Entry(name, "file", size)

    def _unlisted(self, key: str) -> UnsupportedError:
        where = self.text(key)
        if where.startswith("http"):
            why = "a web server cannot list the names in a folder. Open the dataset from its bucket, or copy it to a local folder"
        else:
            why = "the bucket refuses to list names. Use credentials that may list it, or copy the dataset to a local folder"
        return UnsupportedError(why, path=place_of(where))

    def read(self, key: str, start: int, length: int) -> bytes:
        small = self.small.get(key)
        if small is None:
            data = self.native.read(key, start, length)
            fits = start == 0 and len(data) <= _SMALL and sum(map(len, self.small.values())) < _SMALLS
            if fits and self.stat(key).size == len(data):
                self.small[key] = data
            return data
        return small[start : start + length]

    def fetch(self, keys: Sequence[str], limit: int | None = None) -> list[bytes | Literal[False] | None]:
        """Reads whole objects concurrently, and caches small ones like :meth:`read`.

        Returns None for missing objects, and False for objects longer than ``limit``, of which at most 4 MiB are received.

        Raises:
            FileAccessError: an object cannot be read. A refused object does not count as missing.
        """
        contents: dict[str, bytes | Literal[False] | None] = {key: self.small[key] for key in keys if key in self.small}
        lacking = [key for key in dict.fromkeys(keys) if key not in contents]
        for first in range(0, len(lacking), _AT_ONCE):
            group = lacking[first : first + _AT_ONCE]
            for key, data in zip(group, self.native.fetch(group, _GLANCE), strict=True):
                if data is False:
                    size = self.stat(key).size
                    contents[key] = False if limit is not None and size > limit else self.read(key, 0, size)
                    continue
                contents[key] = data
                if data is not None and sum(map(len, self.small.values())) < _SMALLS:
                    self.small[key] = data
        return [contents[key] for key in keys]

    def glance(self, key: str) -> bool:
        """Returns whether an object exists, and caches its content for later calls, in one request."""
        if key not in self.small:
            try:
                data = self.native.read(key, 0, _GLANCE)
            except MissingFileError:
                return False
            if len(data) < _GLANCE:
                self.small[key] = data
        return True

    def fill(self, key: str, parts: Iterable[tuple[int, memoryview]]) -> None:
        for start, into in parts:
            data = self.native.read(key, start, len(into))
            if len(data) < len(into):
                raise _ended(start, into, len(data))
            into[:] = data

    def arrow(self, key: str) -> pa.NativeFile:
        import pyarrow as pa

        size = self.stat(key).size
        if size <= _WHOLE:
            return pa.BufferReader(self.read(key, 0, size))
        return pa.PythonFile(_ObjectFile(self.native, key, size), mode="r")


def _remote_again(state: bytes, small: dict[str, bytes]) -> Remote:
    native = _native.RemoteStore.from_state(state)
    if why := native.cache_warning():
        warn(f"cache: {why}", code="disk-cache")
    return Remote(native, small)


_SMALL = 1 << 20
_GLANCE = 4 << 20
"""Bytes of the first request for an object of unknown size."""
_SMALLS = 16 << 20
_AT_ONCE = 64
"""Number of objects that are read concurrently."""
_PICKLED = 1 << 20
_WHOLE = 8 << 20
"""Larger objects are read in ranges by pyarrow."""


class _ObjectFile(io.RawIOBase):
    """An object as a Python file."""

    def __init__(self, native: _native.RemoteStore, key: str, size: int) -> None:
        self._native, self._key, self._size, self._at = native, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        count = max(self._size - self._at, 0) if size < 0 else size
        data = self._native.read(self._key, self._at, count)
        self._at += len(data)
        return data

    def readinto(self, into: Any) -> int:
        data = self.read(len(into))
        into[: len(data)] = data
        return len(data)


@dataclass(frozen=True, slots=True)
class Memory:
    """Files in a dict: ``{"web/train/0.bin": b"..."}``. Folders are prefixes of keys, as in object stores."""

    name: str
    files: Mapping[str, bytes] = field(default_factory=dict, hash=False)
    local: ClassVar[bool] = False

    def __reduce__(self) -> tuple[object, ...]:
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
        prefix = f"{key}/" if key else ""
        names = {name[len(prefix) :].partition("/")[0] for name in self.files if name.startswith(prefix)}
        for name in names:
            data = self.files.get(prefix + name)
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
