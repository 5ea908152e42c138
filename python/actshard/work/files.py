"""Files that are whole or not there, and folders whose entries are on the disk."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Any

import actshard._native as _native
from actshard.errors import ActshardError, FileAccessError, boundary, from_os


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
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
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


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, as far as the system allows."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def sync_tree(folder: Path) -> None:
    """Brings the names in all folders below one to the disk, and those in it; files have to be there already."""
    with boundary(folder, "write to the disk"):
        sync_folders(Path(path) for path, _, _ in os.walk(folder, topdown=False))
