"""Locations of files and folders: a local path, or a key in another storage.

Formats list, stat and read user data through a :class:`Location`, never through ``pathlib``. A new kind of storage only needs a new
:class:`~actshard.base.storage.Storage`.

All methods raise :class:`~actshard.ActshardError` only, with the location as its path.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import itertools
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import actshard._native as _native
from actshard.base._arguments import local_path, size
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ArgumentTypeError,
    FileAccessError,
    FormatError,
    MissingFileError,
    NotAFileError,
    TruncatedFileError,
    UnsupportedError,
    boundary,
    from_os,
    place_of,
    warn,
)
from actshard.base.storage import Entry, Kind, Local, Memory, Remote, Stat, Storage

if TYPE_CHECKING:
    import pyarrow as pa


MOST_ENTRIES = 10_000_000
"""Default maximum number of names that :meth:`Location.entries` reads."""


def network_io(path: Path | Location) -> str:
    """Resolves ``io="auto"``: ``"mmap"`` for local file systems, ``"pread"`` for network file systems and other storages."""
    if isinstance(path, Location):
        if not path.is_local:
            return "pread"
        path = path.local
    return "pread" if _native.is_network(path) else "mmap"


def has_options(options: Mapping[str, object] | None) -> bool:
    """Whether storage options are given. ArgumentTypeError if they are not a mapping: an array has no truth value."""
    return bool(_pairs(options))


def _pairs(options: Mapping[str, object] | None, prefix: str = "") -> list[tuple[str, str]]:
    """Options as strings; those of a nested mapping (``client_kwargs``) are named ``above.name``."""
    if options is None:
        return []
    if not isinstance(options, Mapping):
        raise ArgumentTypeError(f"storage_options: expected a mapping, found {type(options).__name__}")
    pairs: list[tuple[str, str]] = []
    for name, value in options.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"storage_options: expected names, found {type(name).__name__}")
        if value is None:  # as in fsspec: not given
            continue
        try:
            f"{name}{value if isinstance(value, str) else ''}".encode()
        except UnicodeEncodeError:  # the message omits the text, which may be a secret
            raise ArgumentTypeError(f"storage_options: {prefix}option {len(pairs) + 1}: expected UTF-8 text") from None
        if isinstance(value, Mapping):
            pairs += _pairs(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            pairs.append((prefix + name, "true" if value else "false"))
        elif isinstance(value, str | int | float):
            pairs.append((prefix + name, str(value)))
        else:  # the message omits the value, which may be a secret
            raise ArgumentTypeError(f"storage_options: {prefix}{name}: expected a str, a number or a bool")
    return pairs


CACHE_BYTES = 20 << 30
"""Default limit of a disk cache if only its folder is given."""


def is_url(value: object) -> bool:
    """Whether a value is a URL of a kind that can be opened."""
    try:
        return isinstance(value, str) and "://" in value and _native.is_remote(value)
    except UnicodeEncodeError:  # a lone surrogate, which the check of paths explains
        return False


def cache_folder() -> Path:
    """Folder of the cache on disk, if only its size is given: ``$ACTSHARD_CACHE``, or ``actshard`` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return local_path(os.environ.get("ACTSHARD_CACHE") or f"{home}/actshard", "cache")


_SIZE = re.compile(r"\s*\d[\d.]*\s*[A-Za-z]{0,3}\s*$")
"""A size, rather than the name of a folder such as ``2026cache``."""


def _cache_of(cache: str | os.PathLike[str] | int | bool | None) -> tuple[str, int] | None:
    """Folder and limit of a cache on disk. Without a folder: ``$ACTSHARD_CACHE``, or ``actshard`` in the user's cache folder."""
    if cache is None or cache is False:
        return None
    if isinstance(cache, int | np.integer) or (isinstance(cache, str) and _SIZE.match(cache)):
        return os.fspath(cache_folder()), size(int(cache) if isinstance(cache, np.integer) else cache, "cache")
    return os.fspath(local_path(cache, "cache")), CACHE_BYTES


_OR_URL = "Copy the data to a local folder, or pass s3://, gs://, az://, hf:// or https://."
_NAME = operator.attrgetter("name")
_LOCAL = Local()


@dataclass(frozen=True, slots=True, eq=True)
class Location:
    """A file or folder, which may not exist. Immutable, hashable, sortable by names, and cheap to pickle.

    A local location is an ``os.PathLike``: ``open``, ``pathlib.Path`` and the binding accept it.

    Attributes:
        storage: the file system or object store.
        key: the name in the storage: an absolute local path, otherwise names joined by ``/`` (``""`` is the root).
    """

    storage: Storage
    key: str

    @classmethod
    def of(cls, value: object, what: str = "path") -> Location:
        """Returns the location of a user's path, made absolute with ``~`` expanded; a Location is returned unchanged.

        Raises:
            ArgumentTypeError: not a path.
            ArgumentError: a URL other than ``file://``, or an invalid file name.
        """
        if isinstance(value, Location):
            return value
        return cls(_LOCAL, os.fspath(local_path(value, what)))

    @classmethod
    def of_any(
        cls,
        value: Any,
        storage_options: Mapping[str, object] | None = None,
        cache: str | os.PathLike[str] | int | bool | None = None,
    ) -> Location:
        """Returns the location of a user's path or URL; a Location is returned unchanged. A URL makes no request.

        Args:
            value: a str, an ``os.PathLike`` or a Location.
            storage_options: options of a remote store, with the names of the object_store crate or of fsspec.
            cache: size or folder of a remote store's disk cache; None or False: no cache.

        Raises:
            ArgumentTypeError: not a path.
            ArgumentError: an unknown kind of URL, an invalid file name, or an unknown option.
        """
        if is_url(value):
            storage = Remote(_native.RemoteStore(value, _pairs(storage_options), _cache_of(cache)))
            if why := storage.native.cache_warning():
                warn(f"cache: {why}", code="disk-cache")
            return cls(storage, storage.native.root)
        if has_options(storage_options):
            raise ArgumentError("storage_options: expected a URL to use them for, found a local path")
        return value if isinstance(value, Location) else cls(_LOCAL, os.fspath(local_path(value, remedy=_OR_URL)))

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Location:
        """Returns the location of an already checked path, without checks."""
        return path if isinstance(path, Location) else cls(_LOCAL, os.fspath(path))

    @classmethod
    def in_memory(cls, files: Mapping[str, bytes], name: str = "memory") -> Location:
        """Returns the root of files in memory."""
        return cls(Memory(name, MappingProxyType(dict(files))), "")

    def __str__(self) -> str:
        return self.storage.text(self.key)

    def __repr__(self) -> str:
        return f"Location({str(self)!r})"

    def __lt__(self, other: Location) -> bool:
        return str(self).split("/") < str(other).split("/")  # as pathlib: contents of "folder" before "folder-2"

    def __fspath__(self) -> str:
        return self.key if self.storage.local else os.fspath(self.local)

    def __hash__(self) -> int:
        return hash(self.key)

    def __truediv__(self, name: str) -> Location:
        if "/" in name or "\0" in name or name in ("", ".", "..") or self.key in ("", "/"):
            return self.joinpath(name)
        return Location(self.storage, f"{self.key}/{name}")  # fast path: datasets may have many thousands of files

    @property
    def is_local(self) -> bool:
        """Whether this is a path in this machine's file system."""
        return self.storage.local

    @property
    def is_remote(self) -> bool:
        """Whether this is behind a URL."""
        return isinstance(self.storage, Remote)

    @property
    def lists(self) -> bool:
        """Whether folders can be listed: not on a web server."""
        return not isinstance(self.storage, Remote) or self.storage.native.lists

    @property
    def local(self) -> Path:
        """The local path.

        Raises:
            UnsupportedError: the location is not local.
        """
        if not self.is_local:
            raise UnsupportedError("expected a local path, found a remote one", path=self)
        return Path(self.key)

    @property
    def place(self) -> Path:
        """The path for users and errors: the local path, or the location itself if it is not local."""
        return place_of(self)

    @property
    def name(self) -> str:
        """The last name of the key; ``""`` for a root."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The parent folder; a root is its own parent."""
        parent_key = self.key.rpartition("/")[0]
        return Location(self.storage, parent_key or ("/" if self.is_local else ""))

    def joinpath(self, *names: str) -> Location:
        """Returns a location below this one. A name may contain several names joined by ``/``.

        Raises:
            ArgumentError: a name is absolute, empty, or contains ``..``. Names may come from files and must not leave the folder.
        """
        key = self.key.rstrip("/")
        for name in names:
            parts = name.split("/")
            if not name or parts[0] == "" or ".." in parts or "\0" in name:
                raise ArgumentError(f"expected a name below the folder, found {name!r:.80}", path=self)
            components = [part for part in parts if part not in ("", ".")]
            key = "/".join([key, *components] if key or self.is_local else components)
        return Location(self.storage, key or self.key)

    def relative_to(self, ancestor: Location) -> str:
        """Returns the names from a parent folder to here, joined by ``/``; ``"."`` for the folder itself.

        Raises:
            ArgumentError: the location is not below that folder.
        """
        if self == ancestor:
            return "."
        start = ancestor.key.rstrip("/") + "/" if ancestor.key else ""
        if self.storage != ancestor.storage or not self.key.startswith(start):
            raise ArgumentError(f"expected a location below {ancestor}", path=self)
        return self.key[len(start) :]

    def stat(self, doing: str = "access") -> Stat:
        """Returns kind, size and version. Follows links.

        Args:
            doing: a verb for messages.

        Raises:
            MissingFileError: the location does not exist.
            FileAccessError: permissions do not allow the check, or a server refuses the name.
        """
        stat = self.found(doing)
        if stat is not None:
            return stat
        if isinstance(self.storage, Remote) and (denied := self.storage.denied.get(self.key)):
            raise denied.with_traceback(None)
        raise MissingFileError("expected a file, found nothing", path=self)

    def found(self, doing: str = "access") -> Stat | None:
        """As :meth:`stat`, but returns None if the location does not exist."""
        try:
            return self.storage.stat(self.key)
        except ActshardError:  # of a remote store; some are an OSError too
            raise
        except (FileNotFoundError, NotADirectoryError):  # NotADirectoryError: a parent is a file
            return None
        except ValueError:  # an invalid file name: a null byte or a lone surrogate
            return None
        except OSError as error:
            raise from_os(error, self, doing) from error

    def look_ahead(self) -> None:
        """Prepares to check for a file that probably exists and is then read: a remote store needs a single request for both."""
        if isinstance(self.storage, Remote) and not self.storage.glance(self.key):
            self.parent.look_into()

    def look_into(self) -> None:
        """Lists a folder of a remote store, if possible, so that later checks for its files need no request."""
        if self.is_remote and self.lists:
            with contextlib.suppress(UnsupportedError):  # the bucket refuses to list names
                self.count(1)

    def check_still_there(self) -> None:
        """Raises MissingFileError or FormatError if a file that was read before no longer exists, or was replaced.

        A remote store caches what it has found; only this method makes a new request.
        """
        if isinstance(self.storage, Remote):
            self.storage.native.look(self.key)
        else:
            self.stat()

    def kind(self) -> Kind | None:
        """Returns ``"file"``, ``"folder"``, ``"other"``, or None if the location does not exist.

        Raises:
            FileAccessError: permissions do not allow the check.
        """
        stat = self.found()
        return None if stat is None else stat.kind

    def exists(self) -> bool:
        """Whether the location exists. Raises FileAccessError if permissions do not allow the check."""
        return self.kind() is not None

    def is_named(self) -> bool:
        """Whether the name exists, even as a broken link."""
        return os.path.lexists(self.key) if self.is_local else self.exists()

    def entries(self, pattern: str = "*", *, sizes: bool = False, limit: int = MOST_ENTRIES) -> list[Entry]:
        """Returns the entries of a folder whose names match a shell pattern, sorted by name.

        Args:
            pattern: e.g. ``"acts*.bin"``; case-sensitive.
            sizes: also return the size of each file, which takes one system call per file on a local file system.
            limit: maximum number of names to read, matching or not.

        Raises:
            MissingFileError, NotAFileError, FileAccessError: the folder does not exist, is not a folder, or is not readable.
            FormatError: the folder has more than ``limit`` names.
            UnsupportedError: the store cannot list names.
        """
        entries = []
        with boundary(self, "list"):
            try:
                for count, entry in enumerate(self.storage.scan(self.key, sizes)):
                    if count >= limit:
                        raise FormatError(f"expected at most {limit} files and folders, found more", path=self)
                    if pattern == "*" or fnmatch.fnmatchcase(entry.name, pattern):
                        entries.append(entry)
            except NotADirectoryError as error:
                raise NotAFileError("expected a folder, found a file", path=self) from error
        return sorted(entries, key=_NAME)

    def list_below(self) -> None:
        """Lists all files below in as few requests as a remote store allows, so that later calls need none.

        Does nothing for other storages. Failures are left to later calls.
        """
        if isinstance(self.storage, Remote) and self.lists:
            with contextlib.suppress(ActshardError), boundary(self, "list"):
                self.storage.native.scan(self.key, True)

    def count(self, most: int) -> int:
        """Returns the number of names in a folder, at most ``most``; 0 if there is no folder.

        Raises:
            FileAccessError: the folder cannot be listed.
        """
        with boundary(self, "list"):
            try:
                return sum(1 for _ in itertools.islice(self.storage.scan(self.key, False), most))
            except (FileNotFoundError, NotADirectoryError):
                return 0

    def first(self, most: int) -> list[Entry]:
        """Returns at most ``most`` entries of a folder, unsorted, without listing the whole folder.

        Raises:
            MissingFileError, NotAFileError, FileAccessError: the folder does not exist, is not a folder, or is not readable.
        """
        with boundary(self, "list"):
            return list(itertools.islice(self.storage.scan(self.key, False), most))

    def files(self, *, sizes: bool = False) -> Iterator[tuple[Location, Entry]]:
        """Yields all files below, sorted by name. Skips linked folders and folders without read permission."""
        try:
            entries = self.entries(sizes=sizes)
        except FileAccessError:
            return
        for entry in entries:
            child = self / entry.name
            if entry.kind == "file":
                yield child, entry
            elif entry.kind == "folder" and not entry.is_link:
                yield from child.files(sizes=sizes)

    def read(self, start: int = 0, length: int | None = None, *, limit: int | None = None) -> bytes:
        """Reads a file, or a range of bytes.

        Args:
            start: offset of the first byte.
            length: number of bytes; None: all that follow.
            limit: maximum number of bytes.

        Raises:
            MissingFileError, NotAFileError, FileAccessError: the file cannot be read.
            TruncatedFileError: the file ends before the end of the range.
            FormatError: the range has more than ``limit`` bytes.
        """
        # Stat before opening: opening a named pipe would block until it has a writer.
        size = self.regular("read").size
        count = max(size - start, 0) if length is None else length
        if limit is not None and count > limit:
            raise FormatError(f"expected at most {limit} bytes, found {count}", path=self)
        if start < 0 or count < 0:
            raise ArgumentError(f"expected a range of bytes, found {length} bytes from {start}", path=self)
        if start + count > size:
            raise TruncatedFileError(f"expected {start + count} bytes, found {size}", path=self)
        with boundary(self, "read"):
            data = self.storage.read(self.key, start, count)
        if len(data) < count:
            raise TruncatedFileError(f"expected {start + count} bytes, found {start + len(data)}", path=self)
        return data

    def read_at_most(self, limit: int) -> bytes | Literal[False] | None:
        """Reads a whole remote object in one request. None if it does not exist, False if it is larger than ``limit``."""
        assert isinstance(self.storage, Remote)
        return self.storage.native.fetch([self.key], limit)[0]

    def read_utf8(self) -> str:
        """Reads a UTF-8 text file. Converts line breaks to Unix line breaks.

        Raises:
            MissingFileError, NotAFileError, FileAccessError: the file cannot be read.
            FormatError: the file is not UTF-8.
        """
        try:
            return self.read().decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise FormatError("expected UTF-8 text", path=self, offset=error.start) from error

    def fill(self, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Fills each buffer with bytes from its offset. Opens the file once.

        Raises:
            MissingFileError, NotAFileError, FileAccessError: the file cannot be read.
            TruncatedFileError: the file ends before the end of a range.
        """
        self.regular("read")
        with boundary(self, "read"):
            try:
                self.storage.fill(self.key, parts)
            except TruncatedFileError as error:
                error.path = self.place
                raise

    def open(self, doing: str = "open", *, pipes: bool = False) -> io.BufferedReader | io.BytesIO:
        """Opens the file as a Python binary file, for reading line by line.

        Args:
            doing: a verb for messages.
            pipes: also open pipes, which blocks until they have a writer.
        """
        stat = self.stat(doing)
        size = stat.size if pipes and stat.kind == "other" else self.regular(doing).size
        if self.is_local:
            with boundary(self, doing):
                return self.local.open("rb")
        return io.BytesIO(self.read(0, size))

    def arrow(self) -> pa.NativeFile:
        """Opens the file for pyarrow: ``pq.ParquetFile(location.arrow())``. Close it, or use it in ``with``."""
        self.regular("open")
        with boundary(self, "open"):
            return self.storage.arrow(self.key)

    def regular(self, doing: str = "access") -> Stat:
        """As :meth:`stat`, but raises unless it is a regular file. Call it before opening: opening a named pipe may block.

        Raises:
            MissingFileError, FileAccessError: as :meth:`stat`.
            NotAFileError: a folder, a device or a pipe.
        """
        stat = self.stat(doing)
        if stat.kind != "file":
            raise NotAFileError("expected a regular file, found a folder or a special file", path=self)
        return stat


def found_together(places: Sequence[Location]) -> list[Stat | None]:
    """As :meth:`Location.found` of each. Names in one storage that cannot be listed are requested concurrently."""
    storage = places[0].storage if places else None
    absent: set[str] = set()
    if isinstance(storage, Remote) and not storage.native.lists:
        with boundary(places[0].parent, "access"):
            absent = storage.absent_among([place.key for place in places])
    return [None if place.key in absent else place.found() for place in places]


def read_together(places: Sequence[Location], limit: int | None = None) -> Iterator[bytes | None]:
    """Yields the contents of files of one storage, None for missing files. Remote files are requested concurrently.

    Raises:
        FileAccessError: a file cannot be read.
        FormatError: a file is longer than ``limit``. The limit protects memory: sizes of remote files are not known in advance.
    """
    for first in range(0, len(places), _TOGETHER):
        group = places[first : first + _TOGETHER]
        storage = group[0].storage
        if isinstance(storage, Remote):
            for location, data in zip(group, storage.fetch([location.key for location in group], limit), strict=True):
                if data is False:
                    raise FormatError(f"expected at most {limit} bytes, found {location.stat().size}", path=location)
                yield data
        else:
            yield from (_read_or_none(location, limit) for location in group)


_TOGETHER = 64


def _read_or_none(location: Location, limit: int | None) -> bytes | None:
    try:
        return location.read(limit=limit)
    except MissingFileError:
        return None


_AHEAD = 4 << 20
"""Maximum size of a file that is read ahead."""


def read_ahead(places: Iterable[Location]) -> None:
    """Reads small files of a remote store concurrently, for later calls, which report any errors. Ignores other storages."""
    remote = [location for location in places if location.is_remote]
    with contextlib.suppress(ActshardError):
        for _ in read_together(remote, _AHEAD):
            pass
