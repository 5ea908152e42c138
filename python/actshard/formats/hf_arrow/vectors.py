"""Columns of vectors: which of a table's columns are layers, and the byte offsets of their rows.

.. code-block:: text

    list<list<float>>, list<fixed_size_list<float>[d]>     one sequence of tokens per row; Array2D is the first
    list<float>, fixed_size_list<float>[d]                 one vector per row

The values of a batch are one buffer. They are rows of ``d`` elements if consecutive offsets of the innermost lists differ by ``d``.
The offsets of the first row are read here; the core checks the others when it first reads the batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actshard.base.errors import FormatError
from actshard.formats.hf_arrow.streams import Batch, Column, StreamFile

FLOATS = {"float16": "F16", "float32": "F32", "float64": "F64"}
_LISTS = ("list", "large_list", "fixed_size_list")
_EXTENSION = "ARROW:extension:metadata"

Even = tuple[int, int, bool, int, int]
"""List offsets to check: byte offset, count, whether they have 64 bits, the first value, the difference of neighbours."""


@dataclass(frozen=True)
class Vectors:
    """A column whose values are vectors."""

    column: Column
    levels: tuple[Column, ...]
    """The list types, outermost first: one for a vector per row, two for a sequence per row."""
    leaf: Column
    width: int | None
    """d_model, if the type or the features specify it."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The stored dtype."""
        return np.dtype(self.leaf.type).newbyteorder("<")


def _levels_of(column: Column) -> tuple[list[Column], Column]:
    """The list types of a column, outermost first, and the type of their values."""
    levels: list[Column] = []
    leaf = column
    while leaf.type in _LISTS:
        levels.append(leaf)
        leaf = leaf.children[0]
    return levels, leaf


def is_deeper(column: Column) -> bool:
    """Whether a column has floats with more axes than a sequence of vectors."""
    levels, leaf = _levels_of(column)
    return leaf.type in FLOATS and len(levels) > 2


def vectors_of(column: Column, features: object) -> Vectors | None:
    """The vectors of a column; None for a column of anything else."""
    levels, leaf = _levels_of(column)
    if leaf.type not in FLOATS or not 1 <= len(levels) <= 2:
        return None
    width = levels[-1].sizes[0] if levels[-1].type == "fixed_size_list" else None
    if width is None:
        width = _declared_width(column, features, len(levels))
    return Vectors(column, tuple(levels), leaf, width)


def _declared_width(column: Column, features: object, levels: int) -> int | None:
    """The last dimension according to the extension type, or else to the features."""
    shape: object = None
    if _EXTENSION in column.metadata:
        try:
            declared = json.loads(column.metadata[_EXTENSION])
            shape = declared[0] if isinstance(declared, list) and declared else None
        except (ValueError, RecursionError):
            shape = None
    elif isinstance(features, dict) and isinstance(features.get(column.name), dict):
        shape = features[column.name].get("shape")
    if isinstance(shape, list) and len(shape) == levels and type(shape[-1]) is int and shape[-1] > 0:
        return shape[-1]
    return None


@dataclass
class Piece:
    """The rows of one column in one batch."""

    start: int
    """Byte offset of the first."""
    rows: int
    lengths: NDArray[np.int64]
    """Tokens of each row of the table."""
    void: NDArray[np.int64]
    """Rows of the table that are null or contain a null."""
    even: list[Even]


def pieces_of(file: StreamFile, vectors: Vectors, width: int | None) -> tuple[list[Piece], int | None]:
    """The rows of a column in each batch of a file, and d_model: ``width``, or if that is None, found in the first row."""
    pieces: list[Piece] = []
    offsets = _outer(file, vectors)
    for batch, outer in zip(file.batches, offsets, strict=True):
        piece, width = _piece(file, batch, vectors, outer, width)
        pieces.append(piece)
    return pieces, width


def _outer(file: StreamFile, vectors: Vectors) -> list[NDArray[np.int64]]:
    """For each batch, the number of the first vector of each table row, and at the end the number of vectors."""
    if len(vectors.levels) == 1:
        return [np.arange(batch.rows + 1, dtype=np.int64) for batch in file.batches]
    outer, inner = vectors.levels
    if outer.type == "fixed_size_list":
        return [np.arange(batch.rows + 1, dtype=np.int64) * outer.sizes[0] for batch in file.batches]
    dtype = np.dtype("<i8" if outer.wide else "<i4")
    ranges = [
        (_offsets_at(file, batch, outer, 0, batch.rows + 1), batch.rows + 1 if batch.rows else 0, dtype)
        for batch in file.batches
    ]
    batch_ends = []
    for batch, (offset, _, _), values in zip(file.batches, ranges, file.read(ranges), strict=True):
        ends = values.astype(np.int64) if len(values) else np.zeros(1, np.int64)
        falls = np.flatnonzero(np.diff(ends) < 0)
        if ends[0] < 0 or len(falls) or ends[-1] > batch.nodes[inner.node][0]:
            where = int(falls[0]) + 1 if len(falls) else 0 if ends[0] < 0 else len(ends) - 1
            raise FormatError(
                f"column {vectors.column.name!r}: expected ascending offsets up to {batch.nodes[inner.node][0]}, found "
                f"{ends[where]}",
                path=file.path,
                offset=offset + where * dtype.itemsize,
            )
        batch_ends.append(ends)
    return batch_ends


def _offsets_at(file: StreamFile, batch: Batch, column: Column, first: int, count: int) -> int:
    """Byte offset of a list column's offsets, after a check that the buffer contains them."""
    offset, size = batch.buffers[column.buffer + 1]
    item = 8 if column.wide else 4
    if (first + count) * item > size and batch.rows:
        raise FormatError(
            f"column {column.name!r}: expected {first + count} offsets of {item} bytes, found {size} bytes",
            path=file.path,
            offset=offset,
        )
    return offset + first * item


def _piece(
    file: StreamFile, batch: Batch, vectors: Vectors, outer: NDArray[np.int64], width: int | None
) -> tuple[Piece, int | None]:
    inner = vectors.levels[-1]
    first, rows = int(outer[0]), int(outer[-1] - outer[0])
    even: list[Even] = []
    value = 0
    if rows and inner.type == "fixed_size_list":
        width = inner.sizes[0]
        value = first * width
    elif rows:
        offset = _offsets_at(file, batch, inner, first, rows + 1)
        dtype = np.dtype("<i8" if inner.wide else "<i4")
        bounds = file.read([(offset, 2, dtype)])[0].tolist()
        value = bounds[0]
        if value < 0 or bounds[1] < value:
            raise FormatError(
                f"column {vectors.column.name!r}: expected ascending offsets, found {bounds}",
                path=file.path,
                offset=offset,
            )
        if width is None:
            width = bounds[1] - bounds[0]
        even.append((offset, rows + 1, inner.wide, value, width))
    offset, size = batch.buffers[vectors.leaf.buffer + 1]
    item = vectors.dtype.itemsize
    if rows:
        assert width is not None
        if width == 0:
            raise FormatError(f"column {vectors.column.name!r}: expected vectors, found empty lists", path=file.path)
        values = batch.nodes[vectors.leaf.node][0]
        if value + rows * width > values or (value + rows * width) * item > size:
            raise FormatError(
                f"column {vectors.column.name!r}: expected {rows} vectors of {width} values from value {value} on, found "
                f"{min(values, size // item)} values",
                path=file.path,
                offset=offset,
            )
    void = _void(file, batch, vectors, outer, value, width)
    return Piece(offset + value * item, rows, np.diff(outer), void, even), width


def _void(
    file: StreamFile, batch: Batch, vectors: Vectors, outer: NDArray[np.int64], value: int, width: int | None
) -> NDArray[np.int64]:
    """Rows of the table that are null, or contain a null vector or element."""
    null_rows = [file.nulls(batch, vectors.levels[0])]
    null_vectors = file.nulls(batch, vectors.levels[1]) if len(vectors.levels) == 2 else np.zeros(0, np.int64)
    elements = file.nulls(batch, vectors.leaf)
    vector_numbers = [null_vectors, outer[0] + (elements - value) // width] if width else [null_vectors]
    for numbers in vector_numbers:
        used = numbers[(numbers >= outer[0]) & (numbers < outer[-1])]
        null_rows.append(np.searchsorted(outer, used, side="right") - 1)
    return np.unique(np.concatenate(null_rows))


def kind_of(vectors: Vectors, width: int) -> tuple[int, bool, int, str]:
    """What layers have in common. Better are sequences than single vectors, ``Array2D`` than other lists, then wider vectors."""
    return len(vectors.levels), _EXTENSION in vectors.column.metadata, width, vectors.leaf.type
