"""Locks a folder for one writer until it releases the lock or its process ends.

We do not use filelock: its ``flock`` locks are inherited by forked children, so a worker that outlives its parent would keep a
dataset locked; and it records no owner. A record lock (``lockf``) belongs to one process and works on NFS. The lock file contains
process and host for the error message.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
import sys
import threading
import time
from pathlib import Path

from actshard.base.errors import ActshardError, LockedError, MissingFileError, from_os
from actshard.base.work.files import make_folder
from actshard.base.work.names import LOCK

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
