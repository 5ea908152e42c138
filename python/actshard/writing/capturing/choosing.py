"""Which tokens of an example are stored: all, the last one, the mean, positions, or those that a function returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actshard.base._arguments import flat, is_one_of
from actshard.base.errors import ArgumentError
from actshard.writing.capturing.encoding import Example, name_of_function

Chooser = Callable[[Example], object]
WORDS = ("all", "content", "last", "mean")


@dataclass(frozen=True)
class TokenChoice:
    """The chosen tokens.

    Attributes:
        description: as the request records it.
        has_mean: whether the one row of an example is the mean over its tokens.
        has_one_row: whether every example has one row.
    """

    description: str | list[int]
    has_mean: bool
    has_one_row: bool
    chooser: Chooser

    def positions(self, example: Example) -> NDArray[np.int64]:
        """``(n,)`` positions of the chosen tokens, from 0. Raises ArgumentError for positions that a function returns."""
        return _positions(self.chooser(example), example)

    def row_count(self, positions: NDArray[np.int64]) -> int:
        """Rows that an example with these chosen positions has."""
        return min(len(positions), 1) if self.has_mean else len(positions)


def choice_of(tokens: object) -> TokenChoice:
    """Returns the choice of a ``tokens=`` argument: one of :data:`WORDS`, positions, or a function of an :class:`Example`."""
    if is_one_of(tokens, WORDS):
        chooser = {"content": _content, "last": _last}.get(tokens, _all)
        return TokenChoice(tokens, tokens == "mean", tokens in ("last", "mean"), chooser)
    if isinstance(tokens, str):
        raise ArgumentError(f"tokens: expected {', '.join(WORDS)}, positions or a function, found {tokens!r:.80}")
    if callable(tokens):
        return TokenChoice(f"function {name_of_function(tokens)}", False, False, tokens)
    if isinstance(tokens, int | np.integer) and not isinstance(tokens, bool):
        tokens = [tokens]
    if isinstance(tokens, bytes) or not isinstance(tokens, Iterable):
        raise ArgumentError(f"tokens: expected {', '.join(WORDS)}, positions or a function, found {tokens!r:.80}")
    positions = flat(tokens, "tokens").tolist()
    if not positions or len(set(positions)) < len(positions):
        raise ArgumentError(f"tokens: expected different positions, found {positions!r:.80}")
    return TokenChoice(positions, False, len(positions) == 1, lambda example: positions)


def _all(example: Example) -> NDArray[np.int64]:
    return np.arange(len(example))


def _content(example: Example) -> NDArray[np.int64]:
    return np.flatnonzero(~example.special)


def _last(example: Example) -> NDArray[np.int64]:
    return np.array([len(example) - 1])


class TooShortError(ArgumentError):
    """An example lacks a chosen position."""


def _positions(chosen: object, example: Example) -> NDArray[np.int64]:
    array = np.asarray(chosen)
    count = len(example)
    if array.dtype == bool:
        if array.shape != (count,):
            raise ArgumentError(
                f"tokens: expected {count} bools for example {example.number}, one per token, found shape {array.shape}"
            )
        return np.flatnonzero(array)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim > 1 or array.dtype.kind not in "iu":
        raise ArgumentError(f"tokens: expected positions or bools for example {example.number}, found {chosen!r:.80}")
    places = array.reshape(-1).astype(np.int64)
    if places.min() < -count or places.max() >= count:
        outside = int(places[(places < -count) | (places >= count)][0])
        raise TooShortError(f"it has {count} tokens, and no position {outside}")
    return np.where(places < 0, places + count, places)
