"""Types of columns: the one type that holds the values of two, exact casts, and tables of several parts.

Reading, writing, joining and merging unify types by :func:`common_type` only, so that the same two inputs have the same result.
"""

from __future__ import annotations

import decimal
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


_DIGITS = 38
"""Precision of the decimals that store integers beyond 64 bits."""
_MOST_DIGITS = 76
_MOST_FIELDS = 1024
"""Limit on the number of fields after merging struct types, because every example takes memory for each field."""
_UNITS = ("s", "ms", "us", "ns")


class IncompatibleTypesError(Exception):
    """No type holds the values of two columns with one name."""

    def __init__(self, name: str, known: pa.DataType, other: pa.DataType) -> None:
        super().__init__(f"column {name!r}: expected {known}, found {other}")
        self.name, self.known, self.other = name, known, other


def rows_only(count: int) -> pa.Table:
    """A table of ``count`` rows without columns."""
    import pyarrow as pa

    return pa.table({"": pa.nulls(count)}).select([])


# -- types ---------------------------------------------------------------------------------------------------------


def common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type for values of both types, with nulls for missing fields; None if there is none. Symmetric.

    Types of parts are inferred from values, so nulls, empty lists, missing fields and narrower numbers are compatible. A cast to
    the type may still fail for single values: for integers that a float cannot represent, and times beyond the finer unit's range.
    """
    return _unified(a, b, narrow=False)


def _unified(a: pa.DataType, b: pa.DataType, *, narrow: bool) -> pa.DataType | None:
    """The common type; ``narrow``: a type of the first's kind and width, in which only nulls and fields of dicts get a type."""
    import pyarrow as pa

    is_ = pa.types
    if a.equals(b) or is_.is_null(b):
        return a
    if is_.is_null(a):
        return b
    if is_.is_dictionary(a) or is_.is_dictionary(b):
        a, b = (t.value_type if is_.is_dictionary(t) else t for t in (a, b))
        return _unified(a, b, narrow=narrow)
    if is_list(a) and is_list(b):
        value = _unified(a.value_type, b.value_type, narrow=narrow)
        if value is None:
            return None
        if is_.is_fixed_size_list(a) and (narrow or (is_.is_fixed_size_list(b) and a.list_size == b.list_size)):
            return pa.list_(value, a.list_size)
        large = is_.is_large_list(a) or (is_.is_large_list(b) and not narrow)
        return pa.large_list(value) if large else pa.list_(value)
    if is_.is_struct(a) and is_.is_struct(b):
        if any(len({field.name for field in t}) < t.num_fields for t in (a, b)):
            return None
        fields: dict[str, pa.DataType] = {}
        for field in (*a, *b):
            kind = _unified(fields.get(field.name, pa.null()), field.type, narrow=narrow)
            if kind is None:
                return None
            fields[field.name] = kind
        if len(fields) > max(_MOST_FIELDS, a.num_fields, b.num_fields):
            return None
        return pa.struct(list(fields.items()))
    common = _common_scalar(a, b)
    if not narrow:
        return common
    return a if common is not None and (_family(common) == _family(a) or _family(a) == _family(b)) else None


def _family(kind: pa.DataType) -> str | int:
    """Types of one family differ only in the range and precision of their values."""
    import pyarrow as pa

    is_ = pa.types
    families = {
        "integer": (is_.is_integer,),
        "float": (is_.is_floating,),
        "decimal": (is_.is_decimal,),
        "text": (is_.is_string, is_.is_large_string),
        "bytes": (is_.is_binary, is_.is_large_binary, is_.is_fixed_size_binary),
        "time": (is_.is_time,),
    }
    return next((name for name, kinds in families.items() if any(is_kind(kind) for is_kind in kinds)), kind.id)


def _common_scalar(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The table of scalar types."""
    import pyarrow as pa

    is_ = pa.types
    number = [is_.is_integer(t) or is_.is_floating(t) for t in (a, b)]
    if all(number):
        wide = pa.from_numpy_dtype(np.promote_types(a.to_pandas_dtype(), b.to_pandas_dtype()))
        both_whole = is_.is_integer(a) and is_.is_integer(b)
        return pa.decimal128(_DIGITS) if both_whole and not is_.is_integer(wide) else wide
    if all(is_.is_integer(t) or is_.is_decimal(t) for t in (a, b)):
        # 20 digits hold all 64-bit integers.
        scale = max(t.scale for t in (a, b) if is_.is_decimal(t))
        if any(is_.is_decimal(t) and t.scale != scale for t in (a, b)):
            return None
        digits = max(t.precision if is_.is_decimal(t) else 20 + scale for t in (a, b))
        if digits > _MOST_DIGITS:
            return None
        return pa.decimal128(digits, scale) if digits <= _DIGITS else pa.decimal256(digits, scale)
    for small, large, kind in (
        (is_.is_string, is_.is_large_string, pa.large_string()),
        (is_.is_binary, is_.is_large_binary, pa.large_binary()),
    ):
        if all(small(t) or large(t) for t in (a, b)):
            return kind
    if all(is_.is_binary(t) or is_.is_fixed_size_binary(t) for t in (a, b)):
        return pa.binary()
    for alike in (is_.is_timestamp, is_.is_duration, is_.is_time):
        if alike(a) and alike(b) and getattr(a, "tz", None) == getattr(b, "tz", None):
            return max(a, b, key=lambda t: _UNITS.index(t.unit))
    return pa.date64() if is_.is_date(a) and is_.is_date(b) else None


def is_list(kind: pa.DataType) -> bool:
    """Whether the type is a list of any kind."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def common_schema(known_schema: pa.Schema, new_schema: pa.Schema, *, narrow: bool = False) -> pa.Schema:
    """A schema with the columns of both, in the order of the first; ``narrow``: with the types of the first.

    Raises:
        IncompatibleTypesError: no type holds the values of two columns with one name.
    """
    import pyarrow as pa

    fields = {field.name: field for field in known_schema}
    for field in new_schema:
        fields[field.name] = _common_field(fields[field.name], field, narrow) if field.name in fields else field
    return pa.schema(list(fields.values()))


def _common_field(known_field: pa.Field, new_field: pa.Field, narrow: bool) -> pa.Field:
    import pyarrow as pa

    kind = _unified(known_field.type, new_field.type, narrow=narrow)
    # Elements of a dtype that Arrow lacks are stored as bits of another type.
    dtypes = {
        (field.metadata or {}).get(b"dtype") for field in (known_field, new_field) if not pa.types.is_null(field.type)
    }
    if kind is None or len(dtypes) > 1:
        raise IncompatibleTypesError(known_field.name, known_field.type, new_field.type)
    return (new_field if pa.types.is_null(known_field.type) else known_field).with_type(kind)


def leaf_types(schema: Iterable[pa.Field]) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Types of columns, and of the values inside their lists and dicts, by path."""
    import pyarrow as pa

    for field in schema:
        if pa.types.is_struct(field.type):
            inner = leaf_types(field.type)
        elif is_list(field.type):
            inner = leaf_types([field.type.value_field.with_name("[]")])
        else:
            yield (field.name,), field.type
            continue
        yield from (((field.name, *path), kind) for path, kind in inner)


def leaves(
    name: str, column: pa.Array | pa.ChunkedArray
) -> Iterator[tuple[tuple[str, ...], pa.Array | pa.ChunkedArray]]:
    """Values of a column, or those inside its lists and dicts, by path."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(column.type):
        # By number: pyarrow reads names such as ".a" as paths.
        inner = [(field.name, pc.struct_field(column, [i])) for i, field in enumerate(column.type)]
    elif is_list(column.type):
        inner = [("[]", pc.list_flatten(column))]
    else:
        yield (name,), column
        return
    for part, values in inner:
        yield from (((name, *path), leaf) for path, leaf in leaves(part, values))


# -- values --------------------------------------------------------------------------------------------------------


def cast_exactly(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Casts a column. A column that has the type is returned unchanged: pyarrow 26 returns invalid arrays for lists of nulls.

    Raises:
        pa.ArrowException, TypeError, ValueError, OverflowError: the type cannot represent a value exactly.
    """
    import pyarrow as pa

    if column.type.equals(kind):
        return column
    # Safe casts of floats fail for NaN values; _loses() compares floats.
    floats = pa.types.is_floating(column.type) and pa.types.is_floating(kind)
    try:
        cast_column = column.cast(kind, safe=not floats)
        cast_column.validate()  # casts of structs that contain lists of nulls can return invalid arrays
    except pa.ArrowException:
        if not pa.types.is_nested(kind):
            raise
        # Arrow cannot add fields to dicts, or cast all lists with different inner types.
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        parts = [pa.array(chunk.to_pylist(), kind) for chunk in chunks]
        cast_column = pa.chunked_array(parts, kind) if isinstance(column, pa.ChunkedArray) else parts[0]
    if _loses(column, cast_column):
        raise pa.ArrowInvalid("a value would be rounded")
    return cast_column


def _loses(column: pa.Array | pa.ChunkedArray, cast_column: pa.Array | pa.ChunkedArray) -> bool:
    """Whether a cast to a narrower type changed floats, also inside lists and dicts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.type.equals(cast_column.type):
        return False
    if pa.types.is_struct(column.type) and pa.types.is_struct(cast_column.type):
        places = [(i, cast_column.type.get_field_index(field.name)) for i, field in enumerate(column.type)]
        return any(_loses(pc.struct_field(column, [i]), pc.struct_field(cast_column, [j])) for i, j in places)
    if is_list(column.type) and is_list(cast_column.type):
        return _loses(pc.list_flatten(column), pc.list_flatten(cast_column))
    if not (pa.types.is_floating(column.type) and pa.types.is_floating(cast_column.type)):
        return False
    if cast_column.type.bit_width >= column.type.bit_width:
        return False
    a, b = (c.drop_null().to_numpy(zero_copy_only=False).astype(np.float64) for c in (column, cast_column))
    return not np.array_equal(a, b, equal_nan=True)


def as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of a schema, cast to its types; nulls for columns that the table lacks.

    Raises:
        Errors of :func:`cast_exactly`.
    """
    import pyarrow as pa

    columns = [
        cast_exactly(table[field.name], field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def concatenated(tables: Sequence[pa.Table]) -> tuple[pa.Table, list[str]]:
    """One table with the rows of all, and the names of columns that became JSON texts: no type holds all their values exactly.

    Columns that a table lacks are filled with nulls.
    """
    import pyarrow as pa

    fields: list[pa.Field] = []
    columns: list[pa.ChunkedArray] = []
    mixed: list[str] = []
    for name in dict.fromkeys(name for table in tables for name in table.column_names):
        chunks = [
            chunk
            for table in tables
            for chunk in (table[name].chunks if name in table.column_names else [pa.nulls(table.num_rows)])
        ]
        try:
            schema: pa.Schema = pa.schema([])
            for table in tables:
                if name in table.column_names:
                    schema = common_schema(schema, pa.schema([table.schema.field(name)]))
            field = schema.field(0)
            values = pa.chunked_array([cast_exactly(chunk, field.type) for chunk in chunks], field.type)
        except (IncompatibleTypesError, pa.ArrowException, TypeError, ValueError, OverflowError):
            mixed.append(name)
            field = pa.field(name, pa.string())
            texts = [pa.array([_as_json(v) for v in chunk.to_pylist()], pa.string()) for chunk in chunks]
            values = pa.chunked_array(texts, pa.string())
        fields.append(field)
        columns.append(values)
    if not fields:
        return rows_only(sum(table.num_rows for table in tables)), mixed
    return pa.Table.from_arrays(columns, schema=pa.schema(fields)), mixed


def table_of(names: Sequence[str], parts: Sequence[tuple[Mapping[str, object], int]]) -> pa.Table:
    """Concatenates the columns of parts to one table: first ``names``, then all others.

    Args:
        names: leading columns, in order, even if no part has them.
        parts: columns by name (pyarrow arrays or lists of values) and the number of rows. A missing column is filled with nulls. A
            column becomes JSON strings if no type can hold the values of all parts unchanged.
    """
    import pyarrow as pa

    order = dict.fromkeys([*names, *(name for columns, _ in parts for name in columns)])
    tables = [
        pa.table({name: _arrow(columns.get(name), n) for name in order}) if order else rows_only(n)
        for columns, n in parts
    ]
    return concatenated(tables)[0] if tables else pa.table({name: pa.nulls(0) for name in order})


def _arrow(values: pa.Array | NDArray[np.generic], n: int) -> pa.Array:
    """Converts a column to pyarrow: integers beyond 64 bits become decimals, values of mixed types JSON strings."""
    import pyarrow as pa

    if values is None:
        return pa.nulls(n)
    if isinstance(values, pa.Array):
        return values
    if any(type(v) is int and not -(1 << 63) <= v < 1 << 63 for v in values):
        try:
            if all(v is None or (type(v) is int and 0 <= v < 1 << 64) for v in values):
                return pa.array(values, pa.uint64())
            return pa.array([None if v is None else decimal.Decimal(v) for v in values], pa.decimal128(_DIGITS))
        except (pa.ArrowInvalid, TypeError, ValueError, decimal.InvalidOperation):
            return pa.array([_as_json(v) for v in values], pa.string())
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, UnicodeError):
        # No arrow type holds mixed types, other objects or lone surrogates; JSON strings keep them.
        return pa.array([_as_json(v) for v in values], pa.string())


def _as_json(value: object) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "backslashreplace").decode()


def plain(value: object) -> object:
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


def as_text(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Converts a column to strings, with numbers formatted as in Python: 0.0, not 0."""
    import pyarrow as pa

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())
    chunks = [
        pa.array([None if v is None else str(v) for v in chunk.to_pylist()], pa.string())
        for chunk in (column.chunks if isinstance(column, pa.ChunkedArray) else [column])
    ]
    return pa.chunked_array(chunks, pa.string())
