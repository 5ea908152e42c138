"""Columns with one value per token: token ids, masks. They are read like rows, with one element each.

The columns of a store are lists, one per example, with as many values as the example has stored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from actshard.errors import NotStoredError

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard._native import Rows

_EXAMPLES = 1 << 16
"""Number of examples whose lengths are looked at together."""
_VALUES = 1 << 24
"""Values of a column that are read at once, unless one example has more."""


class TokenColumns:
    """Reads per-token columns of a dataset's examples.

    Args:
        rows: by name of the column: rows of one element, with one group.
        n: number of examples.
        path: the dataset, for errors.
    """

    def __init__(self, rows: Mapping[str, Rows], n: int, path: Path) -> None:
        self._rows = dict(rows)
        self._n = n
        self._path = path

    @property
    def names(self) -> tuple[str, ...]:
        """The columns, in order."""
        return tuple(self._rows)

    def columns(self, wanted: Sequence[str]) -> pa.Table:
        """Reads columns of all examples.

        Raises:
            NotStoredError: there is no such column.
        """
        return self.head(wanted, self._n)

    def head(self, wanted: Sequence[str], n: int) -> pa.Table:
        """Reads columns of the first n examples."""
        import pyarrow as pa

        self._check(wanted)
        parts = list(self._batches(wanted, min(n, self._n)))
        return pa.concat_tables(parts) if parts else self._read(wanted, 0, 0)

    def batches(self, wanted: Sequence[str]) -> Iterator[pa.Table]:
        """Reads columns of all examples in order, in batches of bounded size."""
        self._check(wanted)
        return self._batches(wanted, self._n)

    def _check(self, wanted: Sequence[str]) -> None:
        for name in wanted:
            if name not in self._rows:
                raise NotStoredError(f"has no column {name!r}; columns are {', '.join(self._rows)}", path=self._path)

    def _batches(self, wanted: Sequence[str], n: int) -> Iterator[pa.Table]:
        one = next(iter(self._rows.values()), None)
        for start in range(0, n, _EXAMPLES):
            stop = min(start + _EXAMPLES, n)
            if one is None or not wanted:
                yield self._read(wanted, start, stop)
                continue
            ends = np.cumsum(one.tokens_of(0, np.arange(start, stop)))
            first = start
            while first < stop:
                before = int(ends[first - start - 1]) if first > start else 0
                last = start + int(np.searchsorted(ends, before + _VALUES, side="right"))
                last = min(max(last, first + 1), stop)
                yield self._read(wanted, first, last)
                first = last

    def _read(self, wanted: Sequence[str], first: int, last: int) -> pa.Table:
        import pyarrow as pa

        numbers = np.arange(first, last)
        made = {}
        for name in wanted:
            rows = self._rows[name]
            values = rows.gather_whole(0, numbers, None, None).reshape(-1)
            ends = np.cumsum(rows.tokens_of(0, numbers))
            large = values.size >= 1 << 31
            kind = pa.LargeListArray if large else pa.ListArray
            offsets = np.concatenate([[0], ends]).astype(np.int64 if large else np.int32)
            made[name] = kind.from_arrays(offsets, pa.array(values))
        if not made:  # a table of no columns still has a length, which only a column gives it
            return pa.table({"": pa.nulls(last - first)}).select([])
        return pa.table(made)
