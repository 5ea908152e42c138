"""Columns that a parquet index declares as dictionaries, such as pandas' categories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import actshard


def test_damaged_codes_of_categories_are_refused_or_read_as_valid_ones(tmp_path: Path) -> None:
    """pyarrow does not hold codes against their dictionary: a cast would read beyond it."""
    with actshard.create(tmp_path / "d", "lmprobe", layers=[4], d_model=2) as writer:
        writer.append(np.ones((64, 1, 2, 2), np.float32), columns={"text": [f"t{i}" for i in range(64)]})
    part = next((tmp_path / "d").rglob("*.parquet"))
    table = pq.read_table(part)
    codes = pa.array([i % 3 for i in range(64)], pa.int32())
    table = table.append_column("category", pa.DictionaryArray.from_arrays(codes, pa.array(["aa", "b", "cc"])))
    pq.write_table(table, part, compression="none")
    data, group = part.read_bytes(), pq.ParquetFile(part).metadata.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    found = next(column for column in columns if column.path_in_schema == "category")
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
    assert actshard.open(tmp_path / "d").table["category"].to_pylist() == ["aa", "b", "cc"] * 21 + ["aa"]
