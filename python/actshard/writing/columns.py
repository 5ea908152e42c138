"""Column types of a dataset that is being written. The first examples fix the types of all later ones.

Unsupported columns are refused on append, because it would be too late to correct them when the dataset is finished.
A type that has only had null values, also inside lists and dicts, is still undetermined. A dict may get new fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard.base.errors import ArgumentError
from actshard.formats.tables import (
    IncompatibleTypesError,
    as_schema,
    cast_exactly,
    common_schema,
    leaf_types,
    leaves,
)
from actshard.writing.proving import changed_columns

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.target import Target

RESERVED = "actshard."
"""Prefix of column names that the journal's tables use."""
_RUNS = 16
"""Maximum number of sorted runs of identifiers; more are merged into one."""


Extremes = dict[tuple[str, ...], "pa.Array"]
"""Minimum and maximum of each column of integers or times, by name; inside dicts and lists by the names of their fields, too."""


@dataclass(frozen=True)
class Fitted:
    """Checked columns of some examples, and the schema and identifiers that :meth:`Decided.keep` will record."""

    table: pa.Table | None
    schema: pa.Schema
    ids: NDArray[np.int64] | None
    extremes: Extremes
    changes: Mapping[str, str]
    """Columns that the format stores as another type, with a description; only those of a new schema."""


class Decided:
    """Schema and identifiers of a dataset's columns. :meth:`fit` only checks; :meth:`keep` records."""

    def __init__(self, target: Target, tables: Iterable[pa.Table]) -> None:
        """Starts from the tables that were committed before."""
        import pyarrow as pa

        self._target = target
        self._schema: pa.Schema | None = None
        self._ids: list[NDArray[np.int64]] = []
        self._extremes: Extremes = {}
        self.changes: dict[str, str] = {}
        """Columns that the format stores as another type, with a description."""
        for table in tables:
            user_table = table.drop_columns([c for c in table.column_names if c.startswith(RESERVED)])
            self._schema = user_table.schema if self._schema is None else common_schema(self._schema, user_table.schema)
            self._extremes = _extremes_with(self._extremes, user_table)
            if target.unique is not None and target.unique in user_table.column_names:
                column = user_table[target.unique]
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
        earlier_schema = self._schema
        schema = pa.schema([]) if table is None else table.schema
        if earlier_schema is not None and alike and set(schema.names) != set(earlier_schema.names):
            raise ArgumentError(
                f"columns: expected {sorted(earlier_schema.names)}, as before, found {sorted(schema.names)}"
            )
        try:
            schema = schema if earlier_schema is None else common_schema(earlier_schema, schema, narrow=alike)
        except IncompatibleTypesError as error:
            raise ArgumentError(
                f"columns: {error.name!r}: expected {error.known}, as before, found {error.other}. A column has one type: convert "
                "the values, or use another name."
            ) from error
        is_new = earlier_schema is None or schema != earlier_schema
        if is_new:
            self._target.check_columns(schema)
            self._check_earlier(schema, first)
        if table is not None:
            table = cast(table, schema, first)
            self._target.check_values(table, first)
        changes = changed_columns(self._target, table) if is_new and table is not None else {}
        # Appended columns keep their types; only those of conversions get wider.
        extremes = self._extremes if table is None or alike else _extremes_with(self._extremes, table)
        return Fitted(table, schema, self._new_ids(table, first), extremes, changes)

    def _check_earlier(self, schema: pa.Schema, first: int) -> None:
        """Raises ArgumentError if a column's wider type cannot represent the values of earlier examples exactly."""
        import pyarrow as pa

        kinds = dict(leaf_types(schema))
        for path, ends in self._extremes.items():
            try:
                ends.cast(kinds[path])
            except pa.ArrowException as error:
                raise ArgumentError(
                    f"columns: {path[0]!r}, from example {first}: expected {ends.type}, as before, found values of another type; "
                    f"{kinds[path]} cannot represent both exactly: {error}"
                ) from error

    def keep(self, fitted: Fitted) -> None:
        """Records the schema and identifiers of examples that are now part of the dataset."""
        self._schema, self._extremes = fitted.schema, fitted.extremes
        self.changes |= fitted.changes
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
        duplicates = ids[1:][ids[1:] == ids[:-1]]
        for run in self._ids:
            if duplicates.size or not len(run) or not len(ids) or ids[0] > run[-1] or ids[-1] < run[0]:
                continue
            indices = np.minimum(np.searchsorted(run, ids), len(run) - 1)
            duplicates = ids[run[indices] == ids]
        if duplicates.size:
            raise ArgumentError(f"{name}: expected distinct integers, found {int(duplicates[0])} twice")
        return ids


def plain(table: pa.Table) -> pa.Table:
    """Decodes dictionary, run-end-encoded, view and extension columns into plain values, inside dicts and lists, too.

    Raises:
        ArgumentError: pyarrow cannot decode a column.
    """
    fields = [field.with_type(_plain_type(field.type)) for field in table.schema]
    if all(a.type == b.type for a, b in zip(fields, table.schema, strict=True)):
        return table
    import pyarrow as pa

    columns = []
    for field, column in zip(fields, table.columns, strict=True):
        try:
            columns.append(cast_exactly(_decode(column), field.type))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ArgumentError(
                f"columns: {field.name!r}: expected a type that pyarrow casts to {field.type}, found {column.type}: {error}. Cast "
                "the column"
            ) from error
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _decode(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column without run ends, and its dictionaries without views: pyarrow has no casts from these."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_run_end_encoded(kind):
        return pa.chunked_array([pc.run_end_decode(chunk) for chunk in column.chunks], kind.value_type)
    if not pa.types.is_dictionary(kind) or _plain_type(kind.value_type) == kind.value_type:
        return column
    kind = pa.dictionary(kind.index_type, _plain_type(kind.value_type), kind.ordered)
    chunks = [
        pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(kind.value_type), ordered=kind.ordered)
        for chunk in column.chunks
    ]
    return pa.chunked_array(chunks, kind)


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
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_decimal(kind) and kind.scale == 0:
        # Integers beyond 64 bits: the maximum precision, since later values may have more digits.
        return pa.decimal128(38) if kind.precision <= 38 else pa.decimal256(76)
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    """A field of a dict or list. Its extension type stays: pyarrow has no casts from these; so do decimals."""
    import pyarrow as pa

    stays = isinstance(field.type, pa.BaseExtensionType) or pa.types.is_decimal(field.type)
    return field if stays else field.with_type(_plain_type(field.type))


def cast(table: pa.Table, schema: pa.Schema, first: int) -> pa.Table:
    """Casts a table to a schema and its column order. Missing columns are filled with nulls.

    Raises:
        ArgumentError: the column's type cannot represent a value exactly.
    """
    import pyarrow as pa

    if table.schema.equals(schema):
        return table
    for field in schema:
        if field.name not in table.column_names:
            continue
        column = table[field.name]
        try:
            cast_column = cast_exactly(column, field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(
                f"columns: {field.name!r}, from example {first}: expected {field.type}, as before, found {column.type} values that "
                f"it cannot represent exactly: {error}"
            ) from error
        table = table.set_column(table.schema.get_field_index(field.name), field, cast_column)
    return as_schema(table, schema)


def _extremes_with(earlier: Extremes, table: pa.Table) -> Extremes:
    """Extremes of earlier examples and of a table's."""
    import pyarrow as pa
    import pyarrow.compute as pc

    extremes = dict(earlier)
    for name, column in zip(table.column_names, table.columns, strict=True):
        for path, values in leaves(name, column):
            kind = values.type
            if not (pa.types.is_integer(kind) or pa.types.is_timestamp(kind)) or values.null_count == len(values):
                continue
            ends = list(pc.min_max(values).values())
            if path in earlier:
                ends = list(pc.min_max(pa.concat_arrays([earlier[path].cast(kind), pa.array(ends, kind)])).values())
            extremes[path] = pa.array(ends, kind)
    return extremes
