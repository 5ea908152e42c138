"""Atomic file writes, and syncing of folder entries to the disk."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from io import BufferedWriter
from pathlib import Path

import actshard._native as _native
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    ExistsError,
    FileAccessError,
    MissingFileError,
    boundary,
    from_os,
)
from actshard.base.location import Location
from actshard.base.request import RECORD, Request, checksum, files_mark

# Names of working folders and of the files in them.


FOLDER = ".actshard"
"""The working folder of a dataset."""
JOURNAL, LOCK = "journal.jsonl", "lock"
PARTS = ".parts"
"""Folder of a dataset's unmerged parts."""
PART = re.compile(r"part-(\d{5})-of-(\d{5})")
"""Name of a part's folder: its number and the number of parts."""
EMPTY = ".empty.json"
"""The only file of a part without examples."""
MERGING = "merging.json"
"""File in the working folder that describes an unfinished merge."""
PLAN_FOLDER, DUMPS_PLAN_FOLDER = "plan-", "dumps-plan-"
"""Prefixes of working folders of plans, in the working folder of a dataset, or of a folder of datasets."""
PLAN = "plan.json"
"""The file that marks a folder as the working folder of a plan. It is removed first after the plan was committed."""
PUSHING = ".actshard-pushing.json"
"""Marker object in the folder of a remote dataset that is being written, or whose writer was killed."""
BUILDING = ".actshard-build"
"""The working folder of an unfinished token cache."""
STAGED = ".actshard-staged.json"
"""File in a staged copy that records its source."""
COLUMNS = ".actshard-columns.arrow"
"""File in a finished dataset with columns that were added later (:mod:`actshard.reading.extending`)."""
COLUMNS_LOCK = ".actshard-columns.lock"
"""Working folder while columns are added."""


def staging_folder(target: Path) -> Path:
    """The working folder of a staged copy, next to it."""
    return target.with_name(f".{target.name}.actshard-stage")


_recorded: ContextVar[tuple[list[Path], Callable[[Path], bool]] | None] = ContextVar("_recorded", default=None)
_COMPARED_AT_ONCE = 1 << 20
"""Bytes of each file in memory."""


def write_json(path: Path, value: object, indent: int | None = 2) -> None:
    """Writes a JSON file atomically: under a temporary name, then renamed."""
    write_bytes(path, as_json(value, indent))


def write_json_at_once(path: Path, value: object, indent: int | None = 2) -> None:
    """As :func:`write_json`, for a file that several processes may write at the same time: temporary names are unique."""
    write_bytes_at_once(path, as_json(value, indent))


def write_bytes_at_once(path: Path, data: bytes) -> None:
    """As :func:`write_bytes`, for a file that several processes may write at the same time."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_bytes(temporary, data)
    except ActshardError as error:
        error.path = path
        raise
    try:
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise from_os(error, path, "write") from error
    sync_folders([path.parent])


def as_json(value: object, indent: int | None = 2) -> bytes:
    """Returns the bytes that :func:`write_json` writes."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON can only escape
        return json.dumps(value, indent=indent).encode()


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a small file atomically: under a temporary name, then renamed."""
    with whole_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BufferedWriter]:
    """Opens a temporary file for writing. When the block ends without an error, syncs it and renames it to ``path``."""
    temporary = path.with_name(f".{path.name}.part")
    refuse_other(path)
    record_files([path])
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, ActshardError):
            raise
        if isinstance(error, FileNotFoundError) and not path.parent.exists():
            raise MissingFileError("expected a folder, found nothing. Create it first.", path=path.parent) from error
        raise from_os(error, path, "write") from error
    sync_folders([path.parent])


def keep_request(folder: Path, request: Request, files: Sequence[str], *, is_beside: bool = False) -> None:
    """Writes the record of a request to the folder of the dataset that it made, or next to it.

    Args:
        folder: the folder.
        request: the request.
        files: :mod:`fnmatch` patterns of the files whose checksums are recorded (:attr:`Format.checked_files`).
        is_beside: whether the record lies next to the folder.
    """
    request = replace(
        request, checksums={name: checksum(folder / name) for name in names_like(files, names_below(folder))}
    )
    if is_beside:
        write_json(
            folder.with_name(f".{folder.name}{RECORD}"), {**request.as_dict(), "files": files_mark(Location.at(folder))}
        )
    else:
        write_json(folder / RECORD, request.as_dict())


def names_below(folder: Path) -> Iterator[str]:
    """Names of all files below a folder, relative to it."""
    for path, _, names in os.walk(folder):
        prefix = path[len(os.fspath(folder)) + 1 :]
        yield from (f"{prefix}/{name}" for name in names) if prefix else names


def names_like(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names in a dataset's folder that match one of the :mod:`fnmatch` patterns, sorted; without those of unfinished work."""
    matches = re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)").match
    return sorted(name for name in names if matches(name) and not name.startswith((f"{FOLDER}/", f"{PARTS}/")))


def is_below(name: str) -> bool:
    """Whether a name from a file is the relative path of something below a folder."""
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


@contextlib.contextmanager
def recorded_files(is_other: Callable[[Path], bool] = lambda path: False) -> Iterator[list[Path]]:
    """Yields a list that gets the paths of the files that get their names in the block, by functions of this module.

    ``is_other``: whether a path that exists is another program's, which :func:`refuse_other` refuses.
    """
    paths: list[Path] = []
    token = _recorded.set((paths, is_other))
    try:
        yield paths
    finally:
        _recorded.reset(token)


def record_files(paths: Iterable[Path]) -> None:
    """Adds files to the list of :func:`recorded_files`."""
    recorded = _recorded.get()
    if recorded is not None:
        recorded[0].extend(paths)


def refuse_other(path: Path) -> None:
    """Raises ExistsError if another program wrote a file that is about to be written in a block of :func:`recorded_files`."""
    recorded = _recorded.get()
    if recorded is not None and path.exists() and path not in recorded[0] and recorded[1](path):
        raise ExistsError(
            "was written by another program, and the dataset needs the name. Move the file away; the same call with "
            "resume=True then completes the dataset",
            path=path,
        )


def files_below(path: Path) -> Iterator[Path]:
    """The path, or all files below it."""
    if not path.is_dir():
        yield path
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names)


def names_of(path: Path) -> list[Path]:
    """The names of a file that a writer makes: its own, the one of the complete file, and the temporary one."""
    name = path.name.removeprefix(".").removesuffix(".part") if path.name.endswith(".part") else path.name
    return [path, path.with_name(name), path.with_name(f".{name}.part")]


def remove_files(root: Path, paths: Iterable[Path]) -> None:
    """Removes files below a folder, also under their temporary names, and then the folders above them that are empty."""
    base = Path(os.path.realpath(root))
    folders: set[Path] = set()
    for path in paths:
        if base not in (parent := Path(os.path.realpath(path.parent)), *parent.parents):
            continue  # a link leads out of the folder
        for name in names_of(path):
            with contextlib.suppress(OSError):
                name.unlink()
        folders |= {parent for parent in path.parents if root in parent.parents}
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def remove_empty_folders(root: Path) -> None:
    """Removes the folders below a folder that contain no files."""
    for folder, _, _ in os.walk(root, topdown=False):
        if folder != os.fspath(root):
            with contextlib.suppress(OSError):  # not empty
                Path(folder).rmdir()


def existing_above(path: Path) -> Path:
    """The path, or its nearest existing parent, which is on the file system where the path will be created."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def make_folder(path: Path) -> None:
    """Creates a folder and its parents, and syncs their names to the disk."""
    missing = []
    try:
        ancestor = path
        while not ancestor.is_dir():
            missing.append(ancestor)
            ancestor = ancestor.parent
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_os(error, path, "make") from error
    sync_folders(folder.parent for folder in missing)


def sync_folders(folders: Iterable[Path]) -> None:
    """Syncs the entries of folders to the disk. Folders that are writable but not readable are skipped."""
    for folder in dict.fromkeys(folders):
        try:
            _native.sync_files([folder])
        except FileAccessError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                raise


def rename(source: Path, target: Path) -> None:
    """Renames a file. If only the target exists, the file was renamed before a crash and the call does nothing.

    Raises ExistsError if both exist, and the target is another program's; see :func:`recorded_files`.
    """
    if _recorded.get() is not None and source != target and source.exists():
        refuse_other(target)
    record_files([target])
    try:
        source.replace(target)
    except FileNotFoundError as error:
        if not target.exists():
            raise from_os(error, source, "rename") from error
    except OSError as error:
        raise from_os(error, source, "rename") from error


def first_difference(a: Path, b: Path, size: int) -> int | None:
    """The first of ``size`` bytes in which two files differ; None if they do not. A missing or shorter file differs."""
    try:
        with a.open("rb") as ours, b.open("rb") as theirs:
            for first in range(0, size, _COMPARED_AT_ONCE):
                n = min(_COMPARED_AT_ONCE, size - first)
                x, y = ours.read(n), theirs.read(n)
                if x != y or len(x) < n:
                    pairs = enumerate(zip(x, y, strict=False))
                    return first + next((i for i, (p, q) in pairs if p != q), min(len(x), len(y)))
    except FileNotFoundError:
        return 0
    return None


def refuse_within(target: Path, source: Path) -> None:
    """Raises ArgumentError if a target lies inside of the folder of a source: each run would read what the last one wrote."""
    if source.is_dir() and Path(os.path.realpath(source)) in Path(os.path.realpath(target)).parents:
        raise ArgumentError(
            f"lies inside of {source}, which would then contain it. Choose a folder outside", path=target
        )


def remove(path: Path) -> None:
    """Removes a file, a link or a folder. Ignores errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sync_tree(folder: Path) -> None:
    """Syncs the entries of a folder and all folders below it to the disk. File contents must already be synced."""
    with boundary(folder, "write to the disk"):
        sync_folders(Path(path) for path, _, _ in os.walk(folder, topdown=False))
