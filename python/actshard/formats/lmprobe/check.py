"""Checks of lmprobe datasets; see docs/formats/lmprobe.md. lmprobe's own writer is known to violate some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard.base._arguments import many
from actshard.base._json import Fields
from actshard.base.location import Location
from actshard.formats.lmprobe.index import TOKEN_LISTS, int64_of, lists_of
from actshard.formats.lmprobe.read import LOGITS_KEYS, ROUTER_KEY, Extraction, tensor_of, tensors_in
from actshard.formats.report import Report

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.format import Tell


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks the index's metadata, the header of every tensor file and every address."""
    dataset = report.faults.parse(root, lambda: Extraction(root, "auto"))
    if dataset is None:
        return
    index = dataset.parts[0]
    listed_files: set[Location] = set()
    if (hidden := report.faults.parse(index, lambda: dataset.hidden)) is not None:
        with report.noting(index):
            _check_hidden(dataset, hidden, listed_files, report, tell)
    if (logits := report.faults.parse(index, lambda: dataset.logits_fields)) is not None:
        with report.noting(index):
            _check_logits(dataset, logits, listed_files, report)
    if (router := report.faults.parse(index, lambda: dataset.router_fields)) is not None:
        with report.noting(index):
            _check_router(dataset, router, listed_files, report)
    with report.noting(index):
        _check_columns(dataset, report)
        _check_texts(dataset, report)
    folder = dataset.root / "tensors"
    if folder.kind() == "folder" and folder.lists:
        for entry in folder.entries("*.safetensors"):
            path = folder / entry.name
            if path not in listed_files:
                report.add("unlisted-file", path, "a tensor file that no descriptor lists")


def _tensors(path: Location, report: Report, listed_files: set[Location]) -> dict[str, tuple[str, list[int]]] | None:
    """Dtypes and shapes of a file's tensors. If they cannot be read, adds a finding and returns None."""
    listed_files.add(path)
    report.count("files")
    with report.noting(path):
        tensors = tensors_in(path)
        report.count("bytes", path.stat().size)
        return tensors
    return None


def _check_tensor(
    path: Location, key: str, tensors: dict[str, tuple[str, list[int]]] | None, rows: int, report: Report
) -> tuple[str, int] | None:
    """Checks a 2-D tensor with this number of rows. Returns its dtype and width."""
    if tensors is not None:
        with report.noting(path):
            dtype, shape = tensor_of(path, tensors, key, "width")
            if shape[0] != rows:
                report.add("tensor", path, f"{shape[0]} rows", f"{rows}, as in the descriptor", f"tensor '{key}'")
            return dtype, shape[1]
    return None


def _claims(
    fields: Fields, tensors: Sequence[tuple[str, int]], width_field: str, row_bytes: int | None, report: Report
) -> None:
    """Compares a descriptor's fields with the headers of its files."""
    if not tensors:
        return
    if len(set(tensors)) > 1:
        report.add(
            "tensor",
            fields.path,
            f"{sorted(set(tensors))[:4]}",
            "one dtype and width in all files",
            f"field '{fields.where}'",
        )
    dtype, width = tensors[0]
    from actshard.base._arguments import NUMPY_BY_NAME

    real = NUMPY_BY_NAME.get(dtype)
    claimed = fields.value.get("dtype")
    if real is not None and claimed is not None and claimed != str(real):
        report.add("dtype-claim", fields.path, str(real), str(claimed), f"field '{fields.where}.dtype'")
    if width_field != "dim" and fields.has(width_field) and fields.value[width_field] != width:
        field = f"field '{fields.where}.{width_field}'"
        report.add("count-claim", fields.path, width, f"{fields.value[width_field]}", field)
    if real is not None and fields.has("row_bytes"):
        true = width * real.itemsize if row_bytes is None else row_bytes
        if fields.value["row_bytes"] != true:
            report.add(
                "row-bytes-claim",
                fields.path,
                true,
                f"{fields.value['row_bytes']}",
                f"field '{fields.where}.row_bytes'",
            )


def _check_hidden(dataset: Extraction, fields: Fields, listed_files: set[Location], report: Report, tell: Tell) -> None:
    layers = fields.integers("layers")
    full = fields.value.get("storage") == "full_sequence"
    shards = fields.items("shards")
    prompts = [s.integer("num_prompts", minimum=0) for s in shards]
    lasts = fields.integer("last_token_shards", minimum=0) if full and fields.has("last_token_shards") else len(shards)
    counts = [
        s.integer("num_tokens", minimum=0) if full and s.has("num_tokens") else p
        for s, p in zip(shards, prompts, strict=True)
    ]
    file = dataset.pattern(fields, "file_pattern", layers, len(shards))
    key = dataset.pattern(fields, "key_pattern", layers, 1)
    tensors: list[tuple[str, int]] = []
    count = 0
    for layer in layers:
        for shard, rows in enumerate(counts):
            count += 1
            tell("files", count, len(layers) * len(counts))
            path = dataset.inside(fields, file(layer, shard))
            if rows == 0:
                listed_files.add(path)
                continue
            tensor = _check_tensor(path, key(layer, 0), _tensors(path, report, listed_files), rows, report)
            if tensor is not None:
                tensors.append(tensor)
    _claims(fields, tensors, "dim", None, report)
    if sum(prompts[:lasts]) != dataset.num_rows:
        report.add(
            "count-claim",
            fields.path,
            sum(prompts[:lasts]),
            f"{dataset.num_rows} prompts, as the index has",
            f"field '{fields.where}.shards'",
        )
    _check_addresses(dataset, counts, lasts, full, report, tell)


class _AddressCheck:
    """Checks that the addresses in an extraction's index are in range and unique, and cover all rows."""

    def __init__(self, dataset: Extraction, counts: list[int], lasts: int, report: Report) -> None:
        self.dataset, self.report, self.lasts = dataset, report, lasts
        self.counts = counts
        self.wide = np.asarray(counts, np.int64)
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.times = np.zeros(int(self.starts[-1]), np.uint8)
        """How often each row is addressed, capped at 255."""

    def place(
        self,
        shard: NDArray[np.int64],
        row: NDArray[np.int64],
        numbers: NDArray[np.int64],
        what: str,
        part: Location,
        most: int,
    ) -> NDArray[np.int64]:
        """Returns row numbers. Addresses out of range are reported and become -1."""
        in_range = (shard >= 0) & (shard < most)
        in_range &= (row >= 0) & (row < np.where(in_range, self.wide[np.where(in_range, shard, 0)], 0))
        if not in_range.all():
            i = int(np.flatnonzero(~in_range)[0])
            limit = self.counts[shard[i]] if 0 <= shard[i] < len(self.counts) else 0
            self.report.add(
                "address-out-of-range",
                part,
                f"shard {shard[i]}, row {row[i]} ({int((~in_range).sum())} such {what})",
                f"one of {most} shards, a row below {limit}" if 0 <= shard[i] < most else f"a shard below {most}",
                f"row {numbers[i]}",
            )
        return np.where(in_range, self.starts[np.where(in_range, shard, 0)] + row, -1)

    def has_counts(self) -> bool:
        """Whether there is a comparable column of token counts."""
        import pyarrow as pa

        if self.dataset.names.count("num_tokens") != 1:
            return False
        kind = self.dataset.schema.field("num_tokens").type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind):
            return True
        self.report.add("column-type", self.dataset.parts[0], str(kind), "integers", "column 'num_tokens'")
        return False

    def last_tokens(self, part: Location, row: int, batch: pa.RecordBatch) -> None:
        """Checks a batch of the index with addresses of last tokens only."""
        shard, offset = (int64_of(batch.column(name), name, part, row) for name in ("shard_index", "row_offset"))
        numbers = np.arange(row, row + batch.num_rows)
        _count(self.times, self.place(shard, offset, numbers, "last tokens", part, self.lasts))

    def all_tokens(self, part: Location, row: int, batch: pa.RecordBatch) -> None:
        """Checks a batch of the index with addresses of all tokens."""
        shard, offset = (int64_of(batch.column(name), name, part, row) for name in ("shard_index", "row_offset"))
        numbers = np.arange(row, row + batch.num_rows)
        last = self.place(shard, offset, numbers, "last tokens", part, self.lasts)
        id_ends, ids = lists_of(batch.column(TOKEN_LISTS[0]), TOKEN_LISTS[0], part, row)
        at_ends, rows = lists_of(batch.column(TOKEN_LISTS[1]), TOKEN_LISTS[1], part, row)
        lengths = np.diff(id_ends)
        if (np.diff(at_ends) != lengths).any():
            i = int(np.flatnonzero(np.diff(at_ends) != lengths)[0])
            actual, expected = f"{int(np.diff(at_ends)[i])} offsets", f"{int(lengths[i])}, one per shard id"
            self.report.add("token-count", part, actual, expected, f"row {row + i}")
            return
        self.lengths(part, row, batch, lengths)
        tokens = self.place(ids, rows, np.repeat(numbers, lengths), "tokens", part, len(self.counts))
        empty = lengths == 0
        _count(self.times, tokens)
        _count(self.times, last[empty])
        ends = id_ends[1:][~empty] - 1
        differs = tokens[ends] != last[~empty]
        if differs.any():
            i = int(np.flatnonzero(~empty)[np.flatnonzero(differs)[0]])
            self.report.add(
                "last-token-address",
                part,
                f"another address in the token lists ({int(differs.sum())} such rows)",
                f"shard {shard[i]}, row {offset[i]}",
                f"row {row + i}",
            )

    def lengths(self, part: Location, row: int, batch: pa.RecordBatch, lengths: NDArray[np.int64]) -> None:
        """Compares the number of addresses of each row with its token count."""
        if "num_tokens" in batch.schema.names:
            counts = batch.column("num_tokens").to_numpy(zero_copy_only=False).astype(np.float64)
            wrong = ~np.isnan(counts) & (counts != lengths)
            if wrong.any():
                i = int(np.flatnonzero(wrong)[0])
                actual = f"{int(lengths[i])} addresses ({int(wrong.sum())} such rows)"
                self.report.add("token-count", part, actual, f"num_tokens = {int(counts[i])}", f"row {row + i}")
        empty = lengths == 0
        if empty.any():
            actual = f"{int(empty.sum())} examples without tokens"
            self.report.add("zero-token-example", part, actual, "", f"row {row + int(np.flatnonzero(empty)[0])}")

    def coverage(self) -> None:
        """Reports rows with several addresses or none."""
        for code, what in (("address-overlap", self.times > 1), ("unaddressed-rows", self.times == 0)):
            if what.any():
                first = int(np.flatnonzero(what)[0])
                shard_of = int(np.searchsorted(self.starts, first, "right")) - 1
                expected = "one address for every row" if code == "address-overlap" else "an address for every row"
                self.report.add(
                    code,
                    self.dataset.parts[0],
                    f"{int(what.sum())} rows with {'several' if code == 'address-overlap' else 'none'}",
                    expected,
                    f"shard {shard_of}, row {first - int(self.starts[shard_of])}",
                )


def _check_addresses(
    dataset: Extraction, counts: list[int], lasts: int, full: bool, report: Report, tell: Tell
) -> None:
    names = ["shard_index", "row_offset", *(TOKEN_LISTS if full else ())]
    if any(dataset.names.count(name) != 1 for name in names):
        return  # reported by opening
    addresses = _AddressCheck(dataset, counts, lasts, report)
    count = 0
    for part, row, batch in dataset.batches([*names, *(["num_tokens"] if addresses.has_counts() else [])]):
        tell("addresses", count, dataset.num_rows)
        (addresses.all_tokens if full else addresses.last_tokens)(part, row, batch)
        count += batch.num_rows
    report.count("addresses", count)
    addresses.coverage()


def _count(times: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
    rows = rows[rows >= 0]
    if not rows.size:
        return
    unique, n = np.unique(rows, return_counts=True)
    times[unique] = np.minimum(times[unique].astype(np.int64) + n, 255).astype(np.uint8)


def _check_logits(dataset: Extraction, fields: Fields, listed_files: set[Location], report: Report) -> None:
    shards = fields.items("shards")
    counts = [s.integer("num_prompts", minimum=0) for s in shards]
    values: list[tuple[str, int]] = []
    for path, rows in zip(dataset.files_of(fields, len(shards)), counts, strict=True):
        tensors = _tensors(path, report, listed_files)
        pair = next((p for p in LOGITS_KEYS if tensors is not None and tensors.keys() >= set(p)), LOGITS_KEYS[0])
        logit_tensors = [_check_tensor(path, key, tensors, rows, report) for key in pair]
        if logit_tensors[0] is not None and logit_tensors[1] is not None:
            values.append(logit_tensors[0])
            if logit_tensors[0][1] != logit_tensors[1][1]:
                report.add(
                    "tensor",
                    path,
                    f"{logit_tensors[1][1]} indices",
                    f"{logit_tensors[0][1]}, one per value",
                    f"tensor '{pair[1]}'",
                )
    if values:
        from actshard.base._arguments import NUMPY_BY_NAME

        kind = NUMPY_BY_NAME.get(values[0][0])
        _claims(fields, values, "k", None if kind is None else values[0][1] * (kind.itemsize + 4), report)
    columns = dataset.logits_columns
    if any(name not in dataset.names for name in columns):
        report.add("metadata", dataset.parts[0], "neither column", f"columns {columns[0]} and {columns[1]}")
        return
    if any(dataset.names.count(name) > 1 for name in columns):
        return  # reported by _check_columns
    for part, row, batch in dataset.batches(list(columns)):
        shard, offset = (int64_of(batch.column(name), name, part, row) for name in columns)
        in_range = (shard >= 0) & (shard < len(counts))
        in_range &= (offset >= 0) & (offset < np.asarray([*counts, 0])[np.where(in_range, shard, -1)])
        if not in_range.all():
            i = int(np.flatnonzero(~in_range)[0])
            report.add(
                "address-out-of-range",
                part,
                f"{columns[0]} {shard[i]}, {columns[1]} {offset[i]}",
                f"a row of {len(counts)} shards",
                f"row {row + i}",
            )


def _check_router(dataset: Extraction, fields: Fields, listed_files: set[Location], report: Report) -> None:
    layers = fields.integers("layers")
    counts = [s.integer("num_prompts", minimum=0) for s in fields.items("shards")]
    key = dataset.pattern(fields, "key_pattern", layers, 1, default=ROUTER_KEY)
    if sum(counts) != dataset.num_rows:
        report.add(
            "count-claim", fields.path, sum(counts), f"{dataset.num_rows} prompts", f"field '{fields.where}.shards'"
        )
    all_tensors = []
    for path, rows in zip(dataset.files_of(fields, len(counts)), counts, strict=True):
        tensors = _tensors(path, report, listed_files)
        layer_tensors = [_check_tensor(path, key(layer, 0), tensors, rows, report) for layer in layers]
        all_tensors += [tensor for tensor in layer_tensors if tensor is not None]
    _claims(fields, all_tensors, "num_experts", None, report) if not fields.has("row_bytes") else None


def _check_columns(dataset: Extraction, report: Report) -> None:
    """Checks for duplicate columns, and for list columns with the wrong type, which lmprobe infers from the first row."""
    import pyarrow as pa

    for name in sorted({name for name in dataset.names if dataset.names.count(name) > 1}):
        report.add("format", dataset.parts[0], "a duplicate column", "unique column names", f"column '{name}'")
    for field in dataset.schema:
        if (
            field.name in ("token_perplexity", "token_ids")
            and pa.types.is_list(field.type)
            and pa.types.is_string(field.type.value_type)
        ):
            report.add(
                "column-type", dataset.parts[0], "lists of strings", "lists of numbers", f"column '{field.name}'"
            )


def _check_texts(dataset: Extraction, report: Report) -> None:
    """Checks that texts are unique. lmprobe finds rows by text; for equal texts it reads the rows of the last prompt."""
    if dataset.names.count("text") != 1:
        return
    import pyarrow as pa

    hashes: list[NDArray[np.int64]] = []
    for table in dataset.column_batches(["text"]):
        for chunk in table["text"].chunks:
            coded = pa.types.is_dictionary(chunk.type)
            values = _hashes((chunk.dictionary if coded else chunk).to_pylist())
            if coded:
                indices = chunk.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)
                values = np.append(values, hash(repr(None)))[indices]
            hashes.append(values)
    all_hashes = np.concatenate(hashes) if hashes else np.zeros(0, np.int64)
    _, first, times = np.unique(all_hashes, return_index=True, return_counts=True)
    repeats = len(all_hashes) - len(first)
    if repeats:
        row = int(first[times > 1].min())
        report.add(
            "duplicate-text",
            dataset.parts[0],
            f"{many(repeats, 'prompt')} with the text of another prompt, the first in row {row}",
            "unique texts",
            "column 'text'",
        )


def _hashes(values: list[object]) -> NDArray[np.int64]:
    return np.fromiter((hash(v if isinstance(v, str) else repr(v)) for v in values), np.int64, len(values))
