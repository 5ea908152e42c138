"""Arrow tables from lists of Python values whose types may vary."""

from __future__ import annotations

import decimal
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


_DIGITS = 38
"""Precision of the decimals that store integers beyond 64 bits."""
_MOST_FIELDS = 1024
"""Limit on the number of fields after merging struct types, because every example takes memory for each field."""


def table_of(names: Sequence[str], parts: Sequence[tuple[Mapping[str, Any], int]]) -> pa.Table:
    """Concatenates the columns of parts to one table: first ``names``, then all others.

    Args:
        names: leading columns, in order, even if no part has them.
        parts: columns by name (pyarrow arrays or lists of values) and the number of rows. A missing column is filled with nulls. A
            column becomes JSON strings if no type can hold the values of all parts unchanged.
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


def picked(table: pa.Table, numbers: NDArray[np.int64]) -> pa.Table:
    """Rows of a table, in this order. Unlike ``take``, it accepts lists of more than 2 GiB in total."""
    import pyarrow as pa

    return pa.concat_tables([table.slice(number, 1) for number in numbers.tolist()] or [table.slice(0, 0)])


def common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type that can store values of both types unchanged, with nulls for missing fields; None if no type can.

    Types of parts are inferred from values, so nulls, empty lists, missing fields and narrower numbers are compatible.
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
    """The columns of a schema, cast to its types.

    A column that already has its type is not cast: casting lists of nulls to their own type returns an invalid array in pyarrow 26.
    """
    import pyarrow as pa

    return pa.Table.from_arrays([_cast(table[field.name], field.type) for field in schema], schema=schema)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if column.type.equals(kind):
        return column
    try:
        made = column.cast(kind)
        made.validate()  # casts of structs that contain lists of nulls can return invalid arrays
        return made
    except pa.ArrowException:
        if not pa.types.is_nested(column.type):
            raise
    return pa.array(column.to_pylist(), kind)  # cast cannot add struct fields


def _arrow(values: Any, n: int) -> pa.Array:
    """Converts a column to pyarrow: integers beyond 64 bits become decimals, values of mixed types JSON strings."""
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
        # No arrow type holds mixed types, other objects or lone surrogates; JSON strings keep them.
        return pa.array([_as_json(v) for v in values], pa.string())


def _as_json(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "backslashreplace").decode()


def plain(value: Any) -> Any:
    """Converts numpy scalars, numpy arrays and tuples to Python numbers and lists, recursively."""
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
    """Converts a column to strings, with numbers formatted as in Python: 0.0, not 0."""
    import pyarrow as pa

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    chunks = [
        pa.array([None if v is None else str(v) for v in chunk.to_pylist()], pa.string())
        for chunk in (column.chunks if isinstance(column, pa.ChunkedArray) else [column])
    ]
    return pa.chunked_array(chunks, pa.string())
