"""Columns of the table for the rows of a batch: one value per example, or a list with one entry per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError, FormatError
from actshard.streaming.content import content_range
from actshard.streaming.readable import Readable

if TYPE_CHECKING:
    import pyarrow as pa


class BatchColumns:
    """The columns of a stream's ``columns=``.

    Args:
        store: the store with the columns.
        names: their names. A list column has one entry per stored token, or per content token.
    """

    def __init__(self, store: Readable, names: Sequence[str]) -> None:
        if isinstance(names, str):
            raise ArgumentTypeError(f"columns: expected a list of names, found {names!r:.80}; use [{names!r:.80}]")
        self.names = tuple(_arguments.listed(names, "columns: expected a list of names"))
        self._store = store
        self._read: ReadColumns | None = None
        if len(set(self.names)) < len(self.names):
            raise ArgumentError(f"columns: expected each name once, found {self.names!r:.200}")
        if conflicts := sorted(set(self.names) & _TAKEN):
            raise ArgumentError(f"columns: {conflicts[0]!r} is an array of each batch; rename the column")
        if self.names:
            store.read_columns(self.names).slice(0, 0)  # raises for names that do not exist

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_read": None}

    def read(self, examples: NDArray[np.int64]) -> ReadColumns:
        """The columns' values for the examples of the stream, ascending and each once, read on first use and held.

        Other examples may have nulls, such as those of a shard that is left out.
        """
        if self._read is None:
            columns: dict[str, NDArray[np.generic] | TokenValues] = {}
            if self.names:
                is_all = len(examples) == self._store.num_examples
                table = self._store.read_columns(self.names, None if is_all else examples)
                columns = {name: _values(self._store, name, table[name], examples) for name in self.names}
            self._read = ReadColumns(columns, examples)
        return self._read


_TAKEN = {
    "activations", "lengths", "offsets", "position_ids", "segment_ids", "mask", "examples", "tokens", "layers", "labels",
}  # fmt: skip


class TokenValues:
    """A column of lists with one entry per token.

    Attributes:
        values: the entries of all examples that were read.
        first: int64, for each of them: the index of the entry of stored token 0. If special tokens have no entries, it is below
            the index of the example's first entry.
        skipped: stored tokens without an entry, at the start of each example.
    """

    def __init__(self, values: NDArray[np.generic], first: NDArray[np.int64], skipped: NDArray[np.int64]) -> None:
        self.values, self.first, self.skipped = values, first, skipped

    def at(self, examples: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.generic]:
        """The entries of tokens of examples, numbered as they were read; 0 for special tokens without one."""
        has_entry = tokens >= self.skipped[examples]
        if has_entry.all():
            entries: NDArray[np.generic] = self.values[self.first[examples] + tokens]
            return entries
        token_values = np.zeros(len(tokens), self.values.dtype)
        token_values[has_entry] = self.values[(self.first[examples] + tokens)[has_entry]]
        return token_values


class ReadColumns:
    """Columns in memory."""

    def __init__(self, columns: dict[str, NDArray[np.generic] | TokenValues], examples: NDArray[np.int64]) -> None:
        self._columns, self._examples = columns, examples

    def of(
        self,
        examples: NDArray[np.int64],
        token_examples: NDArray[np.int64],
        tokens: NDArray[np.int64],
        real: NDArray[np.bool_],
    ) -> dict[str, NDArray[np.generic]]:
        """The columns of a batch of sequences.

        Args:
            examples: the example of each sequence.
            token_examples: the example of each token that is no padding.
            tokens: the position of each token.
            real: False for padding.
        """
        arrays: dict[str, NDArray[np.generic]] = {}
        if not self._columns:
            return arrays
        examples, token_examples = (np.searchsorted(self._examples, ids) for ids in (examples, token_examples))
        for name, column in self._columns.items():
            if isinstance(column, TokenValues):
                arrays[name] = np.zeros(tokens.shape, column.values.dtype)
                arrays[name][real] = column.at(token_examples, tokens[real])
            else:
                arrays[name] = column[examples]
        return arrays


def _values(
    store: Readable, name: str, column: pa.ChunkedArray, examples: NDArray[np.int64]
) -> NDArray[np.generic] | TokenValues:
    """A column of these examples as arrays."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lists: Any = column.cast(pa.large_list(kind.value_type)).combine_chunks()
        if isinstance(lists, pa.ChunkedArray):  # a column without chunks
            lists = pa.array([], lists.type)
        if lists.null_count or lists.values.null_count:
            raise FormatError(f"column {name!r}: expected a list of numbers per example, found null", path=store.path)
        return _per_token(store, name, lists.offsets.to_numpy(), _numbers(store, name, lists.values), examples)
    if column.null_count:
        raise FormatError(f"column {name!r}: expected a number per example, found null", path=store.path)
    return _numbers(store, name, column)


def _numbers(store: Readable, name: str, column: pa.ChunkedArray) -> NDArray[np.generic]:
    import pyarrow as pa

    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ArgumentError(
            f"columns: {name!r} has {kind}; expected numbers, one per example or a list with one per token. Look up others by "
            "batch.examples.",
            path=store.path,
        )
    zero_copy = isinstance(column, pa.Array) and not pa.types.is_boolean(kind)
    numbers: NDArray[np.generic] = (
        column.to_numpy(zero_copy_only=zero_copy) if isinstance(column, pa.Array) else column.to_numpy()
    )
    return numbers


def _per_token(
    store: Readable, name: str, offsets: NDArray[np.int64], values: NDArray[np.generic], examples: NDArray[np.int64]
) -> TokenValues:
    """The entries of a list column, by stored token."""
    entries, stored = np.diff(offsets), store.token_counts[examples]
    first, stop = content_range(store, stored, examples)
    has_all = entries == stored
    wrong = np.flatnonzero(~has_all & (entries != stop - first))
    if len(wrong):
        i = int(wrong[0])
        raise ArgumentError(
            f"columns: {name!r} has {entries[i]} entries in example {examples[i]}, which has {stored[i]} stored tokens",
            path=store.path,
        )
    skipped = np.where(has_all, 0, first)
    return TokenValues(values, offsets[:-1] - skipped, skipped)
