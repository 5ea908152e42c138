"""Arrow stream files: columns, batches, and the values of columns that are not activations.

The core reads and checks the headers (``rust/core/src/parse/arrow.rs``). pyarrow receives only buffers whose bounds were checked,
and validates the resulting arrays. It never parses a file, for two reasons: it cannot report a buffer's offset in the file without
mapping the batch, and extension types would run code of the library that registered them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base.errors import FormatError, UnsupportedError
from actshard.base.location import Location

if TYPE_CHECKING:
    import pyarrow as pa


_MODEST = 1 << 30
"""Reads up to this many bytes skip the check against allocated disk blocks. A sparse file can have any size."""


@dataclass(frozen=True)
class Column:
    """A column of a schema, and the position of its nodes and buffers in every batch."""

    name: str
    type: str
    sizes: tuple[int, ...]
    texts: tuple[str, ...]
    children: tuple[Column, ...]
    metadata: dict[str, str]
    node: int
    buffer: int

    @property
    def own_buffers(self) -> int:
        """Number of buffers of the column itself."""
        if self.type == "null":
            return 0
        if self.type in ("struct", "fixed_size_list"):
            return 1
        return 3 if self.type in ("string", "large_string", "binary", "large_binary") else 2

    @property
    def extent(self) -> tuple[int, int]:
        """Numbers of nodes and buffers, including those of nested columns."""
        extents = [child.extent for child in self.children]
        return 1 + sum(n for n, _ in extents), self.own_buffers + sum(b for _, b in extents)

    @property
    def wide(self) -> bool:
        """Whether offsets have 64 bits."""
        return self.type.startswith("large_")

    def same_type(self, other: Column) -> bool:
        """Whether names, types and nested columns are equal."""
        return (self.name, self.type, self.sizes, self.texts) == (
            other.name,
            other.type,
            other.sizes,
            other.texts,
        ) and (
            len(self.children) == len(other.children)
            and all(a.same_type(b) for a, b in zip(self.children, other.children, strict=True))
        )


def _columns(fields: Sequence[Any], node: int, buffer: int) -> tuple[Column, ...]:
    columns = []
    for name, kind, sizes, texts, children, metadata in fields:
        bare_column = Column(name, kind, tuple(sizes), tuple(texts), (), dict(metadata), node, buffer)
        child_columns = _columns(children, node + 1, buffer + bare_column.own_buffers)
        column = Column(
            name, kind, bare_column.sizes, bare_column.texts, child_columns, bare_column.metadata, node, buffer
        )
        columns.append(column)
        nodes, buffers = column.extent
        node, buffer = node + nodes, buffer + buffers
    return tuple(columns)


@dataclass(frozen=True)
class Batch:
    """A record batch."""

    rows: int
    nodes: list[tuple[int, int]]
    """Length and nulls of each column."""
    buffers: list[tuple[int, int]]
    """Offset in the file and length."""


@dataclass(frozen=True)
class StreamFile:
    """The headers of a file."""

    path: Location
    columns: tuple[Column, ...]
    metadata: dict[str, str]
    batches: tuple[Batch, ...]
    ended: bool

    @classmethod
    def of(cls, path: Location) -> StreamFile:
        """Reads the headers. Raises FormatError, TruncatedFileError or UnsupportedError."""
        fields, metadata, messages, ended = _native.arrow_stream(path)
        columns = _columns(fields, 0, 0)
        batches = tuple(Batch(rows, nodes, buffers) for _, rows, nodes, buffers in messages)
        return cls(path, columns, dict(metadata), batches, ended)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(batch.rows for batch in self.batches)

    def read(self, ranges: Sequence[tuple[int, int, np.dtype[np.generic]]]) -> list[NDArray[Any]]:
        """Reads arrays: (offset, number of elements, dtype)."""
        total = sum(n * dtype.itemsize for _, n, dtype in ranges)
        if total > _MODEST and total > 64 * self.path.stat().stored:
            raise UnsupportedError(f"expected data, found a sparse file: {total} bytes of offsets", path=self.path)
        arrays = [np.empty(n, dtype) for _, n, dtype in ranges]
        self.path.fill(
            (offset, array.view(np.uint8).data)
            for (offset, _, _), array in zip(ranges, arrays, strict=True)
            if len(array)
        )
        return arrays

    def nulls(self, batch: Batch, column: Column) -> NDArray[np.int64]:
        """Positions of the null values of a column in a batch."""
        length, count = batch.nodes[column.node]
        if count == 0 or column.own_buffers == 0:
            return np.zeros(0, np.int64)
        offset, size = batch.buffers[column.buffer]
        if size == 0 and count < 0:
            return np.zeros(0, np.int64)
        if size < -(-length // 8):
            raise FormatError(
                f"column {column.name!r}: expected a bitmap of {-(-length // 8)} bytes for {count} nulls, found {size}",
                path=self.path,
                offset=offset,
            )
        (bits,) = self.read([(offset, -(-length // 8), np.dtype(np.uint8))])
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")[:length] == 0)

    def array(self, batch: Batch, column: Column) -> pa.Array:
        """Reads a column of a batch.

        Raises:
            FormatError: its buffers contradict each other.
        """
        import pyarrow as pa

        try:
            array = self._array(batch, column)
            array.validate(full=True)
        except (pa.ArrowException, OverflowError) as error:
            raise FormatError(f"column {column.name!r}: {str(error)[:200]}", path=self.path) from error
        return array

    def _array(self, batch: Batch, column: Column) -> pa.Array:
        import pyarrow as pa

        length, nulls = batch.nodes[column.node]
        if column.type == "null":
            return pa.nulls(length)
        buffers = []
        for number in range(column.buffer, column.buffer + column.own_buffers):
            offset, size = batch.buffers[number]
            data = self.path.read(offset, size) if size else b""
            buffers.append(pa.py_buffer(data) if size or number > column.buffer else None)
        kind = pa_type(column)
        if buffers[0] is None and nulls > 0:
            raise FormatError(f"column {column.name!r}: expected a bitmap of {nulls} nulls, found none", path=self.path)
        if length == 0 and not column.children:
            return pa.array([], kind)
        children = [self._array(batch, child) for child in column.children]
        if length == 0:
            return pa.array([], kind)
        if column.type in ("map", "list", "large_list") and batch.buffers[column.buffer + 1][1] < (length + 1) * (
            8 if column.wide else 4
        ):
            raise FormatError(f"column {column.name!r}: expected {length + 1} list offsets", path=self.path)
        return pa.Array.from_buffers(kind, length, buffers, -1, 0, children or None)


def pa_type(column: Column) -> pa.DataType:
    """The pyarrow type of a column, without extension types."""
    import pyarrow as pa

    fields = [pa.field(child.name, pa_type(child)) for child in column.children]
    if column.type in ("list", "large_list"):
        return pa.list_(fields[0]) if column.type == "list" else pa.large_list(fields[0])
    if column.type == "fixed_size_list":
        return pa.list_(fields[0], column.sizes[0])
    if column.type == "struct":
        return pa.struct(fields)
    if column.type == "map":
        entries = fields[0].type
        if not pa.types.is_struct(entries) or entries.num_fields != 2:
            raise UnsupportedError(f"column {column.name!r}: expected a map of keys and values")
        return pa.map_(entries.field(0).with_nullable(False), entries.field(1))
    if column.type == "fixed_size_binary":
        return pa.binary(column.sizes[0])
    if column.type.startswith("decimal"):
        return getattr(pa, column.type)(*column.sizes)
    if column.type in ("timestamp", "time32", "time64", "duration"):
        return getattr(pa, column.type)(*column.texts)
    return pa.bool_() if column.type == "bool" else getattr(pa, column.type)()


# Columns of vectors: which of a table's columns are layers, and the byte offsets of their rows.
#
#     list<list<float>>, list<fixed_size_list<float>[d]>     one sequence of tokens per row; Array2D is the first
#     list<float>, fixed_size_list<float>[d]                 one vector per row
#
# The values of a batch are one buffer. They are rows of ``d`` elements if consecutive offsets of the innermost lists differ by
# ``d``. The offsets of the first row are read here; the core checks the others when it first reads the batch.


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
