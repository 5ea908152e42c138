"""Positions of tokens in their examples: which of an example's stored tokens are content."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from actshard._native import Rows
    from actshard.streaming.readable import Readable


def content_range(
    store: Readable, stored: NDArray[np.int64], examples: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first content token and the end of the content of each example, two int64 arrays in the shape of ``stored``.

    Special tokens come before the content, padding after it. An example without content has two equal numbers.

    Args:
        store: the store.
        stored: numbers of stored tokens of these examples, in the layer that is read.
        examples: their example numbers; None: ``stored`` is of all examples.
    """
    first = np.minimum(stored, store.special_tokens)
    lengths = store.content_lengths
    if lengths is None:
        return first, stored
    return first, np.minimum(stored, store.special_tokens + (lengths if examples is None else lengths[examples]))


def tokens_anywhere(rows: Rows, layers: int, examples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of stored tokens of these examples, each in the first layer in which it has any; for stores whose layers differ."""
    counts = np.zeros(len(examples), np.int64)
    for group in range(layers):
        unknown = np.flatnonzero(counts == 0)
        if len(unknown):
            counts[unknown] = rows.tokens_of(group, np.ascontiguousarray(examples[unknown], np.int64))
    return counts


def positions(stored: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each stored token's position in its example, example after example."""
    return np.arange(int(stored.sum())) - np.repeat(np.cumsum(stored) - stored, stored)
