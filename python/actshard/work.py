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
import fnmatch
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actshard import _native
from actshard.errors import ActshardError, FileAccessError, FormatError, LockedError, from_os

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = ".actshard"
JOURNAL = "journal.jsonl"
PARTS = ".parts"
"""Folder of the parts of a dataset, until they are merged."""
EMPTY = ".empty.json"
"""What a part without examples is: a file that says so, in the part's folder."""
MERGING = "merging.json"
"""A merge's own file in the working folder."""
VERSION = 1
_TABLE = re.compile(r"examples-\d{6,12}\.arrow")
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
            while self._file is None:
                self._file = self._try()
            _held[self._key] = os.getpid()

    def _try(self) -> int | None:
        """The file, locked; None if it was removed meanwhile, by a writer that had finished."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            make_folder(self.path.parent)
            return None
        except OSError as error:
            raise from_os(error, self.path, "open") from error
        mine = False
        try:
            try:
                # A record lock: it belongs to this process alone, and no child that is forked later holds on to it.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken = False
            except OSError as error:
                taken = isinstance(error, BlockingIOError | PermissionError)
                if not taken and error.errno not in _NO_LOCKS:
                    raise
                # A file system without locks: what the file says has to do.
                taken = taken or self._is_alive(file)
            if taken:
                said = self._who(file)
                raise LockedError(
                    f"another writer is at work here{said}; wait for it, or stop it", path=self.path.parent.parent
                )
            if not self._is_there(file):
                return None
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(who).encode(), 0)
            mine = True
        except ActshardError:
            raise
        except OSError as error:
            raise from_os(error, self.path, "lock") from error
        finally:
            if not mine:
                with contextlib.suppress(OSError):
                    os.close(file)
        return file

    def _is_there(self, file: int) -> bool:
        """Whether the path still means this file."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        held = os.fstat(file)
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

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
            with contextlib.suppress(OSError):
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
        lines = [line + b"\n" for line in data.split(b"\n")]
        lines[-1] = lines[-1][:-1]
        for number, line in enumerate(filter(None, lines), 1):
            try:
                record = json.loads(line)
                whole = line.endswith(b"\n") and isinstance(record, dict)
            except (ValueError, RecursionError):
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
                if not isinstance(record.get("config"), dict):
                    raise FormatError(
                        "line 1: field 'config': expected what was asked for, found none",
                        path=self.path,
                        code="metadata",
                    )
                self.config = record["config"]
            elif record.get("closing") or record.get("finished"):
                self.closing = True
                self.finished = bool(record.get("finished"))
            else:
                self._check(number, record)
                self.commits.append(record)
            self._valid += len(line)

    def _check(self, number: int, record: dict[str, Any]) -> None:
        """Raises FormatError unless a line is a commit that can follow those before."""
        examples, table = record.get("examples"), record.get("table")
        for name, right, expected in (
            (
                "examples",
                type(examples) is int and self.examples <= examples < 1 << 62,
                f"a number from {self.examples}",
            ),
            ("state", isinstance(record.get("state"), dict), "an object"),
            ("table", table is None or (isinstance(table, str) and _TABLE.fullmatch(table)), "examples-NNNNNN.arrow"),
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
                    # Mapped, so that columns stay on the disk until they are looked at.
                    with path.open("rb") as file, pa.memory_map(_name_for_arrow(path, file.fileno())) as source:
                        table = pa.ipc.open_file(source).read_all()
                except (pa.ArrowException, OSError, ValueError) as error:
                    raise FormatError(f"expected what an earlier commit wrote: {error}", path=path) from error
                yield table

    def remove(self) -> None:
        """Removes the working folder, which is locked: the lock goes last, so that nobody takes it before that."""
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
        """The dataset's folder has another name now."""
        self.folder = root / FOLDER
        self.path = self.folder / JOURNAL
        self.lock.path = self.folder / self.lock.path.name

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
        with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    except OSError as error:
        raise from_os(error, path, "write") from error
    _native.sync_files([path])
    _native.sync_files([path.parent])


def _name_for_arrow(path: Path, file: int) -> str:
    """A name of an open file that pyarrow takes: it knows no path that is not UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return f"/dev/fd/{file}"
    return str(path)


def tidy(root: Path) -> None:
    """Removes what is left in a finished dataset of a writer that was killed after its last step."""
    journal = Journal(root)
    if not journal.folder.is_dir() or (journal.folder / MERGING).exists():
        return
    with contextlib.suppress(ActshardError):  # somebody is at work, or the folder cannot be written
        journal.lock.take()
        try:
            if journal.exists():
                journal.read()
            if journal.finished or not journal.exists():
                journal.remove()
        finally:
            journal.lock.release()


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
    try:
        data = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # lone surrogates, which only an escape can say
        data = json.dumps(value, indent=indent).encode()
    write_bytes(path, data)


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a small file under another name and renames it: it is whole or not there."""
    with whole_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BufferedWriter]:
    """A file to write under another name; it gets its own, on the disk too, when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if isinstance(error, ActshardError):
            raise
        raise from_os(error, path, "write") from error
    sync_folders([path.parent])


def remove_made(root: Path, patterns: Iterable[str]) -> None:
    """Removes entries of a folder whose names match a pattern, and what was begun under their working names."""
    wanted = list(patterns)
    with contextlib.suppress(OSError):
        for entry in list(root.iterdir()):
            name = entry.name.removeprefix(".").removesuffix(".part") if entry.name.endswith(".part") else entry.name
            if not any(fnmatch.fnmatchcase(n, p) for n in (name, entry.name) for p in wanted):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    entry.unlink()


def make_folder(path: Path) -> None:
    """Makes a folder and those above it; their names are on the disk when it returns."""
    made = []
    try:
        at = path
        while not at.is_dir():
            made.append(at)
            at = at.parent
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_os(error, path, "make") from error
    sync_folders(folder.parent for folder in made)


def sync_folders(folders: Iterable[Path]) -> None:
    """Brings the names in folders to the disk. A folder that may be written but not read cannot be synced."""
    for folder in dict.fromkeys(folders):
        try:
            _native.sync_files([folder])
        except FileAccessError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                raise


def rename(source: Path, target: Path) -> None:
    """Renames a file; a file that has its new name already was renamed before a crash."""
    try:
        source.replace(target)
    except FileNotFoundError as error:
        if not target.exists():
            raise from_os(error, source, "rename") from error
    except OSError as error:
        raise from_os(error, source, "rename") from error
