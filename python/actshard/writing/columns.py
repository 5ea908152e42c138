"""Column types of a dataset that is being written. The first examples fix the types of all later ones.

Unsupported columns are refused on append, because it would be too late to correct them when the dataset is finished.
A type that has only had null values, also inside lists and dicts, is still undetermined. A dict may get new fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.errors import ActshardError, ArgumentError
from actshard.formats.tables import as_text

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.target import Target

RESERVED = "actshard."
"""Prefix of column names that the journal's tables use."""
_RUNS = 16
"""Maximum number of sorted runs of identifiers; more are merged into one."""


@dataclass(frozen=True)
class Fitted:
    """Checked columns of some examples, and the schema and identifiers that :meth:`Decided.keep` will record."""

    table: pa.Table | None
    schema: pa.Schema
    ids: NDArray[np.int64] | None


class Decided:
    """Schema and identifiers of a dataset's columns. :meth:`fit` only checks; :meth:`keep` records."""

    def __init__(self, target: Target, tables: Iterable[pa.Table]) -> None:
        """Starts from the tables that were committed before."""
        import pyarrow as pa

        self._target = target
        self._schema: pa.Schema | None = None
        self._ids: list[NDArray[np.int64]] = []
        for table in tables:
            own = table.drop_columns([c for c in table.column_names if c.startswith(RESERVED)])
            self._schema = own.schema if self._schema is None else (joined(self._schema, own.schema) or self._schema)
            if target.unique is not None and target.unique in own.column_names:
                column = own[target.unique]
                if pa.types.is_integer(column.type) and not column.null_count:
                    self._ids.append(np.sort(column.to_numpy().astype(np.int64)))

    def fit(self, table: pa.Table | None, first: int, count: int | None = None, *, alike: bool) -> Fitted:
        """Checks the columns of some examples and casts them to the dataset's types.

        Args:
            table: one row per example; None for no columns.
            first: the number of the first example.
            count: the number of examples; None: the table's number of rows.
            alike: whether names and kinds must equal those of the first examples. Conversions pass False, because a source may
                have new columns and wider numbers later on.

        Raises:
            ArgumentError, NotStoredError: the format does not support a column, or its type differs from before.
        """
        import pyarrow as pa

        if count is None:
            count = 0 if table is None else len(table)
        self._target.check_count(first + count, () if table is None else table.column_names)
        if table is not None:
            table = plain(table)
        known = self._schema
        schema = pa.schema([]) if table is None else table.schema
        if known is not None and alike and set(schema.names) != set(known.names):
            raise ArgumentError(f"columns: expected {sorted(known.names)}, as before, found {sorted(schema.names)}")
        made = schema if known is None else joined(known, schema, wide=not alike)
        if made is None:
            assert known is not None
            for field in schema:
                if field.name in known.names and _merged_field(known.field(field.name), field, wide=not alike) is None:
                    raise ArgumentError(
                        f"columns: {field.name!r}: expected {known.field(field.name).type}, as before, found {field.type}. A "
                        "column has one type: convert the values, or use another name."
                    )
        assert made is not None
        if known is None or made != known:
            self._target.check_columns(made)
        if table is not None:
            table = cast(table, made, first)
            self._target.check_values(table, first)
        return Fitted(table, made, self._new_ids(table, first))

    def keep(self, fitted: Fitted) -> None:
        """Records the schema and identifiers of examples that are now part of the dataset."""
        self._schema = fitted.schema
        if fitted.ids is not None and len(fitted.ids):
            self._ids.append(fitted.ids)
            if len(self._ids) > _RUNS:
                self._ids = [np.sort(np.concatenate(self._ids))]

    def _new_ids(self, table: pa.Table | None, first: int) -> NDArray[np.int64] | None:
        """Returns the examples' identifiers, sorted, if the format has such a column. Raises if two examples share one."""
        import pyarrow as pa

        name = self._target.unique
        if table is None or name is None or name not in table.column_names:
            return None
        column = table[name]
        if column.null_count or not pa.types.is_integer(column.type):
            raise ArgumentError(
                f"{name}: expected an integer for every example, found {column.type} with nulls or other values"
            )
        values = column.to_numpy()
        if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
            raise ArgumentError(f"{name}: expected 64-bit integers, found {values.max()}")
        ids = np.sort(values.astype(np.int64))
        again = ids[1:][ids[1:] == ids[:-1]]
        for run in self._ids:
            if again.size or not len(run) or not len(ids) or ids[0] > run[-1] or ids[-1] < run[0]:
                continue
            at = np.minimum(np.searchsorted(run, ids), len(run) - 1)
            again = ids[run[at] == ids]
        if again.size:
            raise ArgumentError(f"{name}: expected distinct integers, found {int(again[0])} twice")
        return ids


def plain(table: pa.Table) -> pa.Table:
    """Decodes dictionary, run-end-encoded, view and extension columns into plain values."""
    fields = [field.with_type(_plain_type(field.type)) for field in table.schema]
    if all(a.type == b.type for a, b in zip(fields, table.schema, strict=True)):
        return table
    import pyarrow as pa

    columns = [
        column if field.type == column.type else _as_type(column, field.type)
        for field, column in zip(fields, table.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_decimal(kind) and kind.scale == 0:
        # Integers beyond 64 bits: the maximum precision, since later values may have more digits.
        return pa.decimal128(38) if kind.precision <= 38 else pa.decimal256(76)
    return kind


def joined(known: pa.Schema, new: pa.Schema, *, wide: bool = True) -> pa.Schema | None:
    """Returns a schema with the columns of both; None if two types are incompatible. ``wide``: numeric types may widen."""
    import pyarrow as pa

    fields = []
    for field in known:
        made = _merged_field(field, new.field(field.name), wide=wide) if field.name in new.names else field
        if made is None:
            return None
        fields.append(made)
    return pa.schema([*fields, *(field for field in new if field.name not in known.names)])


def _merged_field(known: pa.Field, new: pa.Field, *, wide: bool) -> pa.Field | None:
    import pyarrow as pa

    kind = merged(known.type, new.type, wide=wide)
    known_dtype = {k: v for k, v in (known.metadata or {}).items() if k == b"dtype"}
    new_dtype = {k: v for k, v in (new.metadata or {}).items() if k == b"dtype"}
    if kind is None or (
        known_dtype != new_dtype and not pa.types.is_null(new.type) and not pa.types.is_null(known.type)
    ):
        return None
    return (known if not pa.types.is_null(known.type) else new).with_type(kind)


def merged(known: pa.DataType, new: pa.DataType, *, wide: bool) -> pa.DataType | None:
    """Returns a type that can represent both; None if there is none."""
    import pyarrow as pa

    is_ = pa.types
    if known.equals(new) or is_.is_null(new):
        return known
    if is_.is_null(known):
        return new
    if (is_.is_list(known) or is_.is_large_list(known)) and (is_.is_list(new) or is_.is_large_list(new)):
        value = merged(known.value_type, new.value_type, wide=wide)
        large = is_.is_large_list(known) or (wide and is_.is_large_list(new))
        return None if value is None else pa.large_list(value) if large else pa.list_(value)
    if is_.is_fixed_size_list(known) and is_.is_fixed_size_list(new):
        value = merged(known.value_type, new.value_type, wide=wide)
        return None if value is None or known.list_size != new.list_size else pa.list_(value, known.list_size)
    if is_.is_struct(known) and is_.is_struct(new):
        before, other = pa.schema(list(known)), pa.schema(list(new))
        if len(set(before.names)) < len(before.names) or len(set(other.names)) < len(other.names):
            return None
        both = joined(before, other, wide=wide)
        return None if both is None else pa.struct(list(both))
    whole = [is_.is_integer(t) for t in (known, new)]
    real = [is_.is_floating(t) for t in (known, new)]
    if (whole[0] or real[0]) and (whole[1] or real[1]):
        if wide:
            try:
                schemas = [pa.schema([("x", t)]) for t in (known, new)]
                return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
            except pa.ArrowException:
                return None
        return known if real[0] or whole[1] else None
    if (whole[0] or is_.is_decimal(known)) and (whole[1] or is_.is_decimal(new)):
        if is_.is_decimal(known) and (whole[1] or new.scale == known.scale):
            return known if whole[1] or not wide or known.bit_width >= new.bit_width else new
        return new if wide and whole[0] and new.scale == 0 else None
    for kinds in ((is_.is_string, is_.is_large_string), (is_.is_binary, is_.is_large_binary)):
        if any(k(known) for k in kinds) and any(k(new) for k in kinds):
            return known if not wide or kinds[1](known) else new
    if is_.is_timestamp(known) and is_.is_timestamp(new):
        return known if known.tz == new.tz else None
    return None


def cast(table: pa.Table, schema: pa.Schema, first: int) -> pa.Table:
    """Casts a table to a schema and its column order. Missing columns are filled with nulls.

    Raises:
        ArgumentError: the column's type cannot represent a value exactly.
    """
    import pyarrow as pa

    if table.schema.equals(schema):
        return table
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        column = table[field.name]
        if column.type != field.type:
            made = None
            try:
                made = _as_type(column, field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                raise ArgumentError(
                    f"columns: {field.name!r}, from example {first}: expected {field.type}, as before, found {column.type}: {error}"
                ) from error
            if _loses(column, made):
                raise ArgumentError(
                    f"columns: {field.name!r}, from example {first}: expected {field.type}, as before, found "
                    f"{column.type} values that it cannot represent exactly"
                )
            column = made
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def _as_type(column: Any, kind: pa.DataType) -> Any:
    import pyarrow as pa

    number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    try:
        made = column.cast(kind, safe=not (number and pa.types.is_floating(column.type)))
        made.validate()  # casts of structs that contain lists of nulls can return invalid arrays
        return made
    except pa.ArrowException:
        if not pa.types.is_nested(kind):
            raise
    # Arrow cannot cast all dicts and lists with different inner types.
    return pa.chunked_array([pa.array(column.to_pylist(), type=kind)])


def _loses(column: Any, made: Any) -> bool:
    """Whether a cast to a narrower type changed floats, also inside lists and dicts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if column.type.equals(made.type):
        return False
    if pa.types.is_struct(column.type) and pa.types.is_struct(made.type):
        return any(
            _loses(pc.struct_field(column, field.name), pc.struct_field(made, field.name)) for field in column.type
        )
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if any(is_(column.type) for is_ in lists) and any(is_(made.type) for is_ in lists):
        return _loses(pc.list_flatten(column), pc.list_flatten(made))
    if not (pa.types.is_floating(column.type) and pa.types.is_floating(made.type)):
        return False
    if made.type.bit_width >= column.type.bit_width:
        return False
    a, b = (c.drop_null().to_numpy().astype(np.float64) for c in (column, made))
    return not np.array_equal(a, b, equal_nan=True)


def together(tables: list[pa.Table]) -> tuple[pa.Table, list[str]]:
    """Concatenates the columns of all commits. Returns the table and the names of columns converted to text.

    Columns with incompatible types are converted to text. They occur only in journals of earlier releases.
    """
    import pyarrow as pa

    schema: pa.Schema | None = None
    mixed: dict[str, None] = {}
    for table in tables:
        if schema is None:
            schema = table.schema
            continue
        for field in table.schema:
            if field.name not in schema.names:
                schema = schema.append(field)
                continue
            at = schema.get_field_index(field.name)
            made = None if field.name in mixed else _merged_field(schema.field(at), field, wide=True)
            if made is None:
                mixed[field.name] = None
                made = pa.field(field.name, pa.string())
            schema = schema.set(at, made)
    assert schema is not None
    parts = []
    for table in tables:
        for name in mixed:
            if name in table.column_names:
                at = table.schema.get_field_index(name)
                table = table.set_column(at, name, as_text(table[name]))  # noqa: PLW2901 -- the same table
        try:
            parts.append(cast(table, schema, 0))
        except ActshardError:
            raise
    return pa.concat_tables(parts), list(mixed)
