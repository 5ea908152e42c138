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

from actshard.base import _arguments
from actshard.base.layers import Layer
from actshard.reading.choosing import scrambled
from actshard.streaming.readable import Readable
from actshard.streaming.rows import SelectedRows

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


def sample(rows: SelectedRows, count: int, seed: int) -> Places:
    """``count`` of these rows; all, if there are fewer."""
    return Places(*rows.locate(spread(rows.count, count, seed)), rows.count)


def exact(store: Readable) -> np.dtype[np.generic]:
    """The narrowest of float32 and float64 that has all values of the stored dtype.

    Integers and other types that gathers cannot convert are refused by the gather.
    """
    wide = store.contents.types_may_differ or store.dtype.itemsize > 4
    return np.dtype(np.float64 if wide else np.float32)


def blocks(store: Readable, layer: Layer, places: Places) -> Iterator[tuple[int, NDArray[np.generic]]]:
    """The rows of a sample in blocks ``(b, d_model)``, each with the number of its first row."""
    dtype = exact(store)
    step = max(1, _BLOCK // max(1, store.d_model * dtype.itemsize))
    for start in range(0, len(places), step):
        part = places[start : start + step]
        yield start, store.gather(layer, part.examples, part.tokens, dtype=dtype)


def exponent(rows: NDArray[np.generic]) -> int:
    """The power of two that the largest magnitude of finite rows is divided by, so that squares do not overflow."""
    largest = max(float(rows.max(initial=0)), -float(rows.min(initial=0)))
    return int(np.frexp(largest)[1]) if largest > 0 else 0


def count_of(value: object, what: str, least: int = 1) -> int:
    """A checked number of rows, examples or directions."""
    return _arguments.whole(value, what, least, MOST)


def number(value: float) -> float | None:
    """A JSON value: NaN and infinite ones are null."""
    return float(value) if np.isfinite(value) else None


def numbers(values: NDArray[np.generic]) -> list[object]:
    """JSON values of an array of one or two dimensions."""
    plain_values: list[Any] = values.tolist()
    return [[number(x) for x in row] if isinstance(row, list) else number(row) for row in plain_values]
