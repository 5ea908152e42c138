"""Copies files of a source whole, and compares them with the listing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import actshard._native as _native
from actshard.errors import DiskFullError, FormatError
from actshard.location import Location
from actshard.staging.folder import is_same
from actshard.staging.listing import list_files, within
from actshard.staging.marker import Listed, Marker, read_marker
from actshard.work import STAGED, make_folder, remove

_PIECE = 64 << 20
"""Longest range of one copy: large files are downloaded in several ranges at once."""
_BATCH = 512 << 20
_FILES = 512
"""Bytes and files between two calls of ``progress``."""
_STEP, _AT_ONCE = 8 << 20, 32
"""As in copying.rs of the core: bytes that one thread reads at once, and threads."""
_SLACK = 64 << 20
"""Free space that must remain on the disk."""

StageProgress = Callable[[str, int, int], object]

_Range = tuple[str, Path, int, int, bool]
"""Name, temporary file, offset, length, and whether it is the file's last."""


def keep(base: Path, wanted: Listed, plan: Marker | None) -> None:
    """Removes from an interrupted copy all files that the source does not have in the same version."""
    if plan is None:
        remove(base)
    for folder, _, names in os.walk(base):
        for name in names:
            path = Path(folder) / name
            known = path.relative_to(base).as_posix()
            if plan is None or known not in wanted or plan.listed.get(known) != wanted[known]:
                remove(path)


def link(base: Path, wanted: Listed, target: Path, source: Location) -> None:
    """Links unchanged files of the copy that is replaced. Files are replaced, never changed, so both may be open."""
    for name, near in unchanged(wanted, target, source).items():
        far = base / name
        if not far.exists():
            make_folder(far.parent)
            with contextlib.suppress(OSError):
                os.link(near, far)


def unchanged(wanted: Listed, target: Path, source: Location) -> dict[str, str]:
    """Files of the copy in a folder that are as the source's, and were not written since: path by name."""
    marker = read_marker(target / STAGED)
    if marker is None or not is_same(marker, source, None):
        return {}
    return {
        name: f"{target}/{marker.inside}/{name}"
        for name, entry in wanted.items()
        if marker.listed.get(name) == entry and marker.is_as_staged(target, name)
    }


def check_space(target: Path, wanted: int) -> None:
    """Raises DiskFullError unless so many bytes are free."""
    free = shutil.disk_usage(target.parent).free
    if wanted and wanted + min(_SLACK, wanted) > free:
        raise DiskFullError(
            f"needs {wanted:,} bytes, {free:,} are free on this disk. Choose another folder", path=target
        )


def copy(place: Location, missing: Mapping[str, int], base: Path, parts: Path, tell: StageProgress) -> None:
    """Downloads files, each under a temporary name until it is whole."""
    total, done = sum(missing.values()), 0
    folders = {base, *((base / name).parent for name in missing)}
    for folder in sorted(folders):
        folder.mkdir(parents=True, exist_ok=True)
    parts.mkdir(parents=True, exist_ok=True)
    tell("bytes", 0, total)
    for batch in _batches(missing, parts):
        ranges: Any = [(place / name, part, at, length) for name, part, at, length, _ in batch]
        _native.copy_ranges(ranges)
        # A file has its name only when it is on the disk: a later call trusts its size.
        _native.sync_files(list(dict.fromkeys(part for _, part, *_ in batch)))
        for name, part, _, length, last in batch:
            done += length
            if last:
                part.replace(base / name)
        tell("bytes", done, total)


def _batches(missing: Mapping[str, int], parts: Path) -> Iterator[list[_Range]]:
    batch: list[_Range] = []
    size = 0
    for number, (name, whole) in enumerate(missing.items()):
        for at in range(0, max(whole, 1), _PIECE):
            length = min(_PIECE, whole - at)
            batch.append((name, parts / str(number), at, length, at + length == whole))
            size += length
            if size >= _BATCH or len(batch) >= _FILES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def most_in_memory(sizes: Sequence[int]) -> int:
    """Bytes of the buffers of :func:`copy`: the core copies so many ranges at once, each in steps."""
    pieces = sorted(
        (min(size, _STEP) for size in sizes for _ in range(max(1, -(-min(size, _BATCH) // _PIECE)))), reverse=True
    )
    return sum(pieces[:_AT_ONCE])


def check_versions(again: Callable[[], Location], base: Path, below: str, copied: Listed) -> None:
    """Compares files with a new listing where reading does not notice a replacement: local ones, and empty ones."""
    source = again()
    if str(source).startswith("hf://"):  # of one commit
        return
    asked = {n: entry for n, entry in copied.items() if source.is_local or entry[0] == 0}
    if not asked:
        return
    found = within(list_files(source), below)
    wrong = [name for name, entry in asked.items() if found.get(name) != entry]
    for name in wrong:
        remove(base / name)
    if wrong:
        raise FormatError("was replaced while it was staged. Stage again", path=source / below / wrong[0])


def check_digests(base: Path, tags: Mapping[str, str]) -> None:
    """Compares files of the hub with their SHA-256, where it is their tag (large files)."""
    for name, tag in tags.items():
        digest = re.search(r"\b[0-9a-f]{64}\b", tag)
        if digest and _native.digest_file(base / name)[1] != digest.group():
            remove(base / name)
            raise FormatError(
                f"expected SHA-256 {digest.group()}, found another. Stage again", path=base / name, code="checksum"
            )
