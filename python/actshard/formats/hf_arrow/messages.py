"""Messages of the written Arrow streams: schemas that can be rewritten in place with another shape, and record batches.

.. code-block:: text

    schema   ff ff ff ff | u32 n | flatbuffer, zeros up to n bytes     n does not depend on the number of tokens
    batch    ff ff ff ff | u32 n | flatbuffer | body                   as pyarrow serializes it
    end      ff ff ff ff | 00 00 00 00

The schema contains the number of tokens if it is the same in all examples (the first dimension of ``Array2D``). That is known only
at the end, so the schema is then rewritten in place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard.formats.hf_arrow.features import array_feature, feature_of, vector_feature

if TYPE_CHECKING:
    import pyarrow as pa

END = b"\xff\xff\xff\xff\0\0\0\0"
MOST_VALUES = (1 << 31) - 1
"""Limit on the values of a column in one batch: the offsets of Array2D have 32 bits."""
_EXTENSION = "datasets.features.features.Array2DExtensionType"
_MARGIN = 64
"""Bytes reserved for alignment within a flatbuffer."""
_LONGEST = 10**10
"""A first dimension with the largest number of digits, to reserve room for any other."""


@dataclass(frozen=True)
class ArrowColumns:
    """The columns of activations: names, dtype, width, and whether rows are vectors or sequences."""

    names: tuple[str, ...]
    dtype: np.dtype[np.generic]
    width: int
    vectors: bool

    @property
    def kind(self) -> pa.DataType:
        """The Arrow type of a column."""
        import pyarrow as pa

        value = pa.from_numpy_dtype(self.dtype)
        return pa.list_(value, self.width) if self.vectors else pa.list_(pa.list_(value))

    def features(self, columns: pa.Schema, tokens: int | None) -> dict[str, object]:
        """The features of all columns. ``tokens``: tokens per example; None: examples differ."""
        feature = vector_feature(self.dtype.name, self.width)
        if not self.vectors:
            feature = array_feature(self.dtype.name, tokens, self.width)
        return dict.fromkeys(self.names, feature) | {
            field.name: feature_of(field.name, field.type) for field in columns
        }

    def schema(self, columns: pa.Schema, tokens: int | None) -> pa.Schema:
        """The schema as ``datasets`` writes it."""
        import pyarrow as pa

        field_metadata: dict[str, str] | None = None
        if not self.vectors:
            shape = json.dumps([[tokens, self.width], self.dtype.name])
            field_metadata = {"ARROW:extension:name": _EXTENSION, "ARROW:extension:metadata": shape}
        fields = [pa.field(name, self.kind, metadata=field_metadata) for name in self.names]
        info = json.dumps({"info": {"features": self.features(columns, tokens)}})
        plain = [pa.field(field.name, usual(field.type)) for field in columns]
        return pa.schema([*fields, *plain], metadata={"huggingface": info})

    def header(self, columns: pa.Schema, tokens: int | None) -> bytes:
        """The schema's message. Its length depends only on the columns."""
        message = self.schema(columns, tokens).serialize().to_pybytes()
        room = -(-len(self.schema(columns, _LONGEST).serialize()) // 8) * 8 + _MARGIN
        return b"".join([message[:4], (room - 8).to_bytes(4, "little"), message[8:], bytes(room - len(message))])

    def batch(
        self, values: Sequence[NDArray[np.generic]], tokens: NDArray[np.int64], columns: pa.Table | None
    ) -> memoryview:
        """A record batch's message: rows ``(sum of tokens, width)`` of each layer, and columns of the examples.

        At most :data:`MOST_VALUES` values in a layer, and columns of less than 2 GiB.
        """
        import pyarrow as pa

        arrays = [self._array(of_layer, tokens) for of_layer in values]
        column_schema = pa.schema([]) if columns is None else columns.schema
        if columns is not None:
            arrays += arrays_of(columns)
        record_batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema(column_schema, None))
        return memoryview(record_batch.serialize())

    def _array(self, values: NDArray[np.generic], tokens: NDArray[np.int64]) -> pa.Array:
        import pyarrow as pa

        value = pa.from_numpy_dtype(self.dtype)
        flat = np.ascontiguousarray(values).reshape(-1)
        buffer = pa.Array.from_buffers(value, flat.size, [None, pa.py_buffer(flat.view(np.uint8))])
        if self.vectors:
            return pa.FixedSizeListArray.from_arrays(buffer, self.width)
        vectors = pa.ListArray.from_arrays(_ends(len(values), self.width), buffer)
        return pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32), vectors)


def _ends(count: int, width: int) -> NDArray[np.int32]:
    return (np.arange(count + 1, dtype=np.int64) * width).astype(np.int32)


def usual(kind: pa.DataType) -> pa.DataType:
    """The type with list elements named as ``datasets`` names them. Parquet files use other names."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, usual(field.type)) for field in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(usual(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(usual(kind.value_type))
    return pa.large_list(usual(kind.value_type)) if pa.types.is_large_list(kind) else kind


def arrays_of(table: pa.Table) -> list[pa.Array]:
    """One array per column, with types from :func:`usual`."""
    import pyarrow as pa

    arrays = []
    for column in table.columns:
        combined, kind = column.combine_chunks(), usual(column.type)
        array = pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined
        arrays.append(array if str(array.type) == str(kind) else array.cast(kind))
    return arrays


def same_types(a: pa.Schema, b: pa.Schema) -> bool:
    """Whether two schemas have equal names and types, in the same order."""
    return a.names == b.names and all(x.equals(y) for x, y in zip(a.types, b.types, strict=True))


def info_of(features: Mapping[str, object], metadata: Mapping[str, object]) -> dict[str, object]:
    """The fields of dataset_info.json that ``datasets`` writes, and metadata."""
    texts = {"citation": "", "description": "", "homepage": "", "license": ""}
    return {**texts, **metadata, "features": dict(features)}
