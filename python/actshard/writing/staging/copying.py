"""Copies complete files of a source, and compares them with the listing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import actshard._native as _native
from actshard.base.errors import DiskFullError, FormatError
from actshard.base.location import Location
from actshard.base.work import STAGED, make_folder, remove
from actshard.writing.staging.folder import Listed, Marker, is_same, list_files, read_marker, within

if TYPE_CHECKING:
    from os import PathLike

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
