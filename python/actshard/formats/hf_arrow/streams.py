"""Arrow stream files: columns, batches, and the values of columns that are not activations.

The core reads and checks the headers (``rust/core/src/parse/arrow.rs``). pyarrow receives only buffers whose bounds were checked,
and validates the resulting arrays. It never parses a file, for two reasons: it cannot report a buffer's offset in the file without
mapping the batch, and extension types would run code of the library that registered them.
"""

from __future__ import annotations

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
