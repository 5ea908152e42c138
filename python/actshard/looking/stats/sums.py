"""Sums over ranges of rows, which tasks of a plan make and its commit joins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base.layers import Layer
from actshard.looking.stats import Stats
from actshard.looking.stats.summary import Summary

_FLOATS = ("mean", "squares", "min", "max")
_COUNTS = ("finite", "nan", "infinite", "zeros")
SUMMED = np.dtype([(name, "<f8") for name in _FLOATS] + [(name, "<i8") for name in _COUNTS])
"""Sums of a column."""


class Sums:
    """Sums over a range of a layer's rows, which add up to the same bits however the rows were divided into ranges.

    Rows are divided into leaves of a fixed size. A range of leaves is kept as the largest nodes of a binary tree that lie in it:
    few arrays, whatever its length. See the core's ``stream/stats/tree.rs``.
    """

    def __init__(self, width: int, nodes: Sequence[dict[str, Any]] = ()) -> None:
        self.width = width
        self.nodes = list(nodes)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(int(node["rows"]) for node in self.nodes)

    @property
    def leaves(self) -> tuple[int, int]:
        """First leaf and end of the range."""
        if not self.nodes:
            return 0, 0
        last = self.nodes[-1]
        return int(self.nodes[0]["first"]), int(last["first"]) + (1 << int(last["level"]))

    def join(self, following: Sums) -> Sums:
        """The sums of this range and of the one that follows.

        Raises:
            ArgumentError: another range follows, or one of another width.
        """
        return Sums(self.width, _native.joined_sums([*self.nodes, *following.nodes]))

    def stats(self, layer: Layer | None = None) -> Stats:
        """The statistics, if these are the sums of all rows."""
        total = _native.total_sums(self.nodes)
        if total is None:
            start = {"min": np.inf, "max": -np.inf}
            total = {name: np.full(self.width, start.get(name, 0.0)) for name in _FLOATS}
            total |= {name: np.zeros(self.width, np.int64) for name in _COUNTS}
            total |= {"rows": 0, "norms": (0.0, 0), **Summary().as_sums()}
        return Stats.of(total, layer)

    def as_plain(self) -> tuple[list[list[Any]], NDArray[np.generic], list[dict[str, object]]]:
        """JSON values of each node, an array ``(nodes, width)`` of its columns, and JSON of its summary; see :meth:`of_plain`."""
        columns = np.empty((len(self.nodes), self.width), SUMMED)
        for node, row in zip(self.nodes, columns, strict=True):
            for name in (*_FLOATS, *_COUNTS):
                row[name] = node[name]
        records = [[n["first"], n["level"], n["rows"], float(n["norms"][0]).hex(), n["norms"][1]] for n in self.nodes]
        return records, columns, [Summary.of(node).as_plain() for node in self.nodes]

    @classmethod
    def of_plain(
        cls,
        records: Sequence[Sequence[Any]],
        columns: NDArray[np.generic],
        summaries: Sequence[Mapping[str, object]],
        width: int,
    ) -> Sums:
        """The sums of :meth:`as_plain`.

        Raises:
            ValueError, TypeError: the values are not those of sums of this width.
        """
        if columns.dtype != SUMMED or columns.shape != (len(records), width):
            raise ValueError(f"expected {len(records)} sums of {width} columns, found {columns.dtype} {columns.shape}")
        nodes: list[dict[str, object]] = []
        for (first, level, rows, norms, count), row, summary in zip(records, columns, summaries, strict=True):
            for number in (first, level, rows, count):
                if type(number) is not int or number < 0:
                    raise ValueError(f"expected a count, found {number!r:.80}")
            node: dict[str, object] = {"first": first, "level": level, "rows": rows}
            node["norms"] = (float.fromhex(norms), count)
            node |= Summary.of_plain(summary).as_sums()
            node |= {name: np.ascontiguousarray(row[name]) for name in (*_FLOATS, *_COUNTS)}
            nodes.append(node)
        return cls(width, nodes)
