"""Indexes that are large compared with memory are read in pieces, with the values that pyarrow reads at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import actshard
from actshard.base.containers import read_footer
from actshard.base.location import Location
from actshard.formats.lmprobe import index as pages
from actshard.formats.lmprobe import index as room
from actshard.formats.lmprobe.index import Index
from conftest import rewrite_index
from lmprobe_files import LISTS, Copy, check, put


class Recorded(pq.ParquetFile):  # type: ignore[misc] -- pyarrow has no types
    """A file that keeps the arguments of its reads."""

    reads: list[dict[str, Any]]

    def iter_batches(self, **given: Any) -> Any:
        Recorded.reads.append(given)
        return super().iter_batches(**given)


def large(path: Path) -> None:
    """60,000 prompts x 100 tokens at addresses that do not compress: 8 bytes each, in three row groups."""

    def change(table: pa.Table, meta: dict[str, Any]) -> pa.Table:
        n, tokens = 60_000, 100
        ends = pa.array(np.arange(n + 1, dtype=np.int32) * tokens)
        table = table.take(pa.array(np.arange(n) % len(table)))
        for name in LISTS:
            values = np.random.default_rng(0).integers(0, 1 << 60, n * tokens)
            table = put(table, name, pa.ListArray.from_arrays(ends, pa.array(values)))
        return table

    rewrite_index(path, change)
    part = next(path.rglob("*.parquet"))
    pq.write_table(pq.read_table(part), part, row_group_size=20_000)


def test_reading_an_index_allocates_no_more_for_a_longer_file(
    lmprobe_copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow reads the columns of all row groups before the first batch, unless it is told not to: 3 GB of 10 million prompts."""
    path = lmprobe_copy("fullseq_f32")
    large(path)
    index = Index(Location.of(path))
    monkeypatch.setattr(room, "_BATCH_VALUES", 1 << 14)
    before, most, rows = pa.total_allocated_bytes(), 0, 0
    for _, first, batch in index.batches(LISTS):
        assert first == rows
        assert batch.num_rows <= (1 << 14) // 100
        rows += batch.num_rows
        most = max(most, pa.total_allocated_bytes() - before)
    assert rows == 60_000
    assert index.parts[0].stat().size > 60 << 20
    assert most < 16 << 20


@pytest.mark.parametrize(("ahead", "reads"), [(1, 4), (1 << 30, 1)])
def test_a_store_is_asked_for_a_few_row_groups_at_once(
    lmprobe_copy: Copy, monkeypatch: pytest.MonkeyPatch, ahead: int, reads: int
) -> None:
    path = lmprobe_copy("fullseq_f32")
    part = next(path.rglob("*.parquet"))
    whole = pq.read_table(part)
    pq.write_table(whole, part, row_group_size=8)
    files = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
    monkeypatch.setattr(room, "_AHEAD", ahead)
    monkeypatch.setattr(pq, "ParquetFile", Recorded)
    names = ["text", *LISTS]
    for location, expected in ((Location.in_memory(files, "store"), reads), (Location.of(path), 1)):
        Recorded.reads = []
        tables = list(Index(location).column_batches(names, 5))
        assert pa.concat_tables(tables).equals(whole.select(names).replace_schema_metadata(None))
        assert len(Recorded.reads) == expected
    # Row groups of any size give the same addresses.
    for size in (1, 3, 28):
        pq.write_table(whole, part, row_group_size=size)
        check(actshard.open(path), "fullseq_f32")


# -- texts -----------------------------------------------------------------------------------------------------------

TEXTS = {
    "distinct": [f"text {i}" for i in range(3_000)],
    "repeated": ["a", "bcd", "", "efgh"] * 750,
    "nulls": [None if i % 3 else f"ä{i}" for i in range(3_000)],
    "nothing": [None] * 3_000,
    "empty": [""] * 3_000,
    "first null": [None, *(f"t{i % 7}" for i in range(2_999))],
}
"""Values of a column. All are far below the size up to which texts are decoded."""

WRITTEN: list[dict[str, Any]] = [
    {},
    {"data_page_size": 100, "write_batch_size": 10},
    {"data_page_version": "2.0", "data_page_size": 1_000, "write_batch_size": 10},
    {"use_dictionary": False, "compression": "zstd"},
    {"dictionary_pagesize_limit": 64, "data_page_size": 256, "write_batch_size": 8, "row_group_size": 700},
    {"compression": "none", "row_group_size": 1},
    {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary()], ids=str)
@pytest.mark.parametrize("written", range(len(WRITTEN)))
@pytest.mark.parametrize("texts", TEXTS)
def test_the_bound_of_texts_is_never_less_than_their_size(tmp_path: Path, texts: str, written: int, kind: Any) -> None:
    table = pa.table({"n": range(3_000), "text": pa.array(TEXTS[texts], pa.string()).cast(kind)})
    pq.write_table(table, tmp_path / "t.parquet", **WRITTEN[written])
    part = Location.of(tmp_path / "t.parquet")
    with part.arrow() as source:
        found = pages.decoded_at_most(part, source, read_footer(part), "text")
    size = sum(len((text or "").encode()) for text in TEXTS[texts])
    if "column_encoding" in WRITTEN[written]:
        assert found is None
    else:
        assert found is not None
        assert size <= found <= (256 << 10) + 10 * size


def test_texts_are_read_as_dictionaries_only_if_they_might_not_fit(
    lmprobe_copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lmprobe_copy("fullseq_f32", lambda t, _: put(t, "other", ["é" * 9] * len(t)))
    asked: list[list[str]] = []
    read = pq.read_table

    def recorded(*given: Any, **named: Any) -> Any:
        asked.append(named["read_dictionary"])
        return read(*given, **named)

    monkeypatch.setattr(pq, "read_table", recorded)
    index = Index(Location.of(path))
    plain = index.columns(["other", "text"])
    monkeypatch.setattr(room, "decoded_at_most", lambda *_: None)
    assert index.columns(["other", "text"]).equals(plain)
    assert asked == [[], ["other", "text"]]
    assert plain.schema.types == [pa.string(), pa.string()]


def test_a_long_text_repeated_has_a_bound_of_all_its_copies(tmp_path: Path) -> None:
    n = 20_000
    coded = pa.DictionaryArray.from_arrays(pa.array(np.arange(n) % 2, pa.int32()), pa.array(["x" * 100_000, "y"]))
    pq.write_table(pa.table({"text": coded}), tmp_path / "t.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "t.parquet").stat().st_size < 20_000
    part = Location.of(tmp_path / "t.parquet")
    with part.arrow() as source:
        assert pages.decoded_at_most(part, source, read_footer(part), "text") == n * 100_000


@pytest.mark.slow
def test_damaged_pages_have_no_bound_or_one_above_what_is_read(tmp_path: Path) -> None:
    part = tmp_path / "t.parquet"
    texts = [f"t{i % 5}" for i in range(200)] + [f"u{i}" for i in range(200)]
    pq.write_table(pa.table({"text": texts}), part, compression="none", dictionary_pagesize_limit=200, data_page_size=256,
                   write_batch_size=16)  # fmt: skip
    data, about = part.read_bytes(), pq.ParquetFile(part).metadata.row_group(0).column(0)
    unbounded = 0
    for at in range(about.dictionary_page_offset, about.dictionary_page_offset + about.total_compressed_size):
        for flip in (0xFF, 0x04, 0x02):
            damaged = bytearray(data)
            damaged[at] ^= flip
            source = pa.BufferReader(bytes(damaged))
            part.write_bytes(damaged)
            try:
                found = pages.decoded_at_most(Location.of(part), source, read_footer(Location.of(part)), "text")
            except (pa.ArrowException, OSError, ValueError):
                continue
            unbounded += found is None
            try:
                table = pq.read_table(source)
            except (pa.ArrowException, OSError):
                continue
            assert found is None or sum(pc.binary_length(table["text"]).to_pylist()) <= found
    assert unbounded


def test_text_that_is_not_utf_8_is_refused(lmprobe_copy: Copy) -> None:
    path = lmprobe_copy("fullseq_f32", lambda t, _: put(t, "text", ["abcabc"] * len(t)))
    part = next(path.rglob("*.parquet"))
    pq.write_table(pq.read_table(part), part, compression="none", write_statistics=False)
    data = part.read_bytes()
    assert data.count(b"abcabc") == 1
    part.write_bytes(data.replace(b"abcabc", b"abc\xffbc"))
    with pytest.raises(actshard.FormatError, match="cannot read columns"):
        actshard.open(path).read_columns(["text"])


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x15\x04",  # ends
        b"\x15" + b"\x80" * 9 + b"\x01\x00",  # a number of more than 32 bits
        b"\x05\x02\x00\x00",  # a field number that is not relative
        b"\x19\x00\x00",  # a list
        b"\x1c" * 9 + b"\x00" * 9,  # structs in structs
        b"\x18\xff\xff\xff\xff\x07\x00",  # a text of 2 GiB
    ],
)
def test_headers_unlike_those_of_writers_have_no_bound(tmp_path: Path, header: bytes) -> None:
    part = Location.of(tmp_path / "t.parquet")
    pq.write_table(pa.table({"text": ["a", "b"] * 20}), part.local, compression="none")
    chunk = read_footer(part).group(0).column(0)
    data = bytearray(part.local.read_bytes())
    begin = chunk.dictionary_page_offset
    assert begin is not None
    header = header.ljust(chunk.total_compressed_size, b"\x15")
    data[begin : begin + len(header)] = header
    part.local.write_bytes(data)
    with part.arrow() as source:
        assert pages.decoded_at_most(part, source, read_footer(part), "text") is None
