"""Types of the inputs' columns over all records: the first window would fix them, and later ones could not be stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from actshard.base.errors import ArgumentError
from actshard.formats.tables import IncompatibleTypesError, cast_exactly, common_schema
from actshard.writing.columns import plain
from actshard.writing.given import table_of


class ColumnTypes:
    """Types that hold the values of all records, column by column."""

    def __init__(self) -> None:
        self._types: dict[str, pa.DataType] = {}
        self._problems: dict[str, str] = {}

    def add(self, rows: Sequence[Mapping[str, object]], first: int, names: Iterable[str]) -> None:
        """Adds the values of records, numbered from ``first``, in these columns."""
        for name in names:
            if name in self._problems:
                continue
            column_type = self._types.get(name, pa.null())
            try:
                kind = column_of(name, [row.get(name) for row in rows]).type
                common = common_schema(pa.schema([(name, column_type)]), pa.schema([(name, kind)]))
            except IncompatibleTypesError:
                self._problems[name] = (
                    f"columns: {name!r}: expected values of one type, found {column_type} and, from record {first}, {kind}"
                )
            except ArgumentError as error:
                self._problems[name] = f"{error.detail} (records from {first})"
            else:
                self._types[name] = common.field(name).type

    def of(self, names: Iterable[str]) -> dict[str, pa.DataType]:
        """Types of columns. Raises ArgumentError for one whose values have no common type."""
        for name in names:
            if name in self._problems:
                raise ArgumentError(f"{self._problems[name]}. Convert them, or leave the column out with columns=[...]")
        return {name: self._types[name] for name in names if name in self._types}


def column_of(name: str, values: list[object], kind: pa.DataType | None = None) -> pa.ChunkedArray:
    """A column as a writer would store it, or cast to a type. Raises ArgumentError for values without a common type."""
    table = table_of({name: values}, None, None, None, len(values))
    assert table is not None
    column = plain(table)[name]
    try:
        return column if kind is None else cast_exactly(column, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"columns: {name!r}: expected values of the type {kind}: {error}") from error
