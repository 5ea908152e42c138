"""Writes Arrow directories as ``datasets.Dataset.save_to_disk`` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa


def written(folder: Path, tables: list[list[pa.RecordBatch]], **state: Any) -> Path:
    """A directory with a stream of batches per file, as ``save_to_disk`` writes it."""
    folder.mkdir(exist_ok=True)
    names = [f"data-{i:05}-of-{len(tables):05}.arrow" for i in range(len(tables))]
    for name, batches in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as stream:
            for batch in batches:
                stream.write_batch(batch)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train", **state}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def with_null(folder: Path) -> Path:
    """A directory with two vectors and a null."""
    batch = pa.record_batch({"acts": pa.array([[1.0, 2.0], None, [4.0, 3.0]], pa.list_(pa.float32(), 2))})
    return written(folder / "d", [[batch]])


def unended(folder: Path) -> Path:
    """A directory whose only file lacks its end marker."""
    batch = pa.record_batch({"acts": pa.array([[1.0, 2.0], [4.0, 3.0]], pa.list_(pa.float32(), 2))})
    file = written(folder / "d", [[batch]]) / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:-8])
    return file.parent
