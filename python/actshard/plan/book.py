"""The working folder of a plan: which tasks are done, running or failed.

.. code-block:: text

    WORK/plan.json                              the plan, written by the first process
    WORK/tasks/00017/                           a finished task: its files, and result.json
    WORK/attempts/00017.HOST.PID.XXXXXXXX/      an attempt that is running or was killed, with its progress.json
    WORK/failed/00017.json                      the last error of a task
    WORK/commit.json                            the commit has begun: the tasks' files are being renamed

An attempt becomes the task's result by renaming its folder. The rename fails if another attempt finished first: both contain the
same bytes, and the second is removed. Tasks use no locks and no messages, so any number of machines may share the folder on a
network file system. Only the commit locks it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import actshard._native as _native
from actshard.base._json import MAX_INT, read_json
from actshard.base.errors import (
    ActshardError,
    ExistsError,
    FormatError,
    MissingFileError,
    as_plain,
    from_os,
    from_plain,
)
from actshard.base.work import (
    DUMPS_PLAN_FOLDER,
    FOLDER,
    PLAN,
    PLAN_FOLDER,
    make_folder,
    remove,
    sync_folders,
    write_json,
    write_json_at_once,
)

TASKS, ATTEMPTS, FAILED = "tasks", "attempts", "failed"
RESULT, COMMIT, PROGRESS = "result.json", "commit.json", "progress.json"
_DONE = re.compile(r"(\d{5,})")
_ATTEMPT = re.compile(r"(\d{5,})\.(.*)\.(\d+)\.[0-9a-f]{8}")
ALIVE_SECONDS = 60.0
"""An attempt that reported no progress for this long counts as stopped."""
BEAT_SECONDS = 5.0
"""Seconds between two progress reports, which :meth:`Book.attempts` reads."""
_SYNCED_AT_ONCE = 4096
_MACHINE = "4026531836"
"""Inode of the initial PID namespace (PROC_PID_INIT_INO, linux/proc_ns.h): the process is not in a container."""
_LOOKING_THREADS, _LOOKED_AT_ONCE = 16, 64
"""Threads that list folders (a file server handles many requests at once), and number of folders that a thread takes at a time."""
_OWN = {TASKS, ATTEMPTS, FAILED, PLAN, COMMIT, "committing", "logs", "new"}
"""Names in a working folder: those above, the commit's lock, Slurm's logs, and a staged copy that is being assembled."""
_TEMPORARY = re.compile(rf"\.+({re.escape(PLAN)}|{re.escape(COMMIT)})\..*|\.nfs.*")
_ID = re.compile(rb'"id": "([0-9a-f]{32})"')
_HEAD = 256
"""The plan's id is in the first bytes of ``plan.json``."""


@dataclass(frozen=True)
class Attempt:
    """An unfinished run of a task.

    Attributes:
        task: the task's number.
        folder: its folder.
        host, pid: machine and process that started it.
        age: seconds since its last progress report, by the clock of this machine.
        done, total: its progress, in units of the verb; zeros before the first report.
    """

    task: int
    folder: Path
    host: str
    pid: int
    age: float
    done: int
    total: int

    @property
    def running(self) -> bool:
        """Whether it reported progress within the last minute, and its process lives, if it is of this machine."""
        return self.age < ALIVE_SECONDS and (self.host != host() or _is_alive(self.pid))


def work_folder(root: Path, identity: str, *, dumps: bool = False) -> Path:
    """The working folder of a plan that writes a dataset to ``root``, or to a folder below it if ``dumps``."""
    return root / FOLDER / f"{DUMPS_PLAN_FOLDER if dumps else PLAN_FOLDER}{identity[:8]}"


def remove_work_folders(root: Path) -> None:
    """Removes the folder of working folders in a dataset's folder, if it is empty."""
    with contextlib.suppress(OSError):
        (root / FOLDER).rmdir()


def host() -> str:
    """The name of this machine, without characters that are special in file names."""
    import socket  # slow to import

    name = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "host"
    # Containers may share a host name, but each has its own process ids. The name must differ for each of them.
    try:
        space = re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        return name
    return name if space == _MACHINE else f"{name[:52]}-{space}"


def contents(folder: Path) -> list[object]:
    """Number and bytes of the files below a folder, and a digest of their names and sizes. :data:`RESULT` is not counted."""
    sizes: list[tuple[str, int]] = []
    folders = [(str(folder), "")]
    while folders:
        path, prefix = folders.pop()
        with os.scandir(path) as entries:
            for entry in entries:
                name = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, f"{name}/"))
                elif name != RESULT and not entry.name.startswith(
                    ".nfs"
                ):  # NFS keeps removed files that are still open
                    sizes.append((name, entry.stat(follow_symlinks=False).st_size))
    listing = "".join(f"{name}\0{size}\n" for name, size in sorted(sizes))
    digest = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return [len(sizes), sum(size for _, size in sizes), digest]


class Book:
    """The working folder of a plan."""

    def __init__(self, work: Path, identity: str) -> None:
        self.work = work
        self.identity = identity
        self.tasks = work / TASKS
        self.running = work / ATTEMPTS
        """Attempts have a separate folder, because each new attempt lists it: finished tasks would make the listing long."""

    # -- beginning -------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether a task or a driver has started.

        Raises:
            ExistsError: the folder belongs to another plan.
        """
        path = self.work / PLAN
        try:
            with path.open("rb") as file:
                match = _ID.search(file.read(_HEAD))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise from_os(error, path, "read") from error
        if match is not None and match[1].decode() != self.identity:
            raise ExistsError(
                f"is the working folder of another plan, {match[1][:8].decode()}, not {self.identity[:8]}; finish that one, remove "
                "the folder, or pass another work=",
                path=self.work,
            )
        return True

    def begin(self, plan: dict[str, object], is_over: Callable[[], bool]) -> bool:
        """Creates the folder. Returns False without a folder if ``is_over()``. Any number of processes may call it at once.

        Other processes may run and commit the plan at the same time: a folder that a commit removed must not be created again.

        Raises:
            ExistsError: the folder contains files that do not belong to a plan, which a commit might remove.
        """
        if self.exists():
            return True
        if foreign_names := sorted(name for name in _names(self.work) if not _is_own(name)):
            raise ExistsError(
                f"expected a new or empty working folder, found one that contains {foreign_names[0]!r:.80}; pass another work=",
                path=self.work,
            )
        make_folder(self.tasks)
        make_folder(self.running)
        make_folder(self.work / FAILED)
        if self.exists():
            return True
        if is_over():  # checked after that: a commit ends before it removes the folder
            self.remove()
            self._prune()
            return False
        write_json_at_once(self.work / PLAN, plan)
        return True

    # -- a task ----------------------------------------------------------------------------------------------------

    def folder(self, task: int) -> Path:
        """The folder of a finished task."""
        return self.tasks / f"{task:05}"

    def result(self, task: int) -> dict[str, Any] | None:
        """The record of a finished task; None if it is not finished."""
        path = f"{self.tasks}/{task:05}/{RESULT}"
        try:
            # A status of 10,000 tasks reads all of them, so each is one read, parsed without the checks of user files.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.read(file, os.fstat(file).st_size + 1)
            finally:
                os.close(file)
            record = json.loads(data)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os(error, path, "read") from error
        except (ValueError, RecursionError) as error:
            raise FormatError(f"expected the result of task {task}: {error}", path=path) from error
        if not isinstance(record, dict) or not isinstance(record.get("value"), dict) or record.get("task") != task:
            raise FormatError(f"expected the result of task {task}", path=self.folder(task) / RESULT)
        for name in ("value.bytes", "value.units", "seconds"):
            number: Any = record.get(name) if name == "seconds" else record["value"].get(name[6:], 0)
            if type(number) not in ((int, float) if name == "seconds" else (int,)) or not 0 <= number < MAX_INT:
                raise FormatError(
                    f"field '{name}': expected a number of at least 0, found {number!r:.60}; remove the folder of task {task}, "
                    "and run it again",
                    path=self.folder(task) / RESULT,
                )
        return record

    def check_files(self, records: Sequence[Mapping[str, object]]) -> None:
        """Raises FormatError if files of a finished task were removed, truncated or added since it finished."""

        def check(batch: Sequence[Mapping[str, Any]]) -> None:
            for record in batch:
                folder, recorded = self.folder(record["task"]), record.get("files")
                try:
                    current = contents(folder)
                except OSError as error:
                    raise from_os(error, folder, "list") from error
                if recorded == current:
                    continue
                count, size = recorded[:2] if isinstance(recorded, list) and len(recorded) == 3 else ("its", "its")
                raise FormatError(
                    f"task {record['task']}: expected {count} files of {size} bytes, as when the task finished, found {current[0]} "
                    f"of {current[1]} bytes, or other names. Remove this folder, and run the task again.",
                    path=folder,
                )

        with ThreadPoolExecutor(_LOOKING_THREADS) as pool:
            steps = range(0, len(records), _LOOKED_AT_ONCE)
            list(pool.map(check, (records[a : a + _LOOKED_AT_ONCE] for a in steps)))

    @contextlib.contextmanager
    def attempt(self, task: int) -> Iterator[Path]:
        """Creates a folder for an attempt at a task. It is removed if the block raises."""
        folder = self.begin_attempt(task)
        try:
            yield folder
        except BaseException:
            remove(folder)
            raise

    def begin_attempt(self, task: int) -> Path:
        """Like :meth:`attempt`, but the caller removes the folder if the attempt fails."""
        self.remove_dead(task)
        folder = self.running / f"{task:05}.{host()}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            folder.mkdir()  # not its parents: a committed plan's folder stays removed
        except OSError as error:
            raise from_os(error, folder, "make") from error
        return folder

    def remove_dead(self, task: int) -> None:
        """Removes the attempts at a task that killed processes of this machine left."""
        for attempt in self._attempts(lambda number: number == task):
            if attempt.host == host() and not _is_alive(attempt.pid):
                remove(attempt.folder)

    def publish(self, task: int, folder: Path, record: dict[str, object]) -> bool:
        """Renames an attempt to the task's result. Removes it and returns False if another was first or the plan was committed.

        The attempt's files must be synced to the disk; this function syncs the entries of its folders.
        """
        with contextlib.suppress(OSError):
            (folder / PROGRESS).unlink()
        write_json(folder / RESULT, {"task": task, **record, "files": contents(folder)}, None)
        for path, _, _ in os.walk(folder, topdown=False):
            sync_folders([Path(path)])
        if not self.exists():  # another process committed and removed the folder; this one may have created it again
            remove(folder)
            self._prune()
            return False
        try:
            folder.rename(self.folder(task))
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                remove(folder)
                return False
            raise from_os(error, folder, "rename") from error
        sync_folders([self.tasks, self.running])
        with contextlib.suppress(OSError):
            (self.work / FAILED / f"{task:05}.json").unlink()
        return True

    def _prune(self) -> None:
        for folder in (self.running, self.tasks, self.work, self.work.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def failed(self, task: int, error: ActshardError) -> None:
        """Records a task's error."""
        with contextlib.suppress(ActshardError):  # the caller raises the task's own error
            if self.exists():
                write_json_at_once(
                    self.work / FAILED / f"{task:05}.json", {"task": task, "host": host(), **as_plain(error)}
                )

    def tell(self, folder: Path, done: int, total: int) -> None:
        """Records an attempt's progress."""
        try:
            (folder / PROGRESS).write_text(f'{{"done": {int(done)}, "total": {int(total)}}}')
        except OSError:
            return  # only the display uses it

    # -- all tasks -------------------------------------------------------------------------------------------------

    def done(self) -> set[int]:
        """Numbers of the finished tasks. Costs one listing of a folder."""
        return {int(name) for name in _names(self.tasks) if _DONE.fullmatch(name)}

    def errors(self) -> dict[int, ActshardError]:
        """The last error of each failed task."""
        errors: dict[int, ActshardError] = {}
        for name in sorted(_names(self.work / FAILED)):
            if re.fullmatch(r"\d{5,}\.json", name) is None:
                continue
            try:
                record = read_json(self.work / FAILED / name)
                errors[int(record["task"])] = from_plain(record)
            except MissingFileError:  # the task has succeeded since
                continue
            except (LookupError, TypeError, ValueError) as error:
                raise FormatError(f"expected an error of a task: {error!r}", path=self.work / FAILED / name) from error
        return errors

    def attempts(self) -> list[Attempt]:
        """Unfinished attempts, ordered by task."""
        return self._attempts(lambda task: True)

    def _attempts(self, is_selected: Callable[[int], bool]) -> list[Attempt]:
        attempts = []
        now = time.time()
        for name in sorted(_names(self.running)):
            match = _ATTEMPT.fullmatch(name)
            if match is None or not is_selected(int(match[1])):
                continue
            folder = self.running / name
            done = total = 0
            try:
                modified = folder.stat().st_mtime
                with contextlib.suppress(FileNotFoundError, ActshardError):
                    modified = (folder / PROGRESS).stat().st_mtime
                    progress = read_json(folder / PROGRESS)
                    done, total = int(progress["done"]), int(progress["total"])
            except (OSError, LookupError, TypeError, ValueError):
                continue
            attempts.append(
                Attempt(int(match[1]), folder, match[2], int(match[3]), max(now - modified, 0.0), done, total)
            )
        return attempts

    def remove(self) -> None:
        """Removes the folder; ``plan.json`` first, so that attempts that are still running see that the plan is committed.

        Unknown files are kept: a plan that was read from a file may name any folder.
        """
        with contextlib.suppress(OSError):
            (self.work / PLAN).unlink()
        with contextlib.suppress(ActshardError):
            _native.remove_folders(
                [f"{folder}/{name}" for folder in (self.tasks, self.running) for name in _names(folder)]
            )
        names: list[str] = []
        with contextlib.suppress(ActshardError):
            names = _names(self.work)
        for name in names:
            if _is_own(name):
                path = self.work / name
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):  # rmtree does not remove files and links
                    path.unlink()
        with contextlib.suppress(OSError):
            self.work.rmdir()


def _is_own(name: str) -> bool:
    return name in _OWN or _TEMPORARY.fullmatch(name) is not None


def sync_below(folder: Path) -> None:
    """Syncs all files below a folder to the disk."""
    files = [Path(path, name) for path, _, names in os.walk(folder) for name in names]
    for first in range(0, len(files), _SYNCED_AT_ONCE):
        _native.sync_files(list(files[first : first + _SYNCED_AT_ONCE]))


def sync_folders_below(folder: Path) -> None:
    """Syncs the entries of a folder and of all folders below it to the disk. Many folders take one call for the file system."""
    _native.sync_files([Path(path) for path, _, _ in os.walk(folder)])


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os(error, folder, "list") from error


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
