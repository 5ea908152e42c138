"""The working folder of a dataset while it is written: who writes, what is safe on the disk, and how to go on.

.. code-block:: text

    <dataset>/.actshard/lock                     who writes: process, host, since when
    <dataset>/.actshard/journal.jsonl            what was asked for; then a line per commit; then "finished"
    <dataset>/.actshard/examples-000003.arrow    what commit 3 added about examples: columns, tokens per layer

A line of the journal is written after everything it speaks of is on the disk, so that whatever the journal counts is there,
whenever its writer dies. A last line that was torn is not counted. The folder goes when the dataset is finished.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actshard import _native
from actshard.errors import ActshardError, FormatError, LockedError, from_os

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = ".actshard"
JOURNAL = "journal.jsonl"
PARTS = ".parts"
"""Folder of the parts of a dataset, until they are merged."""
VERSION = 1
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: dict[str, int] = {}
"""Folders locked by this process, and by which process in truth: a forked child inherits the table, not the lock."""
_held_lock = threading.Lock()


class Lock:
    """One writer per folder, as long as its process lives: the system lets go of the lock when the process dies."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._key = os.path.realpath(folder)
        self._file: int | None = None

    def take(self) -> None:
        """Takes it, or raises LockedError with the process and host that has it."""
        with _held_lock:
            if _held.get(self._key) == os.getpid():
                raise LockedError("another writer of this process is at work here", path=self.path.parent.parent)
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise from_os(error, self.path, "open") from error
            try:
                # A record lock: it belongs to this process alone, and no child that is forked later holds on to it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken = False
            except OSError as error:
                taken = isinstance(error, BlockingIOError | PermissionError)
                if not taken and error.errno not in _NO_LOCKS:
                    os.close(file)
                    raise from_os(error, self.path, "lock") from error
                # A file system without locks: what the file says has to do.
                taken = taken or self._is_alive(file)
            if taken:
                said = self._who(file)
                os.close(file)
                raise LockedError(
                    f"another writer is at work here{said}; wait for it, or stop it", path=self.path.parent.parent
                )
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(who).encode(), 0)
            self._file = file
            _held[self._key] = os.getpid()

    @staticmethod
    def _is_alive(file: int) -> bool:
        """Whether the process that the file names lives: on this host it can be asked, on others it is taken to."""
        try:
            who = json.loads(os.pread(file, 4096, 0))
            if who["host"] != socket.gethostname():
                return True
            os.kill(int(who["pid"]), 0)
        except (ValueError, KeyError, TypeError, ProcessLookupError):
            return False
        except PermissionError:
            return True
        return int(who["pid"]) != os.getpid()

    @staticmethod
    def _who(file: int) -> str:
        try:
            who = json.loads(os.pread(file, 4096, 0))
            return f": process {int(who['pid'])} on {str(who['host'])[:100]}, since {str(who['since'])[:40]}"
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def release(self) -> None:
        """Lets go; twice does no harm."""
        if self._file is not None:
            with _held_lock:
                mine = _held.get(self._key) == os.getpid()
                if mine:
                    del _held[self._key]
            if mine:  # not a forked child's copy
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None


class Journal:
    """The journal of a dataset being written."""

    def __init__(self, root: Path) -> None:
        self.folder = root / FOLDER
        self.path = self.folder / JOURNAL
        self.lock = Lock(self.folder)
        self.config: dict[str, Any] = {}
        self.commits: list[dict[str, Any]] = []
        self.closing = False
        """Whether the dataset was being finished: nothing can be appended any more."""
        self.finished = False
        self._valid = 0
        """Bytes of the journal up to the last line that is whole."""

    def exists(self) -> bool:
        """Whether somebody has begun."""
        return self.path.is_file()

    def begin_with(self, config: dict[str, Any]) -> None:
        """Begins a journal. The lock has been taken."""
        self._valid = 0
        self.config = config
        self._append({"actshard": VERSION, "config": config})

    def read(self) -> None:
        """Reads it. A last line that is torn is as if it were not there."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise from_os(error, self.path, "read") from error
        self.config, self.commits, self.closing, self.finished, self._valid = {}, [], False, False, 0
        for number, line in enumerate(data.splitlines(keepends=True), 1):
            try:
                record = json.loads(line)
                whole = line.endswith(b"\n") and isinstance(record, dict)
            except ValueError:
                whole = False
            if not whole:
                if self._valid + len(line) < len(data):
                    raise FormatError(
                        f"line {number}: expected a record, found {line[:40]!r}", path=self.path, offset=self._valid
                    )
                break
            if number == 1:
                if record.get("actshard") != VERSION:
                    raise FormatError("line 1: expected the journal of an actshard writer", path=self.path)
                self.config = record["config"]
            elif record.get("closing") or record.get("finished"):
                self.closing = True
                self.finished = bool(record.get("finished"))
            else:
                self.commits.append(record)
            self._valid += len(line)

    @property
    def examples(self) -> int:
        """Examples that are safe on the disk."""
        return int(self.commits[-1]["examples"]) if self.commits else 0

    def commit(self, examples: int, table: pa.Table | None, state: dict[str, Any]) -> None:
        """Counts examples as safe, with what is known about those added since the last commit."""
        record: dict[str, Any] = {"examples": examples, "state": state}
        if table is not None:
            name = f"examples-{len(self.commits):06}.arrow"
            _write_table(self.folder / name, table)
            record["table"] = name
        self._append(record)
        self.commits.append(record)

    def close(self) -> None:
        """The dataset is being finished: its last shards are completed, and nothing can be added to them."""
        if not self.closing:
            self._append({"closing": True})
            self.closing = True

    def finish(self) -> None:
        """The dataset is whole; what is in this folder is not needed any more."""
        if not self.finished:
            self._append({"finished": True})
            self.closing = self.finished = True

    def tables(self) -> Iterator[pa.Table]:
        """What commits added, in order."""
        import pyarrow as pa

        for record in self.commits:
            if "table" in record:
                path = self.folder / record["table"]
                try:
                    with pa.memory_map(str(path)) as source:
                        yield pa.ipc.open_file(source).read_all()
                except (pa.ArrowException, OSError) as error:
                    raise FormatError(f"expected what an earlier commit wrote: {error}", path=path) from error

    def remove(self) -> None:
        """Removes the working folder."""
        self.lock.release()
        # A reader may look in at any moment: without its journal the folder means nothing any more.
        shutil.rmtree(self.folder, ignore_errors=True)

    def moved(self, root: Path) -> None:
        """The dataset's folder has another name now."""
        self.folder = root / FOLDER
        self.path = self.folder / JOURNAL

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        new = not self.path.exists()
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.ftruncate(file, self._valid)  # a torn line goes
                os.pwrite(file, line, self._valid)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise from_os(error, self.path, "write") from error
        if new:
            _native.sync_files([self.folder, self.folder.parent])
        self._valid += len(line)


def _write_table(path: Path, table: pa.Table) -> None:
    import pyarrow as pa

    try:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        raise from_os(error, path, "write") from error
    _native.sync_files([path])


def unfinished(root: Path) -> Journal | None:
    """The journal of a dataset that is not finished, in this folder; None if there is none."""
    journal = Journal(root)
    with contextlib.suppress(OSError):
        if journal.exists():
            with contextlib.suppress(ActshardError):
                journal.read()
            return None if journal.finished else journal
    return None


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Writes a JSON file under another name and renames it: it is whole or not there."""
    write_bytes(path, json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a small file under another name and renames it: it is whole or not there."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise from_os(error, path, "write") from error


def make_folder(path: Path) -> None:
    """Makes a folder and those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_os(error, path, "make") from error


def rename(source: Path, target: Path) -> None:
    """Renames a file; a file that has its new name already was renamed before a crash."""
    try:
        source.replace(target)
    except FileNotFoundError as error:
        if not target.exists():
            raise from_os(error, source, "rename") from error
    except OSError as error:
        raise from_os(error, source, "rename") from error
