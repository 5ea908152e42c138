"""Examples in windows, and windows in batches.

A window is what is in memory at once: its examples are computed in batches of similar length, and appended in their own order.
Windows depend only on the examples and the settings, never on where a capture resumes: a resumed one computes the same batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from actshard.writing.capturing.choosing import TokenChoice, TooShortError
from actshard.writing.capturing.encoding import Encodings, Example
from actshard.writing.capturing.records import Row

CELL = 4096
"""Windows begin anew at multiples of this number of examples: no earlier example needs to be encoded to find them."""
_MOST_PADDING = 1.25
"""Positions of a batch per token, at most: a window of few examples has lengths that differ."""
_UNPADDED = 8
"""A batch below this share of ``batch_tokens`` may have more padding: a small batch costs as much as a larger one."""
_PIECE = 256
"""Examples that are encoded at once."""
BATCHES_OF_A_WINDOW = 32
"""Token positions of a window, in batches: enough to sort by length, and little to lose."""


@dataclass(frozen=True)
class ChosenExample:
    """An example with the positions of its chosen tokens."""

    example: Example
    positions: NDArray[np.int64]

    @property
    def problem(self) -> str | None:
        """Why the example has no states; None: it has."""
        return self.example.problem


@dataclass(frozen=True)
class Limits:
    """Limits of a window.

    Attributes:
        tokens: token positions.
        rows: chosen rows, of all layers together as one.
    """

    tokens: int
    rows: int


def choose(example: Example, choice: TokenChoice) -> ChosenExample:
    """The example with its chosen tokens. One without any has a problem; one that lacks a position has no tokens, either."""
    none = np.zeros(0, np.int64)
    if example.problem is not None:
        return ChosenExample(example, none)
    try:
        positions = choice.positions(example)
    except TooShortError as error:
        bare = Example(example.number, example.text, none, none.astype(bool), None, example.columns, error.detail)
        return ChosenExample(bare, none)
    return ChosenExample(example if len(positions) else replace(example, problem="no token is chosen"), positions)


def windows(
    rows: Iterable[Row], encodings: Encodings, choice: TokenChoice, limits: Limits, first: int = 0
) -> Iterator[list[ChosenExample]]:
    """Yields windows of examples in their order. ``rows`` begin with number ``first``, a multiple of :data:`CELL`."""
    window: list[ChosenExample] = []
    tokens = count = 0
    for piece in _pieces(rows):
        for example in encodings.examples(piece, first):
            chosen = choose(example, choice)
            row_count = 1 if choice.has_mean else len(chosen.positions)
            is_full = tokens + len(chosen.example) > limits.tokens or count + row_count > limits.rows
            if window and (is_full or example.number % CELL == 0):
                yield window
                window, tokens, count = [], 0, 0
            window.append(chosen)
            tokens += len(chosen.example)
            count += row_count
        first += len(piece)
    if window:
        yield window


def _pieces(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while piece := list(itertools.islice(iterator, _PIECE)):
        yield piece


def batches(
    window: Sequence[ChosenExample], tokens: int, *, pads: bool, among: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """Yields indices of a window's examples as batches of at most ``tokens`` positions, the longest examples first.

    Args:
        window: examples; those without chosen tokens are in no batch.
        tokens: token positions of a batch, padding included. A longer example is a batch of its own.
        pads: whether examples of different lengths may share a batch.
        among: the indices to divide; None: all.
    """
    lengths = np.array([len(chosen.example) if len(chosen.positions) else 0 for chosen in window], np.int64)
    order = np.arange(len(window)) if among is None else np.array(among, np.int64)
    order = order[np.argsort(-lengths[order], kind="stable")]
    order = order[lengths[order] > 0]
    batch: list[int] = []
    content = 0
    for index in order.tolist():
        length = int(lengths[index])
        longest = int(lengths[batch[0]]) if batch else length
        positions = (len(batch) + 1) * longest
        is_padded = positions > tokens // _UNPADDED and positions > _MOST_PADDING * (content + length)
        if batch and (positions > tokens or is_padded or (longest > length and not pads)):
            yield batch
            batch, content = [], 0
        batch.append(index)
        content += length
    if batch:
        yield batch
