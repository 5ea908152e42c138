"""Column types of a dataset that is being written. The first examples fix the types of all later ones.

Unsupported columns are refused on append, because it would be too late to correct them when the dataset is finished.
A type that has only had null values, also inside lists and dicts, is still undetermined. A dict may get new fields.
"""

from __future__ import annotations

import contextlib
import decimal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard.base.errors import ArgumentError
from actshard.base.location import Location
from actshard.base.work import existing_above
from actshard.formats.contents import Contents, Options
from actshard.formats.tables import (
    IncompatibleTypesError,
    as_schema,
    cast_exactly,
    common_schema,
    is_list,
    leaf_types,
    leaves,
)
from actshard.formats.target import LOGITS, PATCH_LABELS, PREVIEW, ROUTER, TEXTS, AllExamples, Block, Target

if TYPE_CHECKING:
    import pyarrow as pa


# Proves which columns a format changes: writes examples to a scratch folder, reads them back, and compares.
#
# The examples have values of the columns' types, not of the dataset, so that the result does not depend on which come first.
# Columns in which the format refuses them, such as labels of a limited range, have values of the dataset.


_EXAMPLES = 3
_EXACT = decimal.Context(prec=decimal.MAX_PREC, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
_MOST_KNOWN = 256
_known: dict[tuple[type[Target], str], dict[str, str]] = {}
"""Results by format, settings and schema, if they do not depend on values of the dataset."""


def changed_columns(target: Target, table: pa.Table) -> dict[str, str]:
    """Columns whose values or kinds of type the format changes, each with a description.

    Args:
        target: a target whose settings are known.
        table: some examples with the dataset's schema.

    Raises:
        ArgumentError: the format cannot store a type, or different values of a column would become equal.
    """
    # Formats with a fixed set of columns check their types themselves.
    if target.only_columns is not None or not target.holds_columns or not table.num_columns or not len(table):
        return {}
    examples = table.slice(0, _EXAMPLES)
    examples = examples.take(np.arange(_EXAMPLES) % len(examples))
    is_general = True
    for i, field in enumerate(table.schema):
        for candidate in _candidates(field.type, len(examples)):
            trial = examples.set_column(i, field, candidate)
            with contextlib.suppress(ArgumentError):  # values that the format refuses cannot be changed
                target.check_values(trial, 0)
                examples = trial
                break
        else:
            is_general = False
    types = [(field.name, str(field.type), field.metadata) for field in table.schema]
    key = (type(target), repr((target.spec.layers, target.spec.options, target.tokens, types)))
    if not is_general or key not in _known:
        changes = _changes(target, examples)
        if not is_general:
            return changes
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = changes
    return _known[key]


def _changes(target: Target, table: pa.Table) -> dict[str, str]:
    import tempfile  # not needed to import actshard

    import pyarrow as pa

    try:
        parent = Path(tempfile.gettempdir())
    except OSError:  # no folder of temporary files can be written
        parent = existing_above(target.root)
    with tempfile.TemporaryDirectory(prefix=".actshard-columns-", dir=parent) as scratch:
        try:
            stored_columns = _read_back(target, table, Path(scratch) / "d")
        except pa.ArrowException as error:
            text = " ".join(str(error).split())
            raise ArgumentError(f"columns: {target.format} cannot store the type of a column: {text}") from error
    changes = {}
    for name in table.column_names:
        if is_separate(target, name):
            continue
        stored_column = stored_columns.get(name)
        change = "is not stored" if stored_column is None else _change(name, table[name], stored_column)
        if change is not None:
            changes[name] = f"{name}: {change}"
    return changes


def is_separate(target: Target, name: str) -> bool:
    """Whether the format stores arrays of this name, not a column."""
    return (target.holds_logits and (name in LOGITS or name.startswith(ROUTER))) or (
        target.holds_labels and name == PATCH_LABELS
    )


def _read_back(target: Target, table: pa.Table, folder: Path) -> Mapping[str, object]:
    """Columns of a dataset of these examples with rows of one element, as read from its files."""
    spec = replace(target.spec, path=folder, d_model=1, num_examples=None, part=None, whole=None, shard_bytes=None)
    spec = replace(spec, options=target.column_options)
    small = type(target)(spec)
    small.adopt(target.config())
    small.dtype = small.dtype or np.dtype(np.float32)
    most = target.most_tokens
    tokens = target.tokens or (2 if most is None else min(2, most[0]))
    lengths = np.full((len(table), len(spec.layers)), tokens, np.int64)
    block = Block(np.zeros((int(lengths.sum()), 1), small.dtype), lengths, table)
    folder.mkdir(parents=True)
    small.settle(block)
    small.write(block)
    small.dirty()
    small.committed()
    small.finish(AllExamples(lengths, table))
    location = Location.at(small.place())
    contents = formats.get(target.format).open(location, Options.of(location))
    names = [name for name in TEXTS if name in table.column_names][:1]
    return read_columns(target, contents, list(contents.column_names), names)


def read_columns(
    target: Target, contents: Contents, names: Sequence[str], texts: Sequence[str] = TEXTS
) -> dict[str, pa.ChunkedArray]:
    """Columns of a dataset of the target's format as other formats see them, by name; the text also under ``texts``' names."""
    table = formats.get(target.format).carrying().outgoing(contents.columns(names))
    columns = {name: table[name] for name in table.column_names}
    text = next((columns[name] for name in (target.text_column, PREVIEW) if name in columns), None)
    return columns if text is None else {**dict.fromkeys(texts, text), **columns}


# -- values --------------------------------------------------------------------------------------------------------


def _candidates(kind: pa.DataType, n: int) -> Iterator[pa.ChunkedArray]:
    """Columns of values of a type: first the most unusual, such as bytes with NUL; some formats refuse these."""
    import pyarrow as pa

    for unusual in (2, 1, 0):
        try:
            yield pa.chunked_array([_repeat(_sample_values(kind, unusual), n)], kind)
        except (pa.ArrowException, TypeError, ValueError):
            return


def _repeat(values: pa.Array, n: int) -> pa.Array:
    import pyarrow as pa

    return pa.concat_arrays([values] * -(-n // len(values)))[:n]


def _sample_values(kind: pa.DataType, unusual: int) -> pa.Array:
    """Three different values of a type; of types with fewer, all."""
    import pyarrow as pa

    is_ = pa.types
    if is_.is_struct(kind):
        parts = [_repeat(_sample_values(field.type, unusual), 3) for field in kind]
        return pa.StructArray.from_arrays(parts, fields=list(kind)) if parts else pa.array([{}], kind)
    if is_.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(
            _repeat(_sample_values(kind.value_type, unusual), 3 * kind.list_size), type=kind
        )
    if is_list(kind):
        return pa.array([[value] for value in _sample_values(kind.value_type, unusual)], kind)
    if is_.is_map(kind):
        keys, items = (_repeat(_sample_values(t, unusual), 3) for t in (kind.key_type, kind.item_type))
        return pa.MapArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), keys, items, kind)
    if is_.is_fixed_size_binary(kind):
        codes = (0xFF, 0x5C, 0x61) if unusual else (0x61, 0x62, 0x63)
        return pa.array([bytes([code]) * kind.byte_width for code in codes], kind)
    if is_.is_binary(kind) or is_.is_large_binary(kind):
        last = (b"", b"a", b"\x00a")[unusual]
        return pa.array([b"\xff", b"\\xff", last] if unusual else [b"a", b"b", last], kind)
    if is_.is_string(kind) or is_.is_large_string(kind):
        return pa.array(["a", "\u00e9\n", "\\xff"], kind)
    if is_.is_boolean(kind):
        return pa.array([True, False])
    if is_.is_null(kind):
        return pa.nulls(1)
    if is_.is_floating(kind):
        return pa.array([0.5, float("inf"), float("nan")] if unusual else [0.5, 1.0, 2.0]).cast(kind, safe=False)
    if is_.is_temporal(kind):
        numbers = pa.int64() if kind.bit_width == 64 else pa.int32()
        # Whole microseconds, because Python has no nanoseconds. Days of date64 have 86,400,000 ms.
        step = 86_400_000 if is_.is_date64(kind) else 1000
        return pa.array([0, step, 2 * step], numbers).view(kind)
    if is_.is_decimal(kind):
        # Digits after the point, and as many digits as there can be: whole numbers and those of 38 digits may be stored otherwise.
        numbers = (0, 1, 10**kind.precision - 1 if unusual else 2)
        return pa.array([decimal.Decimal(number).scaleb(-kind.scale, _EXACT) for number in numbers], kind)
    bits = kind.bit_width - is_.is_signed_integer(kind)
    low = -(1 << bits) if is_.is_signed_integer(kind) else 0
    return pa.array([low, 1, (1 << bits) - 1] if unusual else [0, 1, 2], kind)


def _change(name: str, original: pa.ChunkedArray, stored: pa.ChunkedArray) -> str | None:
    """How values or the kind of their type differ; None if they do not.

    Raises:
        ArgumentError: different values became equal.
    """
    if original.type.equals(stored.type) and original.equals(stored):
        return None
    before, after = plain_values(original), plain_values(stored)
    if before == after:
        return None
    if len({repr(v) for v in before}) > len({repr(v) for v in after}):
        raise ArgumentError(
            f"columns: {name!r}: expected a type that the format can store, found {original.type}, of which different values would "
            f"be equal as {stored.type}. Convert the values."
        )
    same = original.type.equals(stored.type)
    return f"values of {original.type} change" if same else f"{original.type} becomes {stored.type}"


def plain_values(column: pa.Array | pa.ChunkedArray) -> list[object]:
    """Values as Python's, so that those of types that differ in width only are equal, and True is not 1."""
    import pyarrow as pa

    if pa.types.is_temporal(column.type):
        number = pa.int64() if column.type.bit_width == 64 else pa.int32()
        return [(str(column.type), v) for v in column.cast(number).to_pylist()]
    return [_mark_types(value) for value in column.to_pylist()]


def _mark_types(value: object) -> object:
    if isinstance(value, float):
        return ("float", repr(value))
    if isinstance(value, bool | bytes):
        return (type(value).__name__, value)
    if isinstance(value, list):
        return [_mark_types(v) for v in value]
    if isinstance(value, dict):
        return {k: _mark_types(v) for k, v in value.items()}
    return value


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
