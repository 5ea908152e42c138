"""The staged folder and its working folder: locking, checking whether a copy is complete, and replacing one by another."""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import os
import posixpath
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import actshard._native as _native
from actshard.base import _arguments
from actshard.base.errors import (
    ActshardError,
    ArgumentError,
    DiskFullError,
    ExistsError,
    FormatError,
    LockedError,
    MissingFileError,
    NotAFileError,
    boundary,
)
from actshard.base.layers import Layer, listing
from actshard.base.location import Location
from actshard.base.request import RECORD
from actshard.base.storage import Remote
from actshard.base.work import COLUMNS, STAGED, Lock, make_folder, remove, sync_folders, sync_tree, write_json
from actshard.reading.verifying import verify

if TYPE_CHECKING:
    from os import PathLike


# The marker of a staged copy: its source, and the recorded files of the source and of the copy.


_VERSION = 1

Listed = dict[str, tuple[int, str]]
"""Maps names below a folder, joined by ``/``, to size and version (ETag)."""


@dataclass(frozen=True)
class Staged:
    """Result of :func:`stage`.

    Attributes:
        path: the local dataset, for :func:`actshard.open`.
        source: URL or path of the source, without secrets.
        revision: the commit of a dataset of the hub; else None.
        layers: the staged layers; None: all.
        files: number of files of the copy.
        bytes: total size of these files.
        fetched: bytes that this call read from the source's files; 0 if the copy was complete.
        losses: properties of the source that a copy of some layers lacks.
    """

    path: Path
    source: str
    revision: str | None
    layers: tuple[Layer, ...] | None
    files: int
    bytes: int
    fetched: int
    losses: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"path": str(self.path)}


@dataclass(frozen=True)
class Marker:
    """The description of a staged copy."""

    source: str
    revision: str | None
    layers: list[Layer] | None
    below: str
    """The dataset's path relative to the source."""
    inside: str
    """The dataset's path relative to the staged folder; empty: the folder itself."""
    listed: Listed
    files: dict[str, int]
    """Sizes of the copy's files."""
    losses: list[str]
    times: dict[str, int] = field(default_factory=dict)
    """Modification times of the copy's files, in nanoseconds."""
    origin: str | None = None
    """A digest of the server, if URLs of different servers can be equal."""

    def result(self, target: Path, fetched: int = 0) -> Staged:
        """Returns the public result."""
        layers = None if self.layers is None else tuple(self.layers)
        size = sum(self.files.values())
        path = target / self.inside if self.inside else target
        return Staged(path, self.source, self.revision, layers, len(self.files), size, fetched, tuple(self.losses))

    def is_whole(self, target: Path) -> bool:
        """Whether all files of the copy exist with their sizes."""
        base = os.path.join(target, self.inside)  # noqa: PTH118 -- many files: Path would cost time
        return all(size_of(f"{base}/{name}") == size for name, size in self.files.items())

    def is_as_staged(self, target: Path, name: str) -> bool:
        """Whether a file was not modified since it was staged."""
        return state_of(f"{target}/{self.inside}/{name}") == (self.files.get(name), self.times.get(name))

    def changed(self, target: Path) -> list[str]:
        """Files of the copy that were modified since they were staged."""
        base = target / self.inside
        return [n for n in self.files if not self.is_as_staged(target, n) and os.path.lexists(base / n)]


def read_marker(path: Path) -> Marker | None:
    """Reads a marker or plan; None if there is none, or if it is damaged."""
    try:
        fields = json.loads(path.read_bytes())
        if fields.pop("actshard") != _VERSION:
            return None
        fields["listed"] = {name: (int(size), str(tag)) for name, (size, tag) in fields["listed"].items()}
        fields["files"] = {str(name): int(size) for name, size in fields["files"].items()}
        fields["losses"] = [str(loss) for loss in fields["losses"]]
        fields["times"] = {str(name): int(time) for name, time in fields.get("times", {}).items()}
        if not all(isinstance(fields[name], str) for name in ("source", "below", "inside")):
            return None
        return Marker(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_marker(path: Path, marker: Marker) -> None:
    """Writes a marker for :func:`read_marker`."""
    write_json(
        path, {"actshard": _VERSION, **{n: getattr(marker, n) for n in marker.__dataclass_fields__}}, indent=None
    )


def size_of(path: str) -> int:
    """Size of a file in bytes; -1 if there is no file."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 -- called for each of many files: Path would cost time
    except OSError:
        return -1


def state_of(path: str) -> tuple[int | None, int | None]:
    """Size in bytes and modification time of a file; (None, None) if there is no file."""
    try:
        status = os.stat(path)  # noqa: PTH116 -- called for each staged file: Path would cost time
    except OSError:
        return None, None
    return status.st_size, status.st_mtime_ns


# The files of a source, its revision, and its server.


_DEEPEST = 32


def list_files(source: Location) -> Listed:
    """All files below a location. Remote stores are listed once, in as few requests as they allow."""
    source.list_below()
    with boundary(source, "list"):
        if source.kind() == "file":
            raise NotAFileError("expected the folder of a dataset, found a file", path=source)
        files: Listed = {}
        if source.exists():
            _walk(source, "", files, 0)
    if not files:
        raise MissingFileError("expected a dataset, found nothing", path=source)
    return files


def _walk(folder: Location, prefix: str, files: Listed, depth: int) -> None:
    if depth > _DEEPEST:
        raise FormatError(f"expected at most {_DEEPEST} levels of folders", path=folder)
    for entry in folder.entries():
        # Others with such names are working files of writers, and markers of copies.
        if entry.name.startswith(".actshard") and entry.name not in (RECORD, COLUMNS):
            continue
        child, name = folder / entry.name, f"{prefix}{entry.name}"
        if entry.kind == "folder":
            _walk(child, f"{name}/", files, depth + 1)
        elif entry.kind == "file":
            state = child.stat()
            files[name] = (state.size, state.version)


def within(listing: Listed, subpath: str) -> Listed:
    """The part of a listing below a folder."""
    if subpath == ".":
        return listing
    return {name[len(subpath) + 1 :]: entry for name, entry in listing.items() if name.startswith(f"{subpath}/")}


def revision_of(source: Location) -> str | None:
    """The commit of a dataset of the hub; None for other sources."""
    return source.storage.native.revision if isinstance(source.storage, Remote) else None


def received(source: Location) -> int:
    """Bytes received from a remote store so far."""
    return source.storage.native.counts()[1] if isinstance(source.storage, Remote) else 0


def origin_of(source: Location) -> str | None:
    """A digest of endpoint and account. None if unknown, and for the hub, where the commit identifies the files."""
    if not isinstance(source.storage, Remote) or str(source).startswith("hf://"):
        return None
    try:
        return source.storage.native.origin()
    except ActshardError:  # options that cannot be used: the first request explains it
        return None


def target_of(folder: object) -> Path:
    """Checks the user's ``folder`` and returns its path. Environment variables are expanded."""
    if isinstance(folder, str):
        folder = os.path.expandvars(folder)
        match = re.search(r"\$(?:\w+|\{[^}]*\})", folder)
        if match:
            raise ArgumentError(f"folder: expected an environment variable, found none named {match.group()}")
    path = _arguments.local_path(folder, "folder")
    if not path.name:
        raise ArgumentError("folder: expected a folder below /, found /")
    return Path(os.path.realpath(path.parent)) / path.name if not path.is_symlink() else path.resolve()


@contextlib.contextmanager
def turn(work: Path) -> Iterator[bool]:
    """Holds the lock of a working folder; yields whether it had to wait. Removes the folder, unless it holds a part of a copy."""
    lock, waited, pause = Lock(work), False, 0.02
    while True:
        try:
            make_folder(work)
            lock.take()
            break
        except LockedError:
            waited = True
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        except MissingFileError:  # a process that finished removed the folder in between
            continue
    try:
        yield waited
    finally:
        _release(lock, work)


def _release(lock: Lock, work: Path) -> None:
    with contextlib.suppress(OSError):
        if not (work / "new").exists():
            remove(work / "plan.json")
            remove(work / "parts")
            if [entry.name for entry in work.iterdir()] == [lock.path.name]:
                lock.path.unlink()
    lock.release()
    with contextlib.suppress(OSError):
        work.rmdir()  # not if another process locks it again


def leave(work: Path) -> None:
    """Removes a working folder, unless it contains a part of a copy, or another process has locked it."""
    lock = Lock(work)
    with contextlib.suppress(ActshardError):
        if work.is_dir():
            lock.take()
            _release(lock, work)


def recover(target: Path, new_copy: Path, old_copy: Path) -> None:
    """Finishes or undoes a replacement that was interrupted between its two renames; see :func:`put`."""
    if old_copy.exists() and not target.exists():
        (new_copy if (new_copy / STAGED).exists() else old_copy).replace(target)
    _discard(old_copy, target)


def _others(folder: Path) -> list[str]:
    """Files and links in a copy that were not staged, relative to it."""
    marker = read_marker(folder / STAGED)
    staged = {STAGED, *(posixpath.join(marker.inside, name) for name in marker.files)} if marker else set()
    paths = []
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]  # noqa: PTH114, PTH118 -- walk gives texts
        subpath = os.path.relpath(parent, folder)
        paths += [os.path.normpath(os.path.join(subpath, name)) for name in (*names, *links)]  # noqa: PTH118 -- walk gives texts
    return sorted(name for name in paths if name not in staged)


def _refuse(error: OSError) -> None:
    raise error


def _discard(old_copy: Path, target: Path) -> None:
    """Removes a replaced copy. Moves the user's files to the new copy; files that cannot be moved are kept next to it."""
    if not os.path.lexists(old_copy):
        return
    user_files = _others(old_copy)
    if (
        user_files and read_marker(old_copy / STAGED) is not None
    ):  # otherwise files of the old copy could be mistaken for the user's
        for name in user_files:
            destination = target / name
            if not os.path.lexists(destination):
                with contextlib.suppress(OSError):
                    make_folder(destination.parent)
                    (old_copy / name).rename(destination)
        user_files = _others(old_copy)
    if user_files:
        number = next(n for n in itertools.count(1) if not os.path.lexists(_kept(target, n)))
        old_copy.rename(_kept(target, number))
        return
    for path in old_copy.iterdir():
        if path.name != STAGED:  # last: without it, what a kill leaves would be taken for the user's files
            remove(path)
    remove(old_copy)


def _kept(target: Path, number: int) -> Path:
    return target.with_name(f".{target.name}.actshard-kept-{number}")


def complete(source: Location, target: Path, layers: tuple[Layer, ...] | None, files: Listed | None) -> Staged | None:
    """Returns the copy in the folder if it is complete and equals ``files`` (None: not compared); else None."""
    marker = read_marker(target / STAGED)
    if marker is None or not is_same(marker, source, layers) or not marker.is_whole(target):
        return None
    if files is not None and (within(files, marker.below) != marker.listed or marker.changed(target)):
        return None
    return marker.result(target)


def is_same(marker: Marker, source: Location, layers: tuple[Layer, ...] | None) -> bool:
    """Whether a marker describes a copy of this source and these layers."""
    origin = origin_of(source)
    elsewhere = marker.origin is not None and origin is not None and marker.origin != origin
    is_same_request = marker.source == str(source) and marker.layers == (None if layers is None else list(layers))
    return is_same_request and not elsewhere


def check_target(source: Location, target: Path, layers: tuple[Layer, ...] | None) -> None:
    """Raises unless the folder is missing, empty, or an older copy."""
    if not os.path.lexists(target):
        return
    if os.path.ismount(target):  # it cannot be renamed
        raise ExistsError("is a mount point, which cannot be replaced. Choose a folder below it", path=target)
    if _is_working_folder(target):
        raise ExistsError(
            "is the working folder of this process, or above it, and would be replaced. Choose a folder below the working folder",
            path=target,
        )
    if not target.is_dir():
        raise ExistsError("expected a folder, or nothing, found a file. Choose another folder", path=target)
    marker = read_marker(target / STAGED)
    if marker is None:
        if any(target.iterdir()):
            raise ExistsError("contains files that were not staged. Choose another folder", path=target)
    elif not is_same(marker, source, layers):
        what = "all layers" if marker.layers is None else f"layers {listing(marker.layers)}"
        if marker.origin is not None and marker.origin != origin_of(source):
            what += " (from another server)"
        raise ExistsError(f"contains {what} of {marker.source}. Choose another folder", path=target)


def _is_working_folder(target: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(target.resolve())
    except OSError:  # it was removed
        return False


def _check_others(new_copy: Path, target: Path) -> None:
    """Raises ExistsError if the user's files in the folder cannot be moved to the new copy."""
    user_files, marker = _others(target), read_marker(target / STAGED)
    if user_files and marker is None:
        raise ExistsError("contains files that were not staged. Choose another folder", path=target)
    edited = (
        []
        if marker is None
        else [name for name in marker.changed(target) if not _are_equal(marker, name, new_copy, target)]
    )
    if edited:
        file_list = ", ".join(edited[:20]) + (f" and {len(edited) - 20} more" if len(edited) > 20 else "")
        raise ExistsError(
            f"contains files that were changed after they were staged: {file_list}. Move them away to have them staged again, or "
            "choose another folder",
            path=target,
        )
    conflicts = [name for name in user_files if any(_is_taken(new_copy, name, path) for path in (name, *_above(name)))]
    if conflicts:
        file_list = ", ".join(conflicts[:20]) + (f" and {len(conflicts) - 20} more" if len(conflicts) > 20 else "")
        raise ExistsError(
            f"contains your own files with names that the new copy needs: {file_list}. Move them, or choose another folder",
            path=target,
        )


def _are_equal(marker: Marker, name: str, new_copy: Path, target: Path) -> bool:
    near, far = target / marker.inside / name, new_copy / marker.inside / name
    return near.is_file() and far.is_file() and filecmp.cmp(near, far, shallow=False)


def _check_sound(copy: Path, source: str, target: Path) -> None:
    """Raises FormatError if the new copy is damaged where the older one is not: that may be the last good one."""
    errors = verify(copy, progress=None).errors
    if not errors:
        return
    before = read_marker(target / STAGED)
    older = target if before is None else target / before.inside
    old_errors = {(error.code, os.path.relpath(error.path, older)) for error in verify(older, progress=None).errors}
    errors = [error for error in errors if (error.code, os.path.relpath(error.path, copy)) not in old_errors]
    if errors:
        raise FormatError(
            f"the source is damaged now, so the older copy is kept: {str(errors[0]).replace(os.fspath(copy), source)}. Stage again "
            "when the source is mended, or to another folder",
            path=target,
        )


def _is_taken(new_copy: Path, name: str, path: str) -> bool:
    """Whether the new copy contains ``name``, or a file with the name of a folder that ``name`` needs."""
    return (
        os.path.lexists(new_copy / path)
        if name == path
        else os.path.lexists(new_copy / path) and not (new_copy / path).is_dir()
    )


def _above(name: str) -> list[str]:
    return [str(parent) for parent in PurePosixPath(name).parents][:-1]


def put(marker: Marker, files: dict[str, int], fetched: int, target: Path, new_copy: Path, old_copy: Path) -> Staged:
    """Renames ``new_copy`` to the target. An older copy is first renamed to ``old_copy``, and then removed."""
    times = {name: state_of(f"{new_copy}/{marker.inside}/{name}")[1] or 0 for name in files}
    new_marker = replace(marker, files=files, times=times)
    if not new_marker.is_whole(new_copy):
        raise FormatError("expected a complete copy, found files that are missing. Stage again", path=target)
    write_marker(new_copy / STAGED, new_marker)
    sync_tree(new_copy)
    if target.exists():
        _check_others(new_copy, target)
        _check_sound(new_copy / marker.inside, marker.source, target)
        target.replace(old_copy)
    new_copy.replace(target)
    _discard(old_copy, target)
    sync_folders([target.parent])
    return new_marker.result(target, fetched)


# Copies complete files of a source, and compares them with the listing.


_PIECE = 64 << 20
"""Maximum length of a range: large files are downloaded as several concurrent ranges."""
_BATCH = 512 << 20
_FILES = 512
"""Maximum bytes and ranges between two calls of ``progress``."""
_STEP, _AT_ONCE = 8 << 20, 32
"""As in copying.rs of the core: bytes per read, and number of threads."""
_SLACK = 64 << 20
"""Free space that must remain on the disk."""

StageProgress = Callable[[str, int, int], object]

_Range = tuple[str, Path, int, int, bool]
"""Name, temporary file, offset, length, and whether it is the file's last range."""


def keep(base: Path, files: Listed, plan: Marker | None) -> None:
    """Removes from an interrupted copy all files whose version differs from the source's."""
    if plan is None:
        remove(base)
    for folder, _, names in os.walk(base):
        for name in names:
            path = Path(folder) / name
            relative_name = path.relative_to(base).as_posix()
            if plan is None or relative_name not in files or plan.listed.get(relative_name) != files[relative_name]:
                remove(path)


def link(base: Path, files: Listed, target: Path, source: Location) -> Listed:
    """Hard-links unchanged files from the copy to be replaced. Files are replaced, never modified, so both copies may be open.

    Returns the other files, which must be checked: also those that an interrupted call copied.
    """
    remaining = dict(files)
    for name, near in unchanged(files, target, source).items():
        far = base / name
        if not far.exists():
            make_folder(far.parent)
            with contextlib.suppress(OSError):
                os.link(near, far)
                del remaining[name]
    return remaining


def unchanged(files: Listed, target: Path, source: Location) -> dict[str, str]:
    """Maps names to paths of files of an existing copy that equal the source's and were not modified since."""
    marker = read_marker(target / STAGED)
    if marker is None or not is_same(marker, source, None):
        return {}
    return {
        name: f"{target}/{marker.inside}/{name}"
        for name, entry in files.items()
        if marker.listed.get(name) == entry and marker.is_as_staged(target, name)
    }


def check_space(target: Path, size: int) -> None:
    """Raises DiskFullError unless ``size`` bytes are free."""
    free = shutil.disk_usage(target.parent).free
    if size and size + min(_SLACK, size) > free:
        raise DiskFullError(f"needs {size:,} bytes, {free:,} are free on this disk. Choose another folder", path=target)


def copy(location: Location, missing: Mapping[str, int], base: Path, parts: Path, tell: StageProgress) -> None:
    """Downloads files, each under a temporary name until it is complete."""
    total, done = sum(missing.values()), 0
    folders = {base, *((base / name).parent for name in missing)}
    for folder in sorted(folders):
        folder.mkdir(parents=True, exist_ok=True)
    parts.mkdir(parents=True, exist_ok=True)
    tell("bytes", 0, total)
    for batch in _batches(missing, parts):
        ranges: list[tuple[str | PathLike[str], str | PathLike[str], int, int]] = [
            (location / name, part, offset, length) for name, part, offset, length, _ in batch
        ]
        _native.copy_ranges(ranges)
        # Synced before renaming: a later call only checks the file's size.
        _native.sync_files(list(dict.fromkeys(part for _, part, *_ in batch)))
        for name, part, _, length, last in batch:
            done += length
            if last:
                part.replace(base / name)
        tell("bytes", done, total)


def _batches(missing: Mapping[str, int], parts: Path) -> Iterator[list[_Range]]:
    batch: list[_Range] = []
    size = 0
    for number, (name, file_size) in enumerate(missing.items()):
        for offset in range(0, max(file_size, 1), _PIECE):
            length = min(_PIECE, file_size - offset)
            batch.append((name, parts / str(number), offset, length, offset + length == file_size))
            size += length
            if size >= _BATCH or len(batch) >= _FILES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def most_in_memory(sizes: Sequence[int]) -> int:
    """Maximum bytes of the core's buffers in :func:`copy`: the core copies up to 32 ranges at once, in steps of 8 MiB."""
    pieces = sorted(
        (min(size, _STEP) for size in sizes for _ in range(max(1, -(-min(size, _BATCH) // _PIECE)))), reverse=True
    )
    return sum(pieces[:_AT_ONCE])


def check_versions(reopen: Callable[[], Location], base: Path, subpath: str, copied: Listed) -> None:
    """Compares files with a new listing if reading does not detect a replacement: local files, and empty files."""
    source = reopen()
    if str(source).startswith("hf://"):  # all files are of one commit
        return
    entries = {n: entry for n, entry in copied.items() if source.is_local or entry[0] == 0}
    if not entries:
        return
    current = within(list_files(source), subpath)
    wrong = [name for name, entry in entries.items() if current.get(name) != entry]
    for name in wrong:
        remove(base / name)
    if wrong:
        raise FormatError("was replaced while it was staged. Stage again", path=source / subpath / wrong[0])


def check_digests(base: Path, tags: Mapping[str, str]) -> None:
    """Compares files of the hub with their SHA-256, if that is their tag (large files). Removes all that differ."""
    digests = {name: digest.group() for name, tag in tags.items() if (digest := re.search(r"\b[0-9a-f]{64}\b", tag))}
    wrong = [name for name, digest in digests.items() if _native.digest_file(base / name)[1] != digest]
    for name in wrong:
        remove(base / name)
    if wrong:
        what = f"expected SHA-256 {digests[wrong[0]]}, found another. Stage again"
        raise FormatError(what, path=base / wrong[0], code="checksum")
