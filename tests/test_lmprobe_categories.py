"""Columns declared as dictionaries in a parquet index, such as pandas categories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actshard


@pytest.mark.parametrize("nested", [False, True])
def test_damaged_codes_of_categories_are_refused_or_read_as_valid_ones(tmp_path: Path, nested: bool) -> None:
    """pyarrow does not check codes against their dictionary: a cast would read out of bounds; in lists it crashed the process."""
    with actshard.create(tmp_path / "d", "lmprobe", layers=[4], d_model=2) as writer:
        writer.append(np.ones((64, 1, 2, 2), np.float32), columns={"text": [f"t{i}" for i in range(64)]})
    part = next((tmp_path / "d").rglob("*.parquet"))
    table = pq.read_table(part)
    codes = pa.array([i % 3 for i in range(64)], pa.int32())
    column = pa.DictionaryArray.from_arrays(codes, pa.array(["aa", "b", "cc"]))
    if nested:
        column = pa.ListArray.from_arrays(pa.array(range(65), pa.int32()), column)
    table = table.append_column("category", column)
    pq.write_table(table, part, compression="none")
    data, group = part.read_bytes(), pq.ParquetFile(part).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    found = next(column for column in columns if column.path_in_schema.startswith("category"))
    refused = 0
    for at in range(found.data_page_offset, found.data_page_offset + found.total_compressed_size):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        part.write_bytes(damaged)
        try:
            actshard.open(tmp_path / "d").table["category"].validate(full=True)
        except actshard.ActshardError:
            refused += 1
    assert refused
    part.write_bytes(data)
    wanted = ["aa", "b", "cc"] * 21 + ["aa"]
    assert actshard.open(tmp_path / "d").table["category"].to_pylist() == ([[w] for w in wanted] if nested else wanted)
