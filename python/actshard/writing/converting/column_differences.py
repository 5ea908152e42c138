"""Compares the columns of a conversion's result with those of its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard.formats.target import LOGITS, PATCH_LABELS, ROUTER, Target, arrays_in
from actshard.reading.store import Store
from actshard.writing.converting.columns import Columns
from actshard.writing.proving import is_separate, plain_values, read_columns

if TYPE_CHECKING:
    import pyarrow as pa


class ColumnComparison:
    """The columns of a result, to be compared with those of its source, block by block.

    Columns that the format changes (:attr:`Columns.turned`) are losses and not compared, nor are those of formats with a fixed set
    of columns (:attr:`Target.only_columns`).
    """

    def __init__(self, target: Target, result: Store, columns: Columns) -> None:
        self._target, self._result, self._columns = target, result, columns
        self._is_compared = target.only_columns is None
        names = list(result.contents.column_names) if self._is_compared and target.holds_columns else []
        self._stored: Mapping[str, pa.ChunkedArray] = read_columns(target, result.contents, names) if names else {}

    def difference(self, ids: NDArray[np.int64], unit: int | None, places: NDArray[np.int64]) -> str | None:
        """The first difference in some examples; None if they are equal.

        Args:
            ids: examples of the source.
            unit: the shard that contains them, as for :meth:`Columns.of`.
            places: their numbers in the result.
        """
        if not self._is_compared:
            return None
        table = self._columns.of(ids, unit, self._target)
        if table is None:
            return None
        for name in table.column_names:
            if name in self._columns.turned:
                continue
            if is_separate(self._target, name):
                where = self._array_difference(table, name, places)
            else:
                where = self._value_difference(name, table[name], places)
            if where is not None:
                return where
        return None

    def _value_difference(self, name: str, column: pa.ChunkedArray, places: NDArray[np.int64]) -> str | None:
        import pyarrow as pa

        if name not in self._stored:
            # Empty columns need no place in formats that find their columns in files.
            return None if column.null_count == len(column) else f"column {name!r} is missing"
        stored = self._stored[name].take(pa.array(places))
        if column.type.equals(stored.type) and column.equals(stored):
            return None
        before, after = plain_values(column), plain_values(stored)
        if before == after:
            return None
        i = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        return f"example {int(places[i])}, column {name!r}: expected {column[i].as_py()!r:.60}, found {stored[i].as_py()!r:.60}"

    def _array_difference(self, table: pa.Table, name: str, places: NDArray[np.int64]) -> str | None:
        array = arrays_in(table, name)
        if name == PATCH_LABELS:
            labels = self._result.labels
            stored = None if labels is None else labels[places]
        elif name in LOGITS:
            stored = self._result.logits(places)[LOGITS.index(name)]
        else:
            stored = self._result.router(int(name.removeprefix(ROUTER)), places)
        if (
            stored is not None
            and array.shape == stored.shape
            and array.tobytes() == stored.astype(array.dtype).tobytes()
        ):
            return None
        return f"{name} of examples {int(places[0])} to {int(places[-1])} differ"
