"""Tables of what formats hold as lists of values, of types that nobody promised."""

from __future__ import annotations

import decimal
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


_DIGITS = 38
"""Of the decimals that hold integers beyond 64 bits."""
_MOST_FIELDS = 1024
"""Fields of dicts that parts may have together: every example takes memory for each."""


def table_of(names: Sequence[str], parts: Sequence[tuple[Mapping[str, Any], int]]) -> pa.Table:
    """One table of the parts' columns one below the other: those named first, then all others.

    Args:
        names: columns in order, whether a part has them or not.
        parts: columns by name (pyarrow arrays or lists of values), and how many rows they have. A part without a column has
            nulls there; a column is given as JSON text if no type holds the values of all parts as they are.
    """
    import pyarrow as pa

    order = dict.fromkeys([*names, *(name for columns, _ in parts for name in columns)])
    made = {}
    for name in order:
        chunks = [_arrow(columns.get(name), n) for columns, n in parts]
        kind: pa.DataType | None = pa.null()
        for other in {str(c.type): c.type for c in chunks}.values():
            kind = None if kind is None else common_type(kind, other)
        if kind is None:
            chunks = [_arrow([_as_json(v) for v in c.to_pylist()], len(c)) for c in chunks]
            kind = pa.string()
        made[name] = pa.chunked_array([_cast(c, kind) for c in chunks], kind)
    return pa.table(made)


def common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that holds values of both as they are, with nulls for missing fields; None if there is none.

    Values decide the type of a part's column. Empty lists, nulls and fewer fields leave it open, and arrays may be narrower.
    """
    import pyarrow as pa

    is_ = pa.types
    if a.equals(b) or is_.is_null(b):
        return a
    if is_.is_null(a):
        return b
    lists = (is_.is_list, is_.is_large_list, is_.is_fixed_size_list)
    if all(any(is_list(t) for is_list in lists) for t in (a, b)):
        value = common_type(a.value_type, b.value_type)
        return None if value is None else pa.list_(value)
    if is_.is_struct(a) and is_.is_struct(b):
        fields: dict[str, pa.DataType] = {}
        for field in (*a, *b):
            kind = common_type(fields.get(field.name, pa.null()), field.type)
            if kind is None:
                return None
            fields[field.name] = kind
        if len(fields) > max(_MOST_FIELDS, a.num_fields, b.num_fields):
            return None
        return pa.struct(list(fields.items()))
    for alike in (is_.is_integer, is_.is_floating):
        if alike(a) and alike(b):
            wide = pa.from_numpy_dtype(np.promote_types(a.to_pandas_dtype(), b.to_pandas_dtype()))
            return wide if alike(wide) else None
    big = pa.decimal128(_DIGITS)
    return big if all(is_.is_integer(t) or t.equals(big) for t in (a, b)) else None


def as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of a schema, as its types.

    Columns that have their type are not cast: pyarrow 26 makes an invalid array of lists of nulls that it casts to their own type.
    """
    import pyarrow as pa

    columns = [table[field.name] for field in schema]
    kept = [c if c.type.equals(f.type) else c.cast(f.type) for f, c in zip(schema, columns, strict=True)]
    return pa.Table.from_arrays(kept, schema=schema)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if column.type.equals(kind):
        return column
    try:
        return column.cast(kind)
    except pa.ArrowException:
        if not pa.types.is_nested(column.type):
            raise
    return pa.array(column.to_pylist(), kind)  # no cast adds fields to dicts


def _arrow(values: Any, n: int) -> pa.Array:
    """A column as pyarrow: integers beyond 64 bits as decimals, values that no one type holds as JSON text."""
    import pyarrow as pa

    if values is None:
        return pa.nulls(n)
    if isinstance(values, pa.Array):
        return values
    if any(type(v) is int and not -(1 << 63) <= v < 1 << 63 for v in values):
        try:
            return pa.array([None if v is None else decimal.Decimal(v) for v in values], pa.decimal128(_DIGITS))
        except (pa.ArrowInvalid, TypeError, ValueError, decimal.InvalidOperation):
            return pa.array([_as_json(v) for v in values], pa.string())
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeError):
        # Values that no one arrow type holds (mixed types, odd objects, lone surrogates): nothing of them is lost as text.
        return pa.array([_as_json(v) for v in values], pa.string())


def _as_json(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "backslashreplace").decode()


def plain(value: Any) -> Any:
    """numpy's scalars and arrays and tuples as Python's own numbers and lists."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {k if isinstance(k, str) else str(k): plain(v) for k, v in value.items()}
    if isinstance(value, bytearray):
        return bytes(value)
    return value


def as_text(column: Any) -> Any:
    """A column as texts, numbers as Python prints them: 0.0, not 0."""
    import pyarrow as pa

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    chunks = [
        pa.array([None if v is None else str(v) for v in chunk.to_pylist()], pa.string())
        for chunk in (column.chunks if isinstance(column, pa.ChunkedArray) else [column])
    ]
    return pa.chunked_array(chunks, pa.string())
