"""Predicts the bytes, files and memory of a conversion.

The size of rows is computed exactly. The effect of metadata, columns, headers and compression is measured in a scratch folder:
small conversions are written completely, large ones as two samples.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.converting.planning import Asked, settle
from actshard.converting.running import write_all
from actshard.converting.segments import Layout
from actshard.errors import ActshardError, ArgumentError, DiskFullError
from actshard.formats.target import Target
from actshard.work import existing_above

WHOLE_BYTES, WHOLE_FILES = 64 << 20, 2000
"""Limits of a conversion that is written completely: bytes of rows, and files."""
SAMPLE_BYTES, SAMPLE_FILES = 16 << 20, 500
"""Limits of a sample of a larger conversion."""


@dataclass(frozen=True)
class Prediction:
    """Size of a result, its files with rows, and values that became infinite in it. ``exact``: measured, not extrapolated."""

    bytes: int
    files: int
    exact: bool
    shards: int = 0
    overflows: int = 0


def predict(asked: Asked, target: Target, layout: Layout, sizes: Mapping[str, Any], overflow: str) -> Prediction:
    """Predicts the size of a conversion's result.

    Args:
        asked: the request.
        target: the target, with all its settings.
        layout: its lengths.
        sizes: the arguments of :func:`settle` with which the target was made.
        overflow: ``"refuse"`` or ``"allow"``.

    Raises:
        ArgumentError: the format cannot store the result.
        DtypeError: a converted value is too large.
    """
    tokens, config = layout.tokens, target.config()

    def made(some: Asked, folder: Path) -> Target:
        sample = settle(some, folder, **sizes)
        sample.adopt(config)
        sample.request = target.request
        return sample

    rows = tokens.astype(np.int64) * len(asked.layers) * target.row_bytes
    shards, files, size = target.estimate(tokens)
    if target.blocks_are_files:
        shards, files = len(layout.firsts), files + len(layout.firsts) - shards
    if int(rows.sum()) <= WHOLE_BYTES and files <= WHOLE_FILES:
        return replace(_written(asked, made, overflow), exact=True, shards=shards)
    whole = _sample(rows, files, len(tokens), SAMPLE_BYTES, SAMPLE_FILES)
    half = whole[: max(1, len(whole) // 2)]
    parts = [replace(asked, examples=asked.ids(0, asked.count)[some]) for some in (half, whole)]
    try:
        first, last = [_written(part, made, overflow) for part in parts]
    except ArgumentError:  # a part alone may be refused
        return Prediction(size, files, False, shards)
    # Estimated by their own targets: saev has other sizes of shards for a part.
    estimates = [
        made(part, target.root).estimate(tokens[some]) for part, some in zip(parts, (half, whole), strict=True)
    ]
    (_, _, fewer), (_, sample_files, more) = estimates
    files += last.files - sample_files
    if last.bytes < more:  # compressed
        return Prediction(int(size * last.bytes / more), files, False, shards)
    over = [first.bytes - fewer, last.bytes - more]
    each = (over[1] - over[0]) / max(1, len(whole) - len(half))
    return Prediction(int(size + over[1] + max(each, 0.0) * (len(tokens) - len(whole))), files, False, shards)


def _sample(rows: NDArray[np.int64], files: int, count: int, most: int, most_files: int) -> NDArray[np.int64]:
    """Returns consecutive examples from the middle that take at most ``most`` bytes and ``most_files`` files."""
    limit = max(1, most_files * count // max(1, files))
    first = count // 2 if count > limit else 0
    ends = np.cumsum(rows[first : first + limit])
    return np.arange(first, first + max(1, int(np.searchsorted(ends, most, "right"))))


def _written(asked: Asked, made: Callable[[Asked, Path], Target], overflow: str) -> Prediction:
    """Writes a conversion, removes it, and returns its size."""
    import tempfile  # imported on use: it imports many modules

    with tempfile.TemporaryDirectory(prefix="actshard-plan-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(scratch) / "d"
        try:
            overflows = write_all(asked, lambda: made(asked, folder), overflow)
        except ActshardError as error:
            if error.path is not None and folder in (error.path, *error.path.parents):
                error.path = None  # removed with the folder
            raise
        found = [Path(path, name).stat().st_size for path, _, names in os.walk(folder) for name in names]
    return Prediction(sum(found), len(found), False, overflows=overflows)


def refuse_full(root: Path, size: int, files: int) -> None:
    """Raises DiskFullError if a folder's file system has no room for the result. The folder need not exist."""
    above = existing_above(root)
    try:
        free = shutil.disk_usage(above).free
        held = os.statvfs(above)
    except OSError:  # the file system does not report its free space
        return
    if size > free:
        raise DiskFullError(
            f"expected room for {size:,} bytes, found {free:,} free on the file system of {above}", path=root
        )
    if held.f_files and files > held.f_favail:
        raise DiskFullError(
            f"expected room for {files:,} files, found {held.f_favail:,} free inodes on the file system of {above}; larger shards, "
            "or a format with fewer files, need fewer",
            path=root,
        )
