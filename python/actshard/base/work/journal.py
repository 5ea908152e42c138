"""The journal of a dataset that is being written.

A line is written after its data are synced to the disk, so that all data that the journal counts exist even if the writer is
killed. An incomplete last line is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import actshard._native as _native
from actshard.base._columns import map_arrow
from actshard.base._json import Fields
from actshard.base.errors import ActshardError, FormatError, LockedError, MissingFileError, from_os, from_reader
from actshard.base.request import Digests, Request, digests_in, joined_digests
from actshard.base.work.files import FOLDER, JOURNAL, LOCK, is_below, make_folder

if TYPE_CHECKING:
    import pyarrow as pa


# Locks a folder for one writer until it releases the lock or its process ends.
#
# We do not use filelock: its ``flock`` locks are inherited by forked children, so a worker that outlives its parent would keep
# a dataset locked; and it records no owner. A record lock (``lockf``) belongs to one process and works on NFS. The lock file
# contains process and host for the error message.


_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_TRIES = 100
_held: dict[str, int] = {}
"""Maps locked folders to the process that locked them: a forked child inherits this dict, but not the locks."""
_files: dict[tuple[int, int], int] = {}
"""The same by device and inode of the lock's file: a folder may have been renamed since, and have several paths."""
_held_lock = threading.Lock()


def _host() -> str:
    import socket  # imports many modules, and only writers need it

    return socket.gethostname()


class Lock:
    """A folder's lock. The operating system releases it when the process ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._key = os.path.realpath(folder)
        self._file: int | None = None

    def take(self) -> None:
        """Takes the lock. Raises LockedError with the owner's process and host if another writer has it."""
        with _held_lock:
            if _held.get(self._key) == os.getpid() or self._is_held():
                raise LockedError(
                    "another writer of this process has locked it; close it, or call its abort(), which keeps what was committed",
                    path=self.path.parent.parent,
                )
            while self._file is None:
                self._file = self._try()
            _held[self._key] = _files[_inode(os.fstat(self._file))] = os.getpid()

    def _try(self) -> int | None:
        """Returns the locked file; None if a writer that finished removed the file in between."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            make_folder(self.path.parent)
            return None
        except OSError as error:
            raise from_os(error, self.path, "open") from error
        has_lock = False
        try:
            try:
                # A record lock: forked children do not inherit it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_taken = False
            except OSError as error:
                is_taken = isinstance(error, BlockingIOError | PermissionError)
                if not is_taken and error.errno not in _NO_LOCKS:
                    raise
                # Without lock support in the file system, the file's process and host decide.
                is_taken = is_taken or self._is_alive(file)
            if is_taken:
                owner = self._who(file)
                raise LockedError(
                    f"another writer is writing here{owner}. Wait for it, or stop it.", path=self.path.parent.parent
                )
            if not self._is_there(file):
                return None
            who = {"pid": os.getpid(), "host": _host(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(who).encode(), 0)
            has_lock = True
        except ActshardError:
            raise
        except OSError as error:
            raise from_os(error, self.path, "lock") from error
        finally:
            if not has_lock:
                with contextlib.suppress(OSError):
                    os.close(file)
        return file

    def _is_held(self) -> bool:
        """Whether this process holds it by another path. Asked before the file is opened: to close it would release the lock."""
        try:
            return _files.get(_inode(self.path.stat())) == os.getpid()
        except OSError:
            return False

    def _is_there(self, file: int) -> bool:
        """Whether the path still refers to this open file."""
        try:
            path_stat = self.path.stat()
        except FileNotFoundError:
            return False
        file_stat = os.fstat(file)
        return (path_stat.st_dev, path_stat.st_ino) == (file_stat.st_dev, file_stat.st_ino)

    @staticmethod
    def _is_alive(file: int) -> bool:
        """Whether the process that the file names is alive. Processes on other hosts cannot be checked and count as alive."""
        try:
            who = json.loads(os.pread(file, 4096, 0))
            if who["host"] != _host():
                return True
            os.kill(int(who["pid"]), 0)
        except (ValueError, KeyError, TypeError, ProcessLookupError):
            return False
        except PermissionError:
            return True
        return int(who["pid"]) != os.getpid()

    @staticmethod
    def _who(file: int) -> str:
        owner = _owner(file)
        return f": {owner}" if owner else ""

    def release(self) -> None:
        """Releases the lock. May be called again."""
        if self._file is not None:
            with _held_lock:
                owned = _held.get(self._key) == os.getpid()
                if owned:
                    del _held[self._key]
                    with contextlib.suppress(OSError):
                        _files.pop(_inode(os.fstat(self._file)), None)
            if owned:  # not a forked child's copy
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, 0)
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _owner(file: int) -> str:
    """The process that a lock's file names; ``""`` if it names none."""
    try:
        who = json.loads(os.pread(file, 4096, 0))
        return f"process {int(who['pid'])} on {str(who['host'])[:100]}, since {str(who['since'])[:40]}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


_FLOCK = "hhqqi"
"""Linux's ``struct flock``: type, whence, start, length, process."""


def state_of(folder: Path) -> str:
    """Whether a writer holds the lock of a working folder, for messages: ``"is running: process 12 on node3, since ..."``.

    Where this cannot be known: ``"is running, or was interrupted"``. Does not take the lock.
    """
    unknown = "is running, or was interrupted"
    with _held_lock:
        try:
            lock_stat = (folder / LOCK).stat()
            if _files.get(_inode(lock_stat)) == os.getpid():
                return "is a writer of this process"  # its lock would be lost if its file were opened and closed again
            if not stat.S_ISREG(lock_stat.st_mode):  # opening a pipe may block
                return unknown
            file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return "was interrupted"
        except OSError:
            return unknown
        try:
            owner = _owner(file)
            if sys.platform != "linux" or (owner and f" on {_host()[:100]}, " not in owner):
                return f"{unknown}{f' ({owner})' if owner else ''}"  # another machine's locks may be invisible here
            query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))[0]
        except OSError:
            return unknown
        finally:
            os.close(file)
    return "was interrupted" if kind == fcntl.F_UNLCK else f"is running{f': {owner}' if owner else ''}"


def locked(folder: Path) -> Lock:
    """Takes the lock of a working folder. Creates the folder if needed.

    Raises:
        LockedError: another process, or another writer of this process, holds the lock.
    """
    for _ in range(_TRIES):
        make_folder(folder)
        lock = Lock(folder)
        with contextlib.suppress(MissingFileError):  # a process that finished removed the folder in between
            lock.take()
            return lock
    raise LockedError(
        f"the working folder was removed {_TRIES} times while it was being locked. Try again.", path=folder.parent
    )


VERSION = 1
_TABLE = re.compile(r"examples-\d{6,12}\.arrow")


@dataclass(frozen=True)
class Commit:
    """Examples whose files are on the disk.

    Attributes:
        examples: number of the dataset's examples up to the last of them.
        table: their lengths and columns.
        state: the target's state, for resuming.
        overflows: number of finite values that they store as infinity.
        digests: digests of their rows, numbered in the dataset.
        files: the files that contain them, relative to the dataset's folder.
    """

    examples: int
    table: pa.Table
    state: dict[str, object]
    overflows: int
    digests: Digests
    files: list[str]


class Journal:
    """The journal of a dataset that is being written."""

    def __init__(self, root: Path) -> None:
        self.folder = root / FOLDER
        self.path = self.folder / JOURNAL
        self.lock = Lock(self.folder)
        self.config: dict[str, object] = {}
        self.request: Request | None = None
        """The request; None until the journal is begun or read."""
        self.commits: list[dict[str, Any]] = []
        self.files: dict[str, int] = {}
        """Sizes of the files that the commits made or continued, after the last of them, by their names relative to the folder."""
        self.others: set[str] = set()
        """Files of other programs whose names the finished dataset needs."""
        self.closing = False
        """Whether the writer has begun to finish the dataset: nothing can be appended."""
        self.finished = False
        self._valid = 0
        """Bytes of the journal up to the end of its last complete line."""

    def exists(self) -> bool:
        """Whether the folder contains a journal."""
        return self.path.is_file()

    def begin_with(self, config: dict[str, object], request: Request) -> None:
        """Starts a journal. The caller holds the lock."""
        self._valid = 0
        self.config, self.request = config, request
        self._append({"actshard": VERSION, "config": config, "record": request.as_dict()})

    def read(self) -> None:
        """Reads the journal. Ignores an incomplete last line."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise from_os(error, self.path, "read") from error
        self.request, self.files, self.others = None, {}, set()
        self.config, self.commits, self.closing, self.finished, self._valid = {}, [], False, False, 0
        lines = [line + b"\n" for line in data.split(b"\n")]
        lines[-1] = lines[-1][:-1]
        for number, line in enumerate(filter(None, lines), 1):
            try:
                record = json.loads(line)
                is_complete = line.endswith(b"\n") and isinstance(record, dict)
            except (ValueError, RecursionError):
                is_complete = False
            if not is_complete:
                if self._valid + len(line) < len(data):
                    raise FormatError(
                        f"line {number}: expected a record, found {line[:40]!r}", path=self.path, offset=self._valid
                    )
                break
            if number == 1:
                if record.get("actshard") != VERSION:
                    raise FormatError("line 1: expected the journal of an actshard writer", path=self.path)
                for name, what in (("config", "the writer's settings"), ("record", "the request of the writer")):
                    if not isinstance(record.get(name), dict):
                        raise FormatError(
                            f"line 1: field '{name}': expected {what}, found none", path=self.path, code="metadata"
                        )
                self.config = record["config"]
                self.request = Request.from_dict(record["record"], self.path)
            elif record.get("closing") or record.get("finished"):
                self.closing = True
                self.finished = bool(record.get("finished"))
                other_names = record.get("others", [])
                if not isinstance(other_names, list) or not all(isinstance(name, str) for name in other_names):
                    raise FormatError(
                        f"line {number}: field 'others': expected names of files, found {other_names!r:.60}",
                        path=self.path,
                        code="metadata",
                        offset=self._valid,
                    )
                self.others.update(other_names)
            else:
                self._check(number, record)
                if record["examples"] == 0 and record.get("files"):
                    raise FormatError(
                        f"line {number}: field 'files': expected none, because no examples are committed",
                        path=self.path,
                    )
                self.files |= self._sizes(number, record.pop("files", None))
                self.commits.append(record)
            self._valid += len(line)

    def _sizes(self, number: int, files: object) -> dict[str, int]:
        """Raises FormatError unless a line has the sizes of files below the dataset's folder."""
        if not isinstance(files, dict) or not all(
            is_below(name) and type(size) is int and size >= 0 for name, size in files.items()
        ):
            raise FormatError(
                f"line {number}: field 'files': expected sizes of files below the dataset's folder, found {files!r:.60}",
                path=self.path,
                code="metadata",
                offset=self._valid,
            )
        return files

    def _check(self, number: int, record: dict[str, object]) -> None:
        """Raises FormatError unless a line is a valid commit with at least as many examples as the one before."""
        digests_in(Fields(record, self.path, f"line {number}"))
        examples, table, overflows = record.get("examples"), record.get("table"), record.get("overflows")
        for name, right, expected in (
            (
                "examples",
                type(examples) is int and self.examples <= examples < 1 << 62,
                f"a number from {self.examples}",
            ),
            ("state", isinstance(record.get("state"), dict), "an object"),
            ("overflows", type(overflows) is int and 0 <= overflows < 1 << 62, "a number"),
            ("table", isinstance(table, str) and _TABLE.fullmatch(table), "examples-NNNNNN.arrow"),
        ):
            if not right:
                raise FormatError(
                    f"line {number}: field '{name}': expected {expected}, found {record.get(name)!r:.60}",
                    path=self.path,
                    code="metadata",
                    offset=self._valid,
                )

    @property
    def examples(self) -> int:
        """Number of committed examples."""
        return int(self.commits[-1]["examples"]) if self.commits else 0

    @property
    def overflows(self) -> int:
        """Number of finite values that a conversion stored as infinity."""
        return sum(record["overflows"] for record in self.commits)

    @property
    def digests(self) -> Digests | None:
        """Digests of the rows of all commits; None without commits."""
        return joined_digests(digests_in(Fields(record, self.path)) for record in self.commits)

    def commit(self, commit: Commit, sizes: Mapping[str, int]) -> None:
        """Records a commit. ``sizes``: bytes of its files, by name."""
        record: dict[str, Any] = {"examples": commit.examples, "state": commit.state, "overflows": commit.overflows}
        record["digests"] = list(map(str, commit.digests))
        record["table"] = f"examples-{len(self.commits):06}.arrow"
        write_table(self.folder / record["table"], commit.table)
        self._append({**record, "files": dict(sizes)})
        self.files |= sizes
        self.commits.append(record)

    def close(self) -> None:
        """Records that finishing has begun: the last shards are completed and nothing can be appended."""
        if not self.closing:
            self._append({"closing": True})
            self.closing = True

    def keep_other(self, name: str) -> None:
        """Records that another program's file has a name that the dataset needs, so that it is not overwritten later either."""
        self._append({"closing": True, "others": [name]})
        self.others.add(name)

    def finish(self) -> None:
        """Records that the dataset is complete; the working folder is no longer needed."""
        if not self.finished:
            self._append({"finished": True})
            self.closing = self.finished = True

    def tables(self) -> Iterator[pa.Table]:
        """Yields the tables of all commits in order, memory-mapped."""
        for record in self.commits:
            yield read_table(self.folder / record["table"])

    def remove(self) -> None:
        """Removes the working folder. The caller holds the lock, which is removed last so that no other writer takes it earlier."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path != self.lock.path:
                    with contextlib.suppress(OSError):
                        path.unlink()
        with contextlib.suppress(OSError):
            self.lock.path.unlink()
            self.folder.rmdir()
        self.lock.release()

    def moved(self, root: Path) -> None:
        """Updates paths after the dataset's folder was renamed."""
        self.folder = root / FOLDER
        self.path = self.folder / JOURNAL
        self.lock.path = self.folder / self.lock.path.name

    def _append(self, record: dict[str, object]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        is_new = not self.path.exists()
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(file, self._valid)  # removes an incomplete last line
                os.pwrite(file, line, self._valid)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise from_os(error, self.path, "write") from error
        if is_new:
            _native.sync_files([self.folder, self.folder.parent])
        self._valid += len(line)


def write_table(path: Path, table: pa.Table) -> None:
    """Writes the lengths and columns of some examples, and syncs them to the disk."""
    import pyarrow as pa

    try:
        with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        raise from_os(error, path, "write") from error
    _native.sync_files([path])
    _native.sync_files([path.parent])


def read_table(path: Path) -> pa.Table:
    """Returns the table of :func:`write_table`, memory-mapped, so that columns are loaded only when used."""
    import pyarrow as pa

    try:
        with map_arrow(path) as source:
            return pa.ipc.open_file(source).read_all()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise from_reader(error, path, "read", f"expected lengths and columns of examples: {error}") from error
