"""The sample: which rows, and how they are read.

Rows that may be chosen are counted 0 to N - 1 in stored order, example after example. The sample has one of each of n equal ranges
of these numbers, at a place that splitmix64 of the seed chooses. So it is spread over the whole dataset, has no row twice, is
ascending, needs no memory per row of the dataset, and depends on N, n and the seed only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard import _arguments
from actshard.choosing import scrambled
from actshard.layers import Layer
from actshard.stream.readable import Readable

RowsRead = Callable[[int, int], object]
"""Called with the rows read so far and their total."""
MOST = 1 << 24
"""Most rows of a sample."""
_BLOCK = 32 << 20
"""Bytes that are read at a time."""


@dataclass(frozen=True, eq=False)
class Places:
    """Rows of a sample, in stored order.

    Attributes:
        examples, tokens: ``(n,)`` int64.
        total: rows that the sample was chosen from.
    """

    examples: NDArray[np.int64]
    tokens: NDArray[np.int64]
    total: int

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, part: Any) -> Places:
        return Places(self.examples[part], self.tokens[part], self.total)


def spread(total: int, count: int, seed: int) -> NDArray[np.int64]:
    """``count`` numbers below ``total``, ascending, one of each of ``count`` equal ranges; all if there are fewer."""
    if count >= total:
        return np.arange(total)
    size, rest = divmod(total, count)
    i = np.arange(count + 1, dtype=np.int64)
    edges = i * size + i * rest // count  # i * total // count, without overflow
    fraction = (scrambled(count, seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    wide = np.diff(edges)
    return np.asarray(edges[:-1] + np.minimum((fraction * wide).astype(np.int64), wide - 1), np.int64)


def places(selection: tuple[Any, ...], num_examples: int, count: int, seed: int) -> Places:
    """A sample of the rows of a selection, as :func:`~actshard.stream.selection.select` returns it."""
    if len(selection) == 1:  # one token of each example, or none (-1)
        some = np.flatnonzero(selection[0] >= 0)
        chosen = some[spread(len(some), count, seed)]
        return Places(chosen, selection[0][chosen], len(some))
    first, counts = selection[:2]
    if not isinstance(counts, np.ndarray):
        total = num_examples * int(counts)
        flat = spread(total, count, seed)
        example, token = np.divmod(flat, max(int(counts), 1))
        return Places(example, token + first, total)
    ends = np.cumsum(counts)
    if len(selection) == 3:
        some = np.flatnonzero(selection[2])
        total, flat = len(some), some[spread(len(some), count, seed)]
    else:
        total = int(ends[-1]) if len(ends) else 0
        flat = spread(total, count, seed)
    example = np.searchsorted(ends, flat, side="right")
    return Places(example, first + flat - (ends - counts)[example], total)


def thinned(selection: tuple[Any, ...], num_examples: int, count: int, seed: int) -> tuple[Any, ...]:
    """The selection of the rows that :func:`places` returns: one flag for each row that may be chosen."""
    if len(selection) == 1:
        some = np.flatnonzero(selection[0] >= 0)
        tokens = np.full(num_examples, -1, selection[0].dtype)
        chosen = some[spread(len(some), count, seed)]
        tokens[chosen] = selection[0][chosen]
        return (tokens,)
    first, counts = selection[:2]
    counts = np.broadcast_to(np.asarray(counts, np.int64), num_examples)
    total = int(counts.sum())
    flags = np.zeros(total, bool)
    if len(selection) == 3:
        some = np.flatnonzero(selection[2])
        flags[some[spread(len(some), count, seed)]] = True
    else:
        flags[spread(total, count, seed)] = True
    return first, np.ascontiguousarray(counts), flags


def exact(store: Readable) -> np.dtype[Any]:
    """The narrowest of float32 and float64 that has all values of the stored dtype.

    Integers and other types that gathers cannot convert are refused by the gather.
    """
    wide = store.contents.types_may_differ or store.dtype.itemsize > 4
    return np.dtype(np.float64 if wide else np.float32)


def blocks(store: Readable, layer: Layer, at: Places) -> Iterator[tuple[int, NDArray[Any]]]:
    """The rows of a sample in blocks ``(b, d_model)``, each with the number of its first row."""
    dtype = exact(store)
    step = max(1, _BLOCK // max(1, store.d_model * dtype.itemsize))
    for start in range(0, len(at), step):
        part = at[start : start + step]
        yield start, store.gather(layer, part.examples, part.tokens, dtype=dtype)


def exponent(rows: NDArray[Any]) -> int:
    """The power of two that the largest magnitude of finite rows is divided by, so that squares do not overflow."""
    largest = max(float(rows.max(initial=0)), -float(rows.min(initial=0)))
    return int(np.frexp(largest)[1]) if largest > 0 else 0


def count_of(value: Any, what: str, least: int = 1) -> int:
    """A checked number of rows, examples or directions."""
    return _arguments.whole(value, what, least, MOST)


def number(value: float) -> float | None:
    """A JSON value: NaN and infinite ones are null."""
    return float(value) if np.isfinite(value) else None


def numbers(values: NDArray[Any]) -> list[Any]:
    """JSON values of an array of one or two dimensions."""
    listed: list[Any] = values.tolist()
    return [[number(x) for x in row] if isinstance(row, list) else number(row) for row in listed]
