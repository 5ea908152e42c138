"""``actshard convert --dry-run``: reports files, sizes and losses of a conversion without writing."""

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

from actshard import formats
from actshard.base import _arguments
from actshard.base.errors import ActshardError, ArgumentError, DiskFullError, NotStoredError, boundary
from actshard.base.layers import Layer
from actshard.base.work import existing_above
from actshard.formats.target import Target
from actshard.reading.inputs import fingerprint
from actshard.reading.store import Store
from actshard.writing.converting.blocks import Layout
from actshard.writing.converting.planning import (
    OVERFLOW,
    ConversionRequest,
    Loss,
    SourceSelection,
    TargetSettings,
    check_request,
    configure_target,
    conversion_record,
    list_losses,
    prepare_columns,
    refuse_target_within,
    source,
)
from actshard.writing.converting.running import write_all

# Predicts the bytes, files and memory of a conversion.
#
# The size of rows is computed exactly. The effect of metadata, columns, headers and compression is measured in a scratch
# folder: small conversions are written completely, large ones as two samples.


WHOLE_BYTES, WHOLE_FILES = 64 << 20, 2000
"""Limits of a conversion that is written completely: bytes of rows, and files."""
SAMPLE_BYTES, SAMPLE_FILES = 16 << 20, 500
"""Limits of a sample of a larger conversion."""
_RUNS = 16
"""A sample consists of this many runs of consecutive examples."""


@dataclass(frozen=True)
class Prediction:
    """Size of a result, its files with rows, and values that became infinite in it. ``exact``: measured, not extrapolated."""

    bytes: int
    files: int
    exact: bool
    shards: int = 0
    overflows: int = 0
    uncertainty: int = 0
    """Bytes by which two samples of a compressed result disagree."""


def predict(
    request: ConversionRequest, target: Target, layout: Layout, settings: TargetSettings, overflow: str
) -> Prediction:
    """Predicts the size of a conversion's result.

    Args:
        request: the request.
        target: the target, with all its settings.
        layout: its lengths.
        settings: those with which the target was made.
        overflow: ``"refuse"`` or ``"allow"``.

    Raises:
        ArgumentError: the format cannot store the result.
        DtypeError: a converted value is too large.
    """
    tokens, config = layout.tokens, target.config()

    def make_sample(part: ConversionRequest, folder: Path) -> Target:
        sample = configure_target(part, folder, settings)
        sample.adopt(config)
        sample.request = target.request
        return sample

    rows = tokens.astype(np.int64) * len(request.layers) * target.row_bytes
    shards, files, size = target.estimate(tokens)
    if target.blocks_are_files:
        shards, files = len(layout.firsts), files + len(layout.firsts) - shards
    if int(rows.sum()) <= WHOLE_BYTES and files <= WHOLE_FILES:
        return replace(_measure(request, make_sample, overflow), exact=True, shards=shards)
    examples = _sample(rows, files, SAMPLE_BYTES, SAMPLE_FILES)
    half = examples[: max(1, len(examples) // 2)]
    parts = [replace(request, examples=request.ids(0, request.count)[numbers]) for numbers in (half, examples)]
    try:
        first, last = [_measure(part, make_sample, overflow) for part in parts]
    except ArgumentError:  # a part alone may be refused
        return Prediction(size, files, False, shards)
    # Estimated by their own targets: saev has other sizes of shards for a part.
    estimates = [
        make_sample(part, target.root).estimate(tokens[numbers])
        for part, numbers in zip(parts, (half, examples), strict=True)
    ]
    (_, _, half_bytes), (_, sample_files, sample_bytes) = estimates
    files += last.files - sample_files
    if last.bytes < sample_bytes:  # compressed: what fills up chunks takes next to nothing
        row_bytes, half_rows, sample_rows = (int(part.sum()) for part in (rows, rows[half], rows[examples]))
        # The first half of the sample, and the second.
        rest = sample_rows - half_rows
        disagreement = abs(first.bytes / half_rows - (last.bytes - first.bytes) / rest) if half_rows and rest else 0.0
        total = row_bytes * last.bytes / max(sample_rows, 1)
        return Prediction(int(total), files, False, shards, uncertainty=round(row_bytes * disagreement))
    over = [first.bytes - half_bytes, last.bytes - sample_bytes]
    extra_per_example = (over[1] - over[0]) / max(1, len(examples) - len(half))
    return Prediction(
        int(size + over[1] + max(extra_per_example, 0.0) * (len(tokens) - len(examples))), files, False, shards
    )


def _sample(rows: NDArray[np.int64], files: int, most_bytes: int, most_files: int) -> NDArray[np.int64]:
    """Returns examples that take at most ``most_bytes`` bytes and ``most_files`` files: see :func:`spread`."""
    numbers = spread(rows, most_bytes)
    limit = max(1, most_files * len(rows) // max(1, files))
    return numbers if len(numbers) <= limit else numbers[np.arange(limit) * len(numbers) // limit]


def spread(sizes: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Numbers of examples in evenly spaced runs, with at most ``limit`` bytes in total, but at least one example. Ascending.

    Args:
        sizes: ``(n,)``: bytes of each example.
        limit: bytes.
    """
    if int(sizes.sum()) <= limit:
        return np.arange(len(sizes))
    borders = np.unique(np.arange(_RUNS + 1) * len(sizes) // _RUNS)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    share = limit // (len(borders) - 1)
    # At places that do not repeat with the data.
    places = np.random.default_rng(0).random(len(borders) - 1)
    room = np.maximum(ends[borders[1:]] - ends[borders[:-1]] - share, 0)
    starts = np.searchsorted(ends, ends[borders[:-1]] + places * room)
    starts = np.clip(starts, borders[:-1], borders[1:] - 1)
    stops = np.minimum(np.searchsorted(ends, ends[starts] + share, "right") - 1, borders[1:])
    numbers = np.concatenate([np.arange(a, b) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)])
    return numbers if sizes[numbers].any() else np.array([int(np.argmax(sizes > 0))])


def _measure(
    request: ConversionRequest, make_sample: Callable[[ConversionRequest, Path], Target], overflow: str
) -> Prediction:
    """Writes a conversion, removes it, and returns its size."""
    import tempfile  # imported on use: it imports many modules

    with tempfile.TemporaryDirectory(prefix="actshard-plan-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(scratch) / "d"
        try:
            overflows = write_all(request, lambda: make_sample(request, folder), overflow)
        except ActshardError as error:
            if error.path is not None and folder in (error.path, *error.path.parents):
                error.path = None  # removed with the folder
            raise
        sizes = [Path(path, name).stat().st_size for path, _, names in os.walk(folder) for name in names]
    return Prediction(sum(sizes), len(sizes), False, overflows=overflows)


def refuse_full(root: Path, size: int, files: int) -> None:
    """Raises DiskFullError if a folder's file system has no room for the result. The folder need not exist."""
    parent = existing_above(root)
    try:
        free = shutil.disk_usage(parent).free
        file_system = os.statvfs(parent)
    except OSError:  # the file system does not report its free space
        return
    if size > free:
        raise DiskFullError(
            f"expected room for {size:,} bytes, found {free:,} free on the file system of {parent}", path=root
        )
    if file_system.f_files and files > file_system.f_favail:
        raise DiskFullError(
            f"expected room for {files:,} files, found {file_system.f_favail:,} free inodes on the file system of {parent}; larger "
            "shards, or a format with fewer files, need fewer",
            path=root,
        )


_STORED = ("dtype", "tokens_per_example", "shard_bytes")
"""Arguments of a conversion that determine how each format stores its rows."""


@dataclass(frozen=True)
class Preview:
    """Preview of a conversion to one format."""

    format: str
    path: Path
    examples: int
    layers: tuple[Layer, ...]
    rows: int
    dtype: str | None
    shards: int
    """Number of files that contain rows."""
    files: int
    """Number of all files (inodes)."""
    bytes: int
    """Bytes of all files."""
    uncertainty: int
    """Bytes by which two samples of a compressed result disagree about ``bytes``."""
    losses: tuple[Loss, ...]
    refused: str | None = None
    """Why the conversion is not possible, with a remedy; None if it is."""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "path": str(self.path),
            "layers": list(self.layers),
            "losses": [x.as_dict() for x in self.losses],
        }


def preview(
    src: object,
    dst: str | os.PathLike[str],
    format: str | None = None,
    *,
    src_format: str | None = None,
    overflow: _arguments.Overflow = "refuse",
    storage_options: Mapping[str, object] | None = None,
    cache: str | os.PathLike[str] | int | bool | None = None,
    **arguments: Any,
) -> list[Preview]:
    """Returns previews of :func:`actshard.convert` for one format, or for all formats (None). Writes nothing to ``dst``.

    ``arguments`` are those of :func:`actshard.convert` that select rows and determine how they are stored.

    Small conversions are written to a temporary folder, so that files and bytes are exact, and values too large for a narrower
    ``dtype`` are counted. Of larger ones, samples are written; see :mod:`~actshard.writing.converting.previewing`.
    """
    if not _arguments.is_one_of(overflow, OVERFLOW):
        raise ArgumentError(f"overflow: expected {' or '.join(map(repr, OVERFLOW))}, found {overflow!r}")
    root = _arguments.local_path(dst, "dst")
    with boundary(root, "convert"):
        store = source(src, src_format, "auto", storage_options, cache)
        digest = fingerprint(store)
        selection = _arguments.popped(SourceSelection, arguments)
        dtype, tokens_per_example, shard_bytes = (arguments.pop(name, None) for name in _STORED)
        settings = TargetSettings(dtype, tokens_per_example, shard_bytes, None, arguments, None)
        return [
            _preview(store, root, name, format is not None, selection, settings, overflow, digest)
            for name in ((format,) if format is not None else formats.written())
        ]


def _preview(
    store: Store,
    root: Path,
    name: str,
    only: bool,
    selection: SourceSelection,
    settings: TargetSettings,
    overflow: str,
    digest: str,
) -> Preview:
    """Preview for one format. ``only``: the user named this format, so errors about the source are raised."""
    # check_request() raises for unknown names.
    kind = formats.get(name).target() if name in formats.written() else Target
    if not only:
        format_options = {k: v for k, v in settings.options.items() if k in kind.format_options}
        shard_bytes = settings.shard_bytes if kind.takes_shard_bytes else None
        settings = replace(settings, options=format_options, shard_bytes=shard_bytes)
    try:
        request = check_request(store, name, selection, cast=settings.dtype is not None)
        target = configure_target(request, root, settings)
        refuse_target_within(request, target)
        target.request = conversion_record(request, overflow, settings, digest)
        columns = prepare_columns(request, target, every=True)  # before the lengths, which are then cached
        layout = Layout.of(request, target)
        layout.settle(request, target)
        if not kind.ragged:
            settings = replace(settings, tokens_per_example=target.tokens)
        size = predict(request, target, layout, settings, overflow)
        return Preview(
            name,
            root if target.names_itself else target.place(),
            request.count,
            request.names,
            int(layout.rows(len(request.layers)).sum()),
            str(target.dtype),
            size.shards,
            size.files,
            size.bytes,
            size.uncertainty,
            tuple(list_losses(request, target, columns, size.overflows)),
        )
    except ActshardError as error:
        if only and not isinstance(error, ArgumentError | TypeError | NotStoredError):
            raise
        return Preview(name, root, 0, (), 0, None, 0, 0, 0, 0, (), refused=error.detail)
