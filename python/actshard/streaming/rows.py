"""The rows that a selection resolves to.

They are numbered 0 to ``count - 1`` in stored order, example after example.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native

NativeSelection = (
    tuple[int, int]
    | tuple[int, NDArray[np.int64]]
    | tuple[int, NDArray[np.int64], NDArray[np.bool_]]
    | tuple[NDArray[np.int64]]
)
"""The first token, and the number of tokens of all examples or of each, optionally with a flag per token; or one token of each
example, -1 for none."""

LIMITS = ("min_token", "max_norm", "not_finite")
"""What leaves out rows of the selected tokens, in this order: their position, their norm, and NaN and infinite values."""


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """Rows of a store, the same in each of the layers that they were resolved for.

    Attributes:
        native: the form that the core takes.
        num_examples: examples of the store.
        left_out: numbers of rows that each of :data:`LIMITS` left out.
        arguments: those of the selection, if they name these rows without a read; see :attr:`.Selection.arguments`.
    """

    native: NativeSelection
    num_examples: int
    left_out: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))
    arguments: Mapping[str, object] | None = None

    @cached_property
    def count(self) -> int:
        """Number of rows in one layer."""
        return int(_native.count_selected(self.num_examples, self.native))

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ for other rows of the same store."""
        digest = hashlib.sha256()
        for part in self.native:
            digest.update(part.tobytes() if isinstance(part, np.ndarray) else str(part).encode() + b";")
        return digest.hexdigest()[:16]

    @cached_property
    def before(self) -> NDArray[np.int64]:
        """``(num_examples + 1,)`` int64: number of rows before each example, and of all."""
        if len(self.native) == 1:
            counts = (self.native[0] >= 0).astype(np.int64)
        elif len(self.native) == 3:
            return np.searchsorted(self._flagged, self._edges)
        else:
            counts = np.broadcast_to(np.asarray(self.native[1], np.int64), self.num_examples)
        return np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        """Numbers of flags before each example, and of all."""
        assert len(self.native) == 3
        return np.concatenate([[0], np.cumsum(self.native[1])])

    @cached_property
    def _flagged(self) -> NDArray[np.int64]:
        """Indices of the flags that are set."""
        assert len(self.native) == 3
        return np.flatnonzero(self.native[2])

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The examples and tokens of rows, given their numbers: two int64 arrays in the same shape."""
        if len(self.native) == 2 and not isinstance(self.native[1], np.ndarray):
            first, count = self.native
            examples, tokens = np.divmod(numbers, max(int(count), 1))
            return examples, tokens + first
        examples = np.searchsorted(self.before, numbers, side="right") - 1
        if len(self.native) == 1:
            return examples, self.native[0][examples]
        if len(self.native) == 3:
            return examples, self.native[0] + self._flagged[numbers] - self._edges[examples]
        return examples, self.native[0] + numbers - self.before[examples]

    def take(self, numbers: NDArray[np.int64]) -> SelectedRows:
        """Some of these rows, given their numbers in ascending order. Memory: a flag per row."""
        examples, tokens = self.locate(numbers)
        if len(self.native) == 1:
            last = np.full(self.num_examples, -1, np.int64)
            last[examples] = tokens
            return SelectedRows((last,), self.num_examples)
        counts = np.ascontiguousarray(np.broadcast_to(np.asarray(self.native[1], np.int64), self.num_examples))
        flags = np.zeros(int(counts.sum()), np.bool_)
        flags[self._flagged[numbers] if len(self.native) == 3 else numbers] = True
        return SelectedRows((self.native[0], counts, flags), self.num_examples)

    def last(self) -> SelectedRows:
        """The last of these rows of each example that has some."""
        has = np.flatnonzero(np.diff(self.before))
        last = np.full(self.num_examples, -1, np.int64)
        last[has] = self.locate(self.before[has + 1] - 1)[1]
        return SelectedRows((last,), self.num_examples)
