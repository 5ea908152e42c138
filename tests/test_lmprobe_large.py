"""Indexes that are large compared with memory are read in pieces, with the values that pyarrow reads at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actshard
from actshard.formats.lmprobe import index as room
from actshard.formats.lmprobe.index import Index
from actshard.location import Location
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
