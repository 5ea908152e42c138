"""Blocks of rows whose columns are lists of numbers, as flat arrays: from Arrow's lists and from JSON lines.

A Python object per number, or a check per row, would take most of the time of a build. Whatever is no list of numbers stays a
single record, whose errors name its row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 1 << 16
"""Numbers per block of JSON lines."""
_EXACT = 2.0**53
"""Smaller integers are exact as float64."""


@dataclass(frozen=True)
class ColumnBlock:
    """Consecutive rows.

    Attributes:
        elements: the numbers of all rows, by column.
        lengths: how many of them each row has, by column; int64.
        records: the rows before conversion; None: those of the arrays.
    """

    elements: Mapping[str, NDArray[Any]]
    lengths: Mapping[str, NDArray[np.int64]]
    records: Sequence[Mapping[str, Any]] | None = None

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """The rows one by one, for messages about one of them."""
        if self.records is not None:
            return self.records
        ends = {name: np.cumsum(lengths) for name, lengths in self.lengths.items()}
        columns = [np.split(numbers, ends[name][:-1]) for name, numbers in self.elements.items()]
        return [dict(zip(self.elements, row, strict=True)) for row in zip(*columns, strict=True)]


def of_arrow(batch: Any) -> ColumnBlock | None:
    """The rows of a record batch; None if a column contains nulls, or anything but lists of numbers."""
    import pyarrow as pa

    elements, lengths = {}, {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = column.type
        is_fixed = pa.types.is_fixed_size_list(kind)
        if not (is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)) or column.null_count:
            return None
        flat = column.flatten()
        if flat.null_count or not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
            return None
        elements[name] = flat.to_numpy(zero_copy_only=False)
        lengths[name] = (
            np.full(len(column), kind.list_size, np.int64)
            if is_fixed
            else np.diff(column.offsets.to_numpy()).astype(np.int64)
        )
    return ColumnBlock(elements, lengths) if elements and len(batch) else None


def joined(lines: Iterable[tuple[int, bytes, Any]], columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yields the records of lines with their numbers, consecutive ones with lists of numbers as blocks with the first number.

    Args:
        lines: number, bytes and record of each line.
        columns: keys of the records that are read.
    """
    rows: list[tuple[int, Mapping[str, Any]]] = []
    size = 0
    for number, line, record in lines:
        lists = _lists(record, line, columns)
        if lists is not None:
            rows.append((number, record))
            size += sum(map(len, lists)) + 1
        if lists is None or size >= _AT_ONCE:
            yield from _block(rows, columns)
            rows, size = [], 0
        if lists is None:
            yield number, record
    yield from _block(rows, columns)


def _lists(record: Any, line: bytes, columns: Sequence[str]) -> list[list[Any]] | None:
    """The lists of a record; None if a column is no list, or contains true or false, which arrays take for numbers."""
    if not isinstance(record, dict):
        return None
    lists = [value for name in columns if type(value := record.get(name)) is list]
    if len(lists) < len(columns):
        return None
    has_booleans = b"true" in line or b"false" in line
    return None if has_booleans and any(bool in set(map(type, values)) for values in lists) else lists


def _block(rows: list[tuple[int, Mapping[str, Any]]], columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    if not rows:
        return
    elements = {name: _numbers([record[name] for _, record in rows]) for name in columns}
    if any(numbers is None for numbers in elements.values()):
        yield from rows
        return
    lengths = {name: np.fromiter((len(record[name]) for _, record in rows), np.int64, len(rows)) for name in columns}
    arrays = {name: numbers for name, numbers in elements.items() if numbers is not None}
    yield rows[0][0], ColumnBlock(arrays, lengths, [record for _, record in rows])


def _numbers(lists: Iterable[list[Any]]) -> NDArray[Any] | None:
    """The concatenated numbers, int64 or float64, equal to those that numpy makes of each list; None if it may be different."""
    flat: list[Any] = []
    for values in lists:
        flat += values
    try:
        return np.frombuffer(array("q", flat), np.int64)
    except (TypeError, OverflowError):
        pass
    try:
        numbers = np.frombuffer(array("d", flat), np.float64)
    except (TypeError, OverflowError):
        return None
    return numbers if not numbers.size or np.abs(numbers).max() < _EXACT else None  # NaN: not less
