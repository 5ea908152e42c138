"""Blocks of rows whose columns are lists of numbers, as flat arrays: from Arrow's lists and from JSON lines.

A Python object per number, or a check per row, would take most of the time of a build. Whatever is no list of numbers stays a
single record, whose errors name its row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

NumberedRecord = tuple[int, Any]
"""A number, and a mapping or a problem."""
_AT_ONCE = 1 << 19
"""Bytes of JSON lines per block."""
_EXACT = 2.0**53
"""Smaller integers are exact as float64."""


@dataclass(frozen=True)
class ColumnBlock:
    """Consecutive rows.

    Attributes:
        elements: the numbers of all rows, by column.
        lengths: how many of them each row has, by column; int64.
        records: returns the rows before conversion; None: they are those of the arrays.
    """

    elements: Mapping[str, NDArray[np.generic]]
    lengths: Mapping[str, NDArray[np.int64]]
    records: Callable[[], list[NumberedRecord]] | None = None

    def rows(self, first: int) -> list[NumberedRecord]:
        """The rows one by one with their numbers, for messages about one of them. ``first`` is the number of the first."""
        if self.records is not None:
            return self.records()
        ends = {name: np.cumsum(lengths) for name, lengths in self.lengths.items()}
        columns = [np.split(numbers, ends[name][:-1]) for name, numbers in self.elements.items()]
        rows = (dict(zip(self.elements, row, strict=True)) for row in zip(*columns, strict=True))
        return list(enumerate(rows, first))


def of_arrow(batch: pa.RecordBatch | pa.Table) -> ColumnBlock | None:
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


def joined(
    lines: Iterable[tuple[int, bytes]], columns: Sequence[str], parse: Callable[[int, bytes], NumberedRecord]
) -> Iterator[NumberedRecord]:
    """Yields the records of lines with their numbers, consecutive ones with lists of numbers as blocks with the first number.

    Args:
        lines: number and bytes of each line.
        columns: keys of the records that are read.
        parse: returns number and record of a line.
    """
    block = _OpenBlock(columns, parse)
    for numbered in lines:
        number, line = numbered
        record = parse(number, line)[1]
        lists = _lists(record, line, columns)
        if lists is None or not block.add(numbered, lists):
            yield from block.close()
            if lists is None or not block.add(numbered, lists):
                yield number, record
        elif block.bytes >= _AT_ONCE:
            yield from block.close()
    yield from block.close()


def _lists(record: object, line: bytes, columns: Sequence[str]) -> list[list[object]] | None:
    """The lists of a record; None if a column is no list, or contains true or false, which arrays take for numbers."""
    if not isinstance(record, dict):
        return None
    lists = [value for name in columns if type(value := record.get(name)) is list]
    if len(lists) < len(columns):
        return None
    # One byte is found many times faster than a word, and lines of integers have no "e".
    has_booleans = b"e" in line and (b"true" in line or b"false" in line)
    return None if has_booleans and any(bool in set(map(type, values)) for values in lists) else lists


def _holds(kind: str, values: list[Any]) -> bool:
    """Whether an array of a type holds numbers."""
    try:
        array(kind).fromlist(values)
    except (TypeError, OverflowError):
        return False
    return True


class _OpenBlock:
    """Rows of lines. Numbers are converted line by line, while they are in the processor's cache, and only lines are kept."""

    def __init__(self, columns: Sequence[str], parse: Callable[[int, bytes], NumberedRecord]) -> None:
        self._columns = columns
        self._parse = parse
        self._begin()

    def _begin(self, kinds: str = "") -> None:
        """Begins a block with these types of arrays, by default of integers."""
        arrays = [array(kind) for kind in kinds or "q" * len(self._columns)]
        self._arrays: dict[str, array[Any]] = dict(zip(self._columns, arrays, strict=True))
        self._lengths: dict[str, list[int]] = {name: [] for name in self._columns}
        self._appending = [(self._arrays[name].fromlist, self._lengths[name].append) for name in self._columns]
        self._lines: list[tuple[int, bytes]] = []
        self.bytes = 0

    def add(self, numbered: tuple[int, bytes], lists: Sequence[list[Any]]) -> bool:
        """Adds the row of a line. Returns False if its numbers do not fit those of the block; or none, if the block is empty."""
        try:
            for (extend, append), values in zip(self._appending, lists, strict=True):
                extend(values)
                append(len(values))
        except (TypeError, OverflowError):
            return self._undo() and self._begin_with(lists) and self.add(numbered, lists)
        self._lines.append(numbered)
        self.bytes += len(numbered[1])
        return True

    def _undo(self) -> bool:
        """Removes the columns of a row that is not added. Returns whether the block is empty and of integers."""
        for name, lengths in self._lengths.items():
            del lengths[len(self._lines) :]
            del self._arrays[name][sum(lengths) :]
        return not self._lines and all(numbers.typecode == "q" for numbers in self._arrays.values())

    def _begin_with(self, lists: Sequence[list[Any]]) -> bool:
        """Begins a block whose arrays hold the numbers of a row. Returns False if none can."""
        kinds = ""
        for values in lists:
            kind = next((kind for kind in "qd" if _holds(kind, values)), None)
            if kind is None:
                return False
            kinds += kind
        self._begin(kinds)
        return True

    def close(self) -> Iterator[NumberedRecord]:
        """Yields the rows so far, as a block if its numbers equal those that numpy makes of each list, and begins the next."""
        lines, lengths = self._lines, self._lengths
        elements = {name: np.frombuffer(numbers, numbers.typecode) for name, numbers in self._arrays.items()}
        self._begin()
        if not lines:
            return
        inexact = any(
            n.dtype.kind == "f" and n.size and not np.abs(n).max() < _EXACT for n in elements.values()
        )  # NaN, too

        def records() -> list[NumberedRecord]:
            return [self._parse(number, line) for number, line in lines]

        if inexact:
            yield from records()
        else:
            counts = {name: np.array(n, np.int64) for name, n in lengths.items()}
            yield lines[0][0], ColumnBlock(elements, counts, records)
