"""One writer per folder, until it releases the lock or its process ends.

Ours, not filelock's: filelock takes ``flock`` locks, which children that are forked later hold as well, so that a worker that
outlives its parent keeps a dataset locked; and it names no owner. A record lock (``lockf``) belongs to one process and works on
NFS. The file names process and host for the error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path

from actshard.errors import ActshardError, LockedError, MissingFileError, from_os
from actshard.work.files import make_folder

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_TRIES = 100
_held: dict[str, int] = {}
"""Folders locked by this process, and the process that locked each: a forked child inherits the table, not the lock."""
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


def locked(folder: Path) -> Lock:
    """Takes the lock of a working folder, which is made if it is not there.

    Raises:
        LockedError: another process, or another writer of this one, has it.
    """
    for _ in range(_TRIES):
        make_folder(folder)
        lock = Lock(folder)
        with contextlib.suppress(MissingFileError):  # the folder was removed meanwhile, by a process that finished
            lock.take()
            return lock
    raise LockedError("other processes begin and finish here all the time; try again", path=folder.parent)
