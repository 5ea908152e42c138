"""Checks of DeepSpec target caches; see docs/formats/deepspec.md."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from actshard.base.location import Location
from actshard.formats.contents import Options
from actshard.formats.deepspec.manifest import OFFSETS, RECORDS, TOKEN_BYTES, Manifest
from actshard.formats.deepspec.read import LOST, TargetCache
from actshard.formats.format import Tell
from actshard.formats.per_token import TokenColumns, check_token_values
from actshard.formats.report import Report

_SHOWN = 20
"""Findings of one kind per index file, at most."""
_BATCH = 1 << 16
"""Records read at once."""


def share_of(
    split: str, tokens: NDArray[np.int64], rank: int, ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First token and number of rows of a rank's states: contiguous shares, or chunks from both ends."""
    if ranks > 1 and split == "head-tail":
        return np.zeros_like(tokens), 2 * -(-tokens // (2 * ranks))
    base, remainder = tokens // ranks, tokens % ranks
    return rank * base + np.minimum(rank, remainder), base + (rank < remainder)


class _Spans:
    """Byte ranges of examples in shards, for the check of overlaps and gaps."""

    def __init__(self) -> None:
        self.parts: list[NDArray[np.int64]] = []

    def add(
        self, rank: int, first: int, shard: NDArray[np.generic], begin: NDArray[np.generic], end: NDArray[np.generic]
    ) -> None:
        """Adds valid examples ``first + i``."""
        numbers = np.arange(first, first + len(shard))
        self.parts.append(np.stack([shard, begin, end, numbers, np.full(len(shard), rank)], axis=1).astype(np.int64))

    def check(
        self, shards: list[Location], sizes: list[int], indexes: list[Location], record: int, report: Report
    ) -> None:
        """Reports overlapping examples, and bytes of shards that belong to no example."""
        every = np.concatenate(self.parts) if self.parts else np.empty((0, 5), np.int64)
        every = every[np.lexsort((every[:, 1], every[:, 0]))]
        for number, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
            a, b = np.searchsorted(every[:, 0], [number, number + 1])
            spans = every[a:b]
            ends = np.maximum.accumulate(spans[:, 2]) if len(spans) else spans[:, 2]
            covered = np.concatenate([[0], ends])
            begins = np.concatenate([spans[:, 1], [size if size < LOST else covered[-1]]])
            for i in np.flatnonzero(begins[:-1] < covered[:-1])[:_SHOWN].tolist():
                owner = spans[int(np.argmax(spans[:i, 2]))]
                report.add(
                    "address-overlap",
                    indexes[int(spans[i, 4])],
                    f"bytes {spans[i, 1]} to {spans[i, 2]} of {shard.name}; example {owner[3]} has bytes {owner[1]} to {owner[2]}",
                    "separate bytes for every example",
                    f"record {spans[i, 3]}, byte {spans[i, 3] * record}",
                )
            unused = int(np.maximum(begins - covered, 0).sum())
            if unused:
                offset = int(covered[int(np.argmax(begins > covered))])
                report.add("layout", shard, f"{unused} bytes that belong to no example", place=f"byte {offset}")


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks the manifest, sizes of files, every record, that examples do not overlap, token ids, and masks."""
    cache = report.faults.parse(root, lambda: TargetCache(root, report.faults))
    if cache is None:
        return
    manifest = cache.manifest
    report.count("files", len(cache.sizes) - cache.sizes.count(LOST))
    report.count("bytes", sum(size for size in cache.sizes if size != LOST))
    spans = _Spans()
    lengths: NDArray[np.int64] | None = None
    for rank, index in cache.ranks:
        with report.noting(index):
            lengths = _check_index(index, rank, manifest, cache.sizes, lengths, spans, report, tell)
    spans.check(cache.shards, cache.sizes, cache.indexes, manifest.record_bytes, report)
    if report.ok:
        with report.noting(root):
            _check_tokens(cache, report)
    if root.lists:
        listed_names = {*manifest.shard_names, *manifest.index_names}
        for entry in (*root.entries("shard-*.bin"), *root.entries("samples*.idx")):
            if entry.name not in listed_names:
                report.add("unlisted-file", root / entry.name, "a file that the manifest does not list")


def _check_tokens(cache: TargetCache, report: Report) -> None:
    """Checks token ids and masks of the samples of the first rank."""
    root = cache.path
    columns = TokenColumns(cache.native(Options.of(root))[1], cache.manifest.num_examples, root.place)
    check_token_values(columns, report, lambda example: root)


def _records(index: Location, manifest: Manifest) -> Iterator[tuple[int, NDArray[np.void]]]:
    """Records in batches, each with the number of its first record."""
    dtype = RECORDS[manifest.record_bytes]
    for first in range(0, manifest.num_examples, _BATCH):
        n = min(_BATCH, manifest.num_examples - first)
        yield first, np.frombuffer(index.read(first * manifest.record_bytes, n * manifest.record_bytes), dtype)


def _check_index(
    index: Location,
    rank: int,
    manifest: Manifest,
    sizes: list[int],
    other_lengths: NDArray[np.int64] | None,
    spans: _Spans,
    report: Report,
    tell: Tell,
) -> NDArray[np.int64] | None:
    """Checks every record of one index file. Returns the examples' lengths, to be compared with other ranks' index files."""
    lengths = np.zeros(manifest.num_examples, np.int64)
    shown: dict[str, int] = {}
    for first, records in _records(index, manifest):
        tell("records", first, manifest.num_examples)
        lengths[first : first + len(records)] = records["seq_len"]
        fields = list(_expected(records, first, rank, manifest, sizes))
        if other_lengths is not None:
            same = other_lengths[first : first + len(records)]
            fields.insert(0, ("seq_len", records["seq_len"] == same, same, "count-claim"))
        wrong = np.zeros(len(records), bool)
        for name, fits, expected, code in fields:
            for i in np.flatnonzero(~fits & ~wrong).tolist():
                shown[name] = shown.get(name, 0) + 1
                if shown[name] <= _SHOWN:
                    number = first + i
                    byte = number * manifest.record_bytes + RECORDS[manifest.record_bytes].fields[name][1]  # type: ignore[index]  # None only for plain types
                    expected_text = expected if isinstance(expected, str) else str(expected[i])
                    report.add(
                        code,
                        index,
                        int(records[name][i]),
                        expected_text,
                        f"record {number}, byte {byte}, field '{name}'",
                    )
            wrong |= ~fits
        begin = records["input_ids_offset"].astype(np.int64)
        end = begin + _bytes(records, rank, manifest)
        room = np.array([*sizes, 0], np.int64)[np.minimum(records["shard_id"], len(sizes))]
        for i in np.flatnonzero(~wrong & (end > room)).tolist():
            shown["end"] = shown.get("end", 0) + 1
            if shown["end"] <= _SHOWN:
                shard = index.parent / manifest.shard_names[int(records["shard_id"][i])]
                expected_text = f"{end[i]} bytes, where example {first + i} ends"
                report.add("truncated", shard, f"{room[i]} bytes", expected_text, f"byte {room[i]}")
        # Also records with wrong offsets: their tensors may overlap bytes of other examples.
        begin, end = _extent(records, rank, manifest)
        for run in _runs((records["shard_id"] < len(sizes)) & (end <= room)):
            spans.add(rank, first + run.start, records["shard_id"][run], begin[run], end[run])
    return lengths if other_lengths is None else other_lengths


def _runs(flags: NDArray[np.bool_]) -> Iterator[slice]:
    """Runs of consecutive true values, as slices."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return (slice(int(a), int(b)) for a, b in edges.reshape(-1, 2))


def _bytes(records: NDArray[np.void], rank: int, manifest: Manifest) -> NDArray[np.int64]:
    """Size of each example in bytes. For damaged records it may overflow; the caller does not use these."""
    tokens = records["seq_len"].astype(np.int64)
    _, count = share_of(manifest.split, tokens, rank, len(manifest.index_names))
    rows = manifest.row_bytes * (len(manifest.layer_ids) + manifest.last)
    sizes: NDArray[np.int64] = tokens * TOKEN_BYTES + count * rows
    return sizes


def _expected(
    records: NDArray[np.void], first: int, rank: int, manifest: Manifest, sizes: list[int]
) -> Iterator[tuple[str, NDArray[np.bool_], NDArray[np.generic] | str, str]]:
    """Per field of the records: its name, which values are correct, the expected values, the code of a finding."""
    numbers = np.arange(first, first + len(records), dtype=np.uint64)
    yield "sample_id", records["sample_id"] == numbers, numbers, "duplicate-sample"
    yield "seq_len", records["seq_len"] > 0, "a positive number", "format"
    yield "shard_id", records["shard_id"] < len(sizes), f"a shard, 0 to {len(sizes) - 1}", "address-out-of-range"
    tokens = records["seq_len"].astype(np.int64)
    start, count = share_of(manifest.split, tokens, rank, len(manifest.index_names))
    for name, expected in (("context_start", start), ("context_len", count)):
        if name in (records.dtype.names or ()):
            yield name, records[name] == expected, expected, "format"
    # Compared as floats, because a malicious length would overflow 64 bits. The integers below then cannot overflow.
    in_range = records["input_ids_offset"].astype(np.float64) + _float_bytes(records, rank, manifest) < 2.0**62
    yield "input_ids_offset", in_range, "an example that ends below byte 2^62", "address-out-of-range"
    offsets = np.where(in_range, records["input_ids_offset"], 0).astype(np.int64)
    lengths = (4 * tokens, tokens, tokens, count * manifest.row_bytes * len(manifest.layer_ids))
    for name, length in zip(OFFSETS[1:], lengths, strict=True):
        offsets = offsets + np.where(in_range, length, 0)
        yield name, records[name] == offsets.astype(np.uint64), offsets, "format"


def _extent(records: NDArray[np.void], rank: int, manifest: Manifest) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First byte of each example's first tensor, and end of its last tensor. Ends that are invalid or too large are 2^62."""
    tokens = records["seq_len"].astype(np.int64)
    _, count = share_of(manifest.split, tokens, rank, len(manifest.index_names))
    row = manifest.row_bytes
    lengths = (4 * tokens, tokens, tokens, count * (row * len(manifest.layer_ids)), count * (row * manifest.last))
    begin = np.full(len(records), 1 << 62, np.int64)
    end = np.zeros(len(records), np.int64)
    for name, length in zip(OFFSETS, lengths, strict=True):
        in_range = records[name] < 1 << 61
        offsets = np.where(in_range, records[name], 0).astype(np.int64)
        begin = np.where(in_range, np.minimum(begin, offsets), begin)
        end = np.maximum(end, np.where(in_range & (length < 1 << 61) & (length >= 0), offsets + length, 1 << 62))
    return begin, end


def _float_bytes(records: NDArray[np.void], rank: int, manifest: Manifest) -> NDArray[np.float64]:
    tokens = records["seq_len"].astype(np.int64)
    _, count = share_of(manifest.split, tokens, rank, len(manifest.index_names))
    sizes: NDArray[np.float64] = tokens * float(TOKEN_BYTES) + count * (
        float(manifest.row_bytes) * (len(manifest.layer_ids) + manifest.last)
    )
    return sizes
