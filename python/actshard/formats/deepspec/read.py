"""DeepSpec target caches: hidden states of a target model, one sequence per example.

An example is a sequence. Layers are the ids of ``target_layer_ids``, then ``"last"``, if last hidden states are stored. Token ids
and masks are per-token columns. Opening reads manifest.json and the sizes of files, no record of the index.

Files of a DeepSpec target cache: manifest.json, index files, shards.

Sources: deepseek-ai/DeepSpec at afdfa7c, ``deepspec/data/target_cache_dataset.py`` (version 2); xlm-research/DeepSpec at 0d63d17
and 022717a (versions 3 and 4). Both forks write version 4, with records of different sizes: ``index_record_size`` decides.

manifest.json    sizes, layers, names of shards; written last
samples.idx      a record per example (actshard_core::layout::records), or samples.cp000.idx ..., one per context-parallel rank
shard-00000.bin  examples back to back: input_ids int32, attention_mask uint8, loss_mask uint8, states bfloat16, last bfloat16
_tmp/rank_0/     an unfinished cache: no manifest yet
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actshard._native import IndexRecords, Rows
from actshard.base._arguments import NUMPY_BY_NAME
from actshard.base._json import Fields, read_json, show
from actshard.base.codes import Remark
from actshard.base.errors import RAISE, Faults, FormatError, MissingFileError, UnfinishedError, UnsupportedError
from actshard.base.location import Location
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Tell
from actshard.formats.per_token import LAST, TokenColumns, check_token_values, layer_names
from actshard.formats.report import Report

MANIFEST = "manifest.json"
INDEX = "samples.idx"
TEMPORARY = "_tmp"
DTYPES = {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8"}
COLUMNS = ("input_ids", "attention_mask", "loss_mask")
"""Per-token columns, in the order in which a shard stores them."""
TOKEN_BYTES = 6
"""Bytes per token of all columns."""
ITEMSIZE = 2
OFFSETS = (*(f"{name}_offset" for name in COLUMNS), "target_hidden_states_offset", "target_last_hidden_states_offset")
_HEAD = (("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4"))
_MIDDLE: dict[int, tuple[str, ...]] = {56: (), 60: ("context_len",), 64: ("context_start", "context_len")}
RECORDS = {
    size: np.dtype([*_HEAD, *((name, "<u4") for name in middle), *((name, "<u8") for name in OFFSETS)])
    for size, middle in _MIDDLE.items()
}
"""Records by their size."""
_RECORDS = {2: (56,), 3: (60, 64), 4: (60, 64)}
"""Sizes of records by version."""
_LAYOUTS = {"contiguous": "contiguous", "native_head_tail": "head-tail"}
"""Values of ``context_layout``, each with the core's name for it."""
MOST_RANKS = 1024


@dataclass(frozen=True)
class Manifest:
    """A checked manifest."""

    fields: Fields
    version: int
    num_examples: int
    width: int
    layer_ids: tuple[int, ...]
    last: bool
    """Whether last hidden states are stored."""
    record_bytes: int
    index_names: tuple[str, ...]
    split: str
    """The core's name for how an example's states are divided among index files."""
    shard_names: tuple[str, ...]

    @classmethod
    def of(cls, root: Location, faults: Faults = RAISE) -> Manifest:
        """Reads and checks the manifest.

        Raises:
            FormatError, UnsupportedError: a field is missing or invalid, or the version is not supported.
        """
        path = root / MANIFEST
        fields = Fields(read_json(path), path, faults=faults)
        version = fields.integer("version")
        fields.check()
        if version not in _RECORDS:
            raise UnsupportedError(f"field 'version': expected 2, 3 or 4, found {version}", path=path)
        record = fields.integer("index_record_size")
        fields.check()
        if record not in _RECORDS[version]:
            sizes = " or ".join(map(str, _RECORDS[version]))
            raise fields.error("index_record_size", f"{sizes}, as of version {version}")
        for name, dtype in DTYPES.items():
            if fields.text(name) != dtype:
                fields.check()
                faults.add(UnsupportedError(fields.error(name, f'"{dtype}"').detail, path=path))
        width, layers = fields.integer("hidden_size"), _layers(fields)
        if width * ITEMSIZE * (len(layers) + 1) >= 1 << 32:
            raise fields.error("hidden_size", "less than 4 GiB of states per token")
        indexes, split = _ranks(fields) if version > 2 else ((INDEX,), "contiguous")
        manifest = cls(
            fields,
            version,
            num_examples=fields.integer("num_samples", minimum=0),
            width=width,
            layer_ids=layers,
            last=version < 4 or "stores_target_last_hidden_states" not in fields.value or _stores_last(fields),
            record_bytes=record,
            index_names=indexes,
            split=split,
            shard_names=_shards(fields),
        )
        fields.check()
        return manifest

    @property
    def value(self) -> dict[str, object]:
        """The manifest as stored."""
        return self.fields.value

    @property
    def layers(self) -> tuple[int | str, ...]:
        """Names of layers: ids, -1 for embeddings, then :data:`LAST`."""
        return layer_names(self.layer_ids, LAST if self.last else None)

    @property
    def row_bytes(self) -> int:
        """Bytes of one layer's row."""
        return self.width * ITEMSIZE

    def index_size(self) -> int:
        """Bytes of each index file."""
        return self.num_examples * self.record_bytes


def _stores_last(fields: Fields) -> bool:
    return fields.boolean("stores_target_last_hidden_states")


def _layers(fields: Fields) -> tuple[int, ...]:
    name = "target_layer_ids"
    value = fields.value.get(name)
    if not isinstance(value, list) or not value or any(type(x) is not int or not -1 <= x < 1 << 31 for x in value):
        raise fields.error(name, "a non-empty list of integers of at least -1")
    if any(a > b for a, b in itertools.pairwise(value)):
        raise fields.error(name, "ascending layers, which determine the layer of each part of the states")
    return tuple(value)


def _ranks(fields: Fields) -> tuple[tuple[str, ...], str]:
    """Index files of versions 3 and 4, one per context-parallel rank, and the split of states."""
    ranks = fields.integer("cache_context_parallel_size")
    if ranks > MOST_RANKS:
        raise fields.error("cache_context_parallel_size", f"at most {MOST_RANKS}")
    layout = fields.text("context_layout")
    if layout not in _LAYOUTS:
        raise fields.error("context_layout", " or ".join(f'"{name}"' for name in _LAYOUTS))
    names = fields.value.get("index_files")
    if not isinstance(names, list) or len(names) != ranks:
        raise fields.error("index_files", f"a list of {ranks} names, one per context-parallel rank")
    return tuple(_plain(fields, "index_files", name) for name in names), _LAYOUTS[layout]


def _shards(fields: Fields) -> tuple[str, ...]:
    names = []
    for number, shard in enumerate(fields.items("shards")):
        if shard.integer("shard_id", minimum=0) != number:
            raise shard.error("shard_id", f"{number}: shards in order")
        names.append(_plain(shard, "file_name", shard.text("file_name")))
    if len(names) != fields.integer("num_shards", minimum=0):
        raise fields.error("num_shards", f"{len(names)}, the number of shards listed")
    if len(set(names)) < len(names):
        raise fields.error("shards", "a different file_name for every shard")
    return tuple(names)


def _plain(fields: Fields, field: str, name: object) -> str:
    """A file name in the folder: the manifest must not name files outside."""
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\0" in name or "\\" in name:
        dotted = f"{fields.where}.{field}" if fields.where else field
        raise FormatError(
            f"field '{dotted}': expected the name of a file in the folder, found {show(name)}",
            path=fields.path,
            code="metadata",
        )
    return name


_LOOKED_FOR = "a folder with a manifest.json that has target_layer_ids and index_record_size"
LOST = 1 << 61
_FEW = 4096
"""At most this many rank folders of an unfinished cache are examined."""


def detect(path: Location) -> Evidence:
    """Checks for the manifest, or for the temporary folders of a writer that has not finished."""
    if path.kind() != "folder":
        return Evidence(False, _LOOKED_FOR, "a file")
    manifest = path / MANIFEST
    if manifest.kind() != "file":
        if path.lists and _writing(path):
            return Evidence(True, _LOOKED_FOR, f"the {TEMPORARY} folder of an unfinished cache")
        return Evidence(False, _LOOKED_FOR, f"no {MANIFEST}")
    value = read_json(manifest)
    if not isinstance(value, dict) or not {"target_layer_ids", "index_record_size"} <= value.keys():
        return Evidence(False, _LOOKED_FOR, f"another {MANIFEST}", near=True)
    return Evidence(True, _LOOKED_FOR, f"the {MANIFEST} of a target cache")


def _writing(path: Location) -> list[str]:
    """Names of the folders of ranks in an unfinished cache."""
    folder = path / TEMPORARY
    if folder.kind() != "folder":
        return []
    names = [entry.name for entry in folder.entries("rank_*", limit=_FEW)]
    return [name for name in names if (folder / name / "samples.local.idx").kind() == "file"]


def check_whole(path: Location) -> None:
    """Raises UnfinishedError for a cache whose writer did not finish, MissingFileError without a manifest."""
    if (path / MANIFEST).kind() is not None:
        return
    ranks = _writing(path) if path.lists else []
    if ranks:
        open_ranks = [name for name in ranks if (path / TEMPORARY / name / "summary.json").kind() is None]
        state = (
            f"{len(open_ranks)} of {len(ranks)} ranks have not finished" if open_ranks else "all ranks have finished"
        )
        raise UnfinishedError(
            f"expected {MANIFEST}, found {TEMPORARY} of a writer that is running or was interrupted: {state}. DeepSpec cannot "
            "resume it: generate the cache again",
            path=path,
        )
    raise MissingFileError(f"expected {MANIFEST}, found nothing", path=path / MANIFEST)


class TargetCache:
    """An opened cache: manifest, sizes, rows.

    Args:
        path: the cache's folder.
        faults: receives the faults of the manifest, and of the sizes of shards and index files.
    """

    def __init__(self, path: Location, faults: Faults = RAISE) -> None:
        check_whole(path)
        self.path = path
        self.manifest = Manifest.of(path, faults)
        path.look_into()
        self.shards = [path / name for name in self.manifest.shard_names]
        self.indexes = [path / name for name in self.manifest.index_names]
        self.sizes: list[int] = []
        """Sizes of shards; :data:`LOST` of a shard with a fault, so that it is one finding, not one per example."""
        for shard in self.shards:
            size = LOST
            with faults.noting(shard):
                size = shard.regular().size
            self.sizes.append(size)
        self.ranks: list[tuple[int, Location]] = []
        """Index files without faults, each with its number."""
        for rank, index in enumerate(self.indexes):
            with faults.noting(index):
                self._check_index(index)
                self.ranks.append((rank, index))

    def _check_index(self, index: Location) -> None:
        size, manifest = index.regular().size, self.manifest
        if size != manifest.index_size():
            raise FormatError(
                f"expected {manifest.index_size()} bytes ({manifest.num_examples} records of {manifest.record_bytes}), "
                f"found {size}",
                path=index,
                code="count-claim",
            )

    def native(self, options: Options) -> tuple[Rows, dict[str, Rows]]:
        """Rows of states, and of each per-token column. All share the index."""
        manifest = self.manifest
        index = IndexRecords(
            self.indexes,
            self.sizes,
            num_examples=manifest.num_examples,
            record_bytes=manifest.record_bytes,
            layers=len(manifest.layer_ids),
            row_bytes=manifest.row_bytes,
            last=manifest.last,
            split=manifest.split,
            io=options.io,
        )
        make = functools.partial(Rows.indexed, self.shards, index, io=options.io)
        states = make(column=None, width=manifest.width, dtype="BF16", descr=NUMPY_BY_NAME["BF16"])
        kinds = (("I32", np.int32), ("U8", np.uint8), ("U8", np.uint8))
        columns = {
            name: make(column=number, width=1, dtype=kind, descr=np.dtype(numpy))
            for number, (name, (kind, numpy)) in enumerate(zip(COLUMNS, kinds, strict=True))
        }
        return states, columns

    def contents(self, options: Options) -> Contents:
        """The dataset's contents, for a store."""
        manifest = self.manifest
        rows, columns = self.native(options)
        token_columns = TokenColumns(columns, manifest.num_examples, self.path.place)
        provenance_fields = (
            "version",
            "chat_template",
            "max_length",
            "min_loss_tokens",
            "git_sha",
            "source_jsonl_paths",
        )
        model = manifest.value.get("target_model_name_or_path")
        return Contents(
            format="deepspec",
            path=self.path.place,
            metadata=manifest.value,
            layers=manifest.layers,
            d_model=manifest.width,
            dtype=NUMPY_BY_NAME["BF16"],
            num_examples=manifest.num_examples,
            token_counts=lambda: self._counts(rows),
            rows=rows,
            column_names=token_columns.names,
            token_columns=token_columns.names,
            columns=token_columns.columns,
            head_columns=token_columns.head,
            column_batches=token_columns.batches,
            example_columns=token_columns.some,
            files=lambda: [shard.place for shard in self.shards],
            model=model if isinstance(model, str) else None,
            provenance={name: manifest.value[name] for name in provenance_fields if name in manifest.value},
            warnings=tuple(_repeated(manifest.layer_ids)),
        )

    def _counts(self, rows: Rows) -> NDArray[np.int64]:
        return rows.token_counts()


def _repeated(layers: Sequence[int]) -> list[Remark]:
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if not twice:
        return []
    return [Remark("layout", f"{MANIFEST} lists layers {twice} several times; repeats are named '{twice[0]} (2)'")]


def open(path: Location, options: Options) -> Contents:
    """Reads the manifest and the sizes of files."""
    return TargetCache(path).contents(options)


# Checks of DeepSpec target caches


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
