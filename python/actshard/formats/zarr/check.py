"""Checks of Zarr activation stores; see docs/formats/zarr.md."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base.errors import FormatError, MissingFileError, TruncatedFileError, UnsupportedError
from actshard.base.location import Location
from actshard.formats.format import Tell
from actshard.formats.report import Report
from actshard.formats.zarr.absent import MISSING, MOST_INDEX, is_usual_index
from actshard.formats.zarr.arrays import read_whole
from actshard.formats.zarr.member import Member, by_i
from actshard.formats.zarr.meta import ArrayMeta
from actshard.formats.zarr.read import stores_in, stores_of


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks every store of a run: metadata, lengths, chunk files, lines of text."""
    parsed = report.faults.parse(root, lambda: stores_of(root, report.faults))
    members = [] if parsed is None else parsed[0]
    for number, member in enumerate(members):
        tell("stores", number, len(members))
        with report.noting(member.path):
            _check_store(member, root, report)
    if parsed is not None and parsed[2]:
        listed_stores = {root / shard["path"] for shard in parsed[1]["shards"] if isinstance(shard.get("path"), str)}
        for store in stores_in(root / "shards"):
            if store not in listed_stores:
                report.add("unlisted-file", store, "a store that manifest.json does not list")


def _check_store(member: Member, root: Location, report: Report) -> None:
    store = member.path
    checked = list(zip(member.arrays, member.lengths, strict=True))
    if member.scaling is not None and member.scaling.values is None:  # scales of rows have the chunks of their codes
        checked.append((member.scaling.meta, member.lengths[0]))
    for array, lengths in checked:
        with report.noting(array.metadata):
            _check_chunks(array, lengths, member, report)
    with report.noting(store / "arrays"):
        for name in member.store.names("arrays"):
            with report.noting(store / "arrays" / name):
                meta = member.store.array(f"arrays/{name}")
                if meta is not None and meta.node not in {a.node for a in member.row_arrays}:
                    _check_small(meta, member, report)
    for differs in dict.fromkeys(w for w in member.store.warnings if w.code == "consolidated-differs"):
        report.add("consolidated-differs", root, differs if store == root else f"{store.name}: {differs}")
    with report.noting(store / "text"):
        for path in member.texts:
            with report.noting(path):
                lines = by_i(path, member.rows)
                if len(lines) < member.n:
                    report.add("count-claim", path, f"{len(lines)} lines", f"{member.n}, one per sample")


def _check_chunks(array: ArrayMeta, lengths: int | NDArray[np.integer], member: Member, report: Report) -> None:
    """Checks that chunk files are inside the grid and have the right size, and that all stored tokens have chunks."""
    try:
        files = array.chunk_files()
    except UnsupportedError:
        if array.folder.lists:
            raise
        report.add(
            "not-listed",
            array.folder,
            "chunks on a server that cannot list them: only chunks that are read are checked",
        )
        return
    report.count("files", len(files))
    report.count("bytes", sum(files.values()))
    grid = [math.ceil(n / c) for n, c in zip(array.shape, array.outer, strict=True)]
    assert array.dtype is not None
    full = math.prod(array.outer) * array.dtype.itemsize
    wrong = 0
    for coords, size in files.items():
        path = array.path_of(coords)
        if any(p >= n for p, n in zip(coords, grid, strict=True)):
            report.add("unlisted-file", path, f"chunk {list(coords)}", f"chunks of a grid {grid}")
        elif not array.how and size != full:
            wrong += 1
            if wrong <= 20:
                code = "empty-file" if size == 0 else "chunk-size"
                report.add(code, path, f"{size} bytes", f"{full} bytes, a whole chunk")
    if array.inner and not array.folder.is_remote:
        _check_shards(array, files, lengths, member, report)
    samples, layers, stretch, width = array.outer
    if isinstance(lengths, int):
        stretches = np.broadcast_to(np.int64(-(-lengths // stretch)), (-(-member.n // samples),))
    else:
        longest = np.maximum.reduceat(lengths, np.arange(0, member.n, samples)) if member.n else lengths
        stretches = -(-longest.astype(np.int64) // stretch)
    across, wide = math.ceil(member.num_layers / layers), math.ceil(array.shape[3] / width)
    total = int(stretches.sum()) * across * wide
    existing = {
        (block, layer, t, h)
        for block, layer, t, h in files
        if block < len(stretches) and layer < across and t < stretches[block] and h < wide
    }
    if len(existing) == total:
        return
    # Visits at most one place more than there are files.
    blocks = (int(block) for block in np.flatnonzero(stretches))
    places = (
        (block, layer, t, h)
        for block in blocks
        for layer in range(across)
        for t in range(int(stretches[block]))
        for h in range(wide)
    )
    first = next(coords for coords in places if coords not in existing)
    if array.complete:
        report.error(array.missing_chunk(first), array.folder)
        return
    report.add(
        "chunk-missing",
        array.folder,
        f"{total - len(existing)} chunks of stored tokens have no file, such as {array.path_of(first).relative_to(array.folder)}",
        "a file for every chunk with stored tokens",
        f"sample {first[0] * samples}",
    )


def _check_shards(
    array: ArrayMeta,
    files: Mapping[tuple[int, ...], int],
    lengths: int | NDArray[np.integer],
    member: Member,
    report: Report,
) -> None:
    """Checks the index of each local shard: its checksum, places inside of the file, and chunks for all stored tokens.

    Only of the form that all libraries write by default, plain numbers with a checksum at the end. Others are checked when they are
    read.
    """
    per_shard = [outer // inner for outer, inner in zip(array.outer, array.chunks, strict=True)]
    size = 16 * math.prod(per_shard) + 4
    if size > MOST_INDEX or not is_usual_index(array):
        return
    tokens = np.broadcast_to(np.asarray(lengths, np.int64), (member.n,))
    for coords, file_size in files.items():
        path = array.path_of(coords)
        with report.noting(path):
            if file_size < size:
                raise TruncatedFileError(
                    f"expected at least the {size} bytes of a shard's index, found {file_size}", path=path
                )
            index = np.frombuffer(path.read(file_size - size, size), np.uint8)
            entries = index[:-4].view("<u8").reshape(-1, 2)
            if not np.array_equal(_native.encode_shard_index(np.ascontiguousarray(entries, np.uint64)), index):
                text = "the checksum of the shard's index differs: the file is truncated or damaged"
                raise FormatError(text, path=path, offset=file_size - size)
            _check_entries(array, coords, entries.reshape(*per_shard, 2), file_size, tokens)


def _check_entries(
    array: ArrayMeta, shard_coords: tuple[int, ...], entries: NDArray[np.uint64], size: int, tokens: NDArray[np.int64]
) -> None:
    """Raises an error for an inner chunk outside of its shard, or that is missing although its tokens are stored."""
    path = array.path_of(shard_coords)
    begins, lengths = entries[..., 0], entries[..., 1]
    absent = (begins == MISSING) & (lengths == MISSING)
    outside = ~absent & ((begins > size) | (lengths > size - np.minimum(begins, size)))
    if outside.any():
        coords = tuple(int(axis[0]) for axis in np.nonzero(outside))
        text = f"inner chunk {list(coords)}: expected {lengths[coords]} bytes at {begins[coords]}, but the file ends at {size}"
        raise FormatError(text, path=path)
    if not array.complete:
        return
    first = [index * outer for index, outer in zip(shard_coords, array.outer, strict=True)]
    samples, _, stretches, _ = entries.shape[:4]
    shard_tokens = tokens[first[0] : first[0] + samples * array.chunks[0]]
    # Chunks of several samples are needed for the longest of them.
    longest = (
        np.maximum.reduceat(shard_tokens, np.arange(0, len(shard_tokens), array.chunks[0]))
        if len(shard_tokens)
        else shard_tokens
    )
    needed = longest[:, None] > first[2] + array.chunks[2] * np.arange(stretches)
    missing = absent[: len(longest)] & needed[:, None, :, None]
    if missing.any():
        coords = tuple(int(axis[0]) for axis in np.nonzero(missing))
        raise MissingFileError(
            f"expected inner chunk {list(coords)}, found none: its writer stores every chunk", path=path
        )


def _check_small(meta: ArrayMeta, member: Member, report: Report) -> None:
    """Checks that a per-sample array is readable and has an entry for every sample."""
    if not meta.shape or meta.shape[0] != member.rows:
        report.add("count-claim", meta.metadata, f"shape {list(meta.shape)}", f"{member.rows} entries, one per sample")
        return
    files = meta.stored()
    read_whole(meta, files=files)
    missing = meta.first_missing(files)
    if missing is not None:
        report.add("chunk-missing", meta.folder, f"{meta.path_of(missing).name} has no file", "a file for every chunk")
