"""Small Zarr version 2 stores written without zarr, with any shape, chunks and missing chunks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np


def write_array(
    folder: Path,
    values: np.ndarray,
    chunks: tuple[int, ...],
    *,
    order: str = "C",
    separator: str | None = ".",
    fill: Any = 0,
    skip: Any = lambda at: False,
    **changed: Any,
) -> None:
    """An uncompressed array. Edge chunks are stored in full size; values outside the shape are 77."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "zarr_format": 2,
        "shape": list(values.shape),
        "chunks": list(chunks),
        "dtype": values.dtype.str,
        "compressor": None,
        "filters": None,
        "fill_value": fill,
        "order": order,
        **({"dimension_separator": separator} if separator is not None else {}),
        **changed,
    }
    (folder / ".zarray").write_text(json.dumps(meta))
    counts = [-(-n // c) for n, c in zip(values.shape, chunks, strict=True)]
    for at in itertools.product(*map(range, counts)):
        if skip(at):
            continue
        whole = np.full(chunks, 77, values.dtype)
        part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunks, strict=True))]
        whole[tuple(slice(0, n) for n in part.shape)] = part
        path = folder / (separator or ".").join(map(str, at))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole.tobytes(order=order))  # type: ignore[arg-type]


def write_store(
    path: Path, acts: np.ndarray, lengths: np.ndarray | None, chunks: tuple[int, ...], **options: Any
) -> Path:
    """A store as in the published text."""
    (path / "arrays").mkdir(parents=True)
    for group in (path, path / "arrays"):
        (group / ".zgroup").write_text('{"zarr_format": 2}')
    (path / ".zattrs").write_text(json.dumps({"schema_version": "1.0", "model_id": "test/model"}))
    write_array(path / "arrays/activations", acts, chunks, **options)
    if lengths is not None:
        write_array(path / "arrays/seq_len", lengths, (len(lengths),))
    return path


def change(path: Path, function: Any) -> None:
    """Rewrites a JSON file."""
    value = json.loads(path.read_text())
    made = function(value)
    path.write_text(json.dumps(value if made is None else made))
