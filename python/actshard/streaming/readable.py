"""The interface that streams, selections and arrays use instead of :class:`~actshard.Store`, which implements it.

The store imports streams and selections, so they cannot import the store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

import actshard._native as _native

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard._native import Rows
    from actshard.base.codes import Remark
    from actshard.base.layers import Layer
    from actshard.formats.contents import Contents
    from actshard.looking.stats import Stats
    from actshard.streaming.normalizer import Normalizer, RowKind


class Readable(Protocol):
    """A dataset of rows addressed by (layer, example, token). :class:`~actshard.Store` documents the members."""

    format: str
    path: Path
    layers: tuple[Layer, ...]
    d_model: int
    num_examples: int
    special_tokens: int
    io: str
    warnings: tuple[Remark, ...]

    @property
    def contents(self) -> Contents: ...
    @property
    def dtype(self) -> np.dtype[np.generic]: ...
    @property
    def token_counts(self) -> NDArray[np.int64]: ...
    @property
    def identity(self) -> str: ...
    @property
    def table(self) -> pa.Table: ...
    @property
    def labels(self) -> NDArray[np.uint8] | None: ...
    @property
    def content_lengths(self) -> NDArray[np.int64] | None: ...
    @property
    def rows(self) -> _native.Rows: ...
    def tokens_in(self, layer: Layer) -> NDArray[np.int64]: ...
    def group_of(self, layer: Layer) -> int: ...
    def row_kind(self, layer: Layer) -> RowKind: ...
    def gather(
        self,
        layer: Layer,
        examples: ArrayLike,
        tokens: ArrayLike,
        *,
        dtype: DTypeLike | None = None,
        normalize: Normalizer | None = None,
    ) -> NDArray[np.generic]: ...
    def sequence(
        self, example: int, layer: Layer, *, dtype: DTypeLike | None = None, normalize: Normalizer | None = None
    ) -> NDArray[np.generic]: ...
    def sample_of(self, layers: Sequence[Layer]) -> str: ...
    def read_columns(self, names: Sequence[str], examples: ArrayLike | None = None) -> pa.Table: ...
    def stats_of(
        self,
        layer: Layer,
        rows: SelectedRows,
        progress: Callable[[int, int], object] | None = None,
    ) -> Stats: ...
    def known_stats(self, layer: Layer, rows: SelectedRows) -> Stats: ...
    def check_open(self) -> None: ...
    def native_stream(self, selection: NativeSelection, options: dict[str, object]) -> _native.Stream: ...


def covered_by(store: Readable, layers: Sequence[Layer]) -> dict[str, object]:
    """What a stream of these layers covers, as plain values: its states and pickles continue only over the same."""
    return {
        "dataset": store.identity,
        "sample": store.sample_of(layers),
        "format": store.format,
        "d_model": store.d_model,
        "stored": store.dtype.name,
        "examples": store.num_examples,
    }


def native_options(
    groups: Sequence[int], dtype: np.dtype[np.generic], name: str, converts: bool, **options: object
) -> dict[str, object]:
    """The options of a native stream of rows in stored order, and those that a call changes.

    Args:
        groups: indices of the layers.
        dtype: dtype of the batches.
        name: its name.
        converts: whether it was requested, so that rows of other dtypes are converted.
        options: options with other values.
    """
    plain = {
        "groups": list(groups), "stacked": False, "interleaved": False, "batch_size": 1, "shuffle": None, "seed": 0,
        "drop_last": False, "rank": 0, "world_size": 1, "memory": 1 << 30, "dtype": name, "descr": dtype,
        "given": converts, "center": None, "scale": None, "divide": None, "norm": None, "wide": False,
    }  # fmt: skip
    return plain | options


# The rows that a selection resolves to.
#
# They are numbered 0 to ``count - 1`` in stored order, example after example.


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


# Positions of tokens in their examples: which of an example's stored tokens are content.


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
