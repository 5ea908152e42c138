"""Writes Arrow directories as ``datasets.Dataset.save_to_disk`` does."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
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


def enlarged(
    folder: Path, batch: pa.RecordBatch, numbers: Mapping[int, int], pieces: Mapping[int, bytes], size: int
) -> Path:
    """A directory with one batch that claims other sizes, in a sparse file.

    Args:
        numbers: numbers of the batch's header to replace, each of which it contains.
        pieces: bytes of the body, by their offset in it.
        size: bytes of the body.
    """
    folder.mkdir()
    message = batch.serialize().to_pybytes()
    (length,) = struct.unpack_from("<i", message, 4)
    header = bytearray(message[: 8 + length])
    for old, new in numbers.items():
        places = [at for at in range(8, len(header) - 7, 8) if struct.unpack_from("<q", header, at)[0] == old]
        assert places, f"the header lacks {old}"
        for at in places:
            struct.pack_into("<q", header, at, new)
    schema = batch.schema.serialize().to_pybytes()
    begin = len(schema) + len(header)
    with (folder / "data-00000-of-00001.arrow").open("wb") as file:
        file.write(schema + header)
        for at, data in pieces.items():
            file.seek(begin + at)
            file.write(data)
        file.seek(begin + size)
        file.write(b"\xff\xff\xff\xff\0\0\0\0")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def shared_names(columns: int, name: str) -> bytes:
    """A stream without batches whose columns share one copy of a name."""
    fields = [pa.field(name if i == 0 else str(i), pa.int8()) for i in range(columns)]
    message = bytearray(pa.schema(fields).serialize().to_pybytes())

    def follow(at: int) -> int:
        return at + struct.unpack_from("<I", message, at)[0]

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", message, table)[0]
        return table + struct.unpack_from("<H", message, vtable + 4 + 2 * number)[0]

    # The first column was written first, which is at the end: references lead forward.
    schema = follow(field(follow(8), 2))
    vector = follow(field(schema, 1)) + 4
    names = [field(follow(vector + 4 * i), 0) for i in range(columns)]
    longest = follow(names[0])
    for at in names[1:]:
        struct.pack_into("<I", message, at, longest - at)
    return bytes(message) + struct.pack("<Ii", 0xFFFFFFFF, 0)
