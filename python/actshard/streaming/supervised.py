"""Choices of tokens by a list column of the table, such as the ``loss_mask`` of a draft model's data: for ``keep=`` of streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, NotStoredError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ColumnTokens:
    """Flags of tokens by a list column; made by :func:`nonzero` and :func:`up_to_last`. A function of ``store.table``.

    Attributes:
        column: the list column.
        context: whether tokens before the last non-zero one are kept too.
        at_least: examples with fewer non-zero entries keep no token.
    """

    column: str
    context: bool
    at_least: int = 0

    def __call__(self, table: pa.Table) -> object:
        """A list of flags per example, as Arrow lists. Raises NotStoredError, ArgumentError for another column."""
        import pyarrow as pa

        values, offsets = numbers_of(table, self.column)
        lengths = np.diff(offsets)
        marked = values != 0
        before = np.concatenate([[0], np.cumsum(marked)])  # non-zero entries before each
        total = before[offsets[1:]] - before[offsets[:-1]]
        if self.context:
            # A token is kept if a marked one follows in its example, or if it is marked itself.
            flags = before[:-1] < np.repeat(before[offsets[1:]], lengths)
        else:
            flags = marked
        if self.at_least:
            flags = flags & np.repeat(total >= self.at_least, lengths)
        return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flags))


def up_to_last(column: str, *, at_least: int = 1) -> ColumnTokens:
    """Keeps each example's tokens up to the last one whose entry in a list column is not 0, for ``keep=`` of streams.

    ``keep=up_to_last("loss_mask")`` keeps the supervised tokens of a draft model with the context before them. It leaves out tokens
    after the last supervised one, padding that a cache does not mark, and examples without supervised tokens.

    Args:
        column: a list column of ``store.table`` with a number or bool per stored (or content) token, e.g. ``"loss_mask"``.
        at_least: examples with fewer entries other than 0 keep no token (DeepSpec: ``min_loss_tokens``, 14 by default there).

    Raises:
        ArgumentError: ``column`` is not a str, or ``at_least`` is not an integer of 0 or more.
    """
    return ColumnTokens(_named(column), True, _arguments.whole(at_least, "at_least", 0))


def nonzero(column: str) -> ColumnTokens:
    """Keeps the tokens whose entry in a list column is not 0, as ``keep="loss_mask"`` does."""
    return ColumnTokens(_named(column), False)


def _named(column: object) -> str:
    if not isinstance(column, str):
        raise ArgumentError(f"column: expected the name of a list column, found {type(column).__name__}")
    return column


def numbers_of(table: pa.Table, name: str) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """The numbers of a list column, flat, and the offsets ``(examples + 1,)`` of its lists.

    Raises:
        NotStoredError: there is no such column.
        ArgumentError: it has no lists of numbers or bools, or a list or a number is missing.
    """
    import pyarrow.types as types

    if name not in table.column_names:
        raise NotStoredError(f"keep: no column {name!r}; there are {', '.join(table.column_names) or 'none'}")
    kind = table.schema.field(name).type
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not lists or not (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type)):
        raise ArgumentError(f"keep: expected a column of lists of integers or bools, found {name!r} of {kind}")
    chunks = table[name].chunks
    empty = next((i for i, is_valid in enumerate(table[name].is_valid().to_numpy()) if not is_valid), None)
    if empty is not None:
        raise ArgumentError(f"keep: example {empty} has no list in {name!r}")
    flat = [chunk.flatten() for chunk in chunks]
    if any(part.null_count for part in flat):
        raise ArgumentError(f"keep: a list of {name!r} has a missing entry")
    lengths = [chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks]
    if types.is_fixed_size_list(kind):
        lengths = [np.full(len(chunk), kind.list_size) for chunk in chunks]
    offsets = np.concatenate([[0], *lengths]).astype(np.int64).cumsum()
    values = [part.to_numpy(zero_copy_only=False) for part in flat]
    return np.concatenate(values) if values else np.zeros(0, np.bool_), offsets


def is_lists_of_flags(values: Any) -> bool:
    """Whether values are Arrow lists of bools without gaps, as :class:`ColumnTokens` returns them."""
    if type(values).__name__ != "LargeListArray":  # without importing pyarrow for flags of numpy
        return False
    return values.null_count == 0 and str(values.type.value_type) == "bool" and values.flatten().null_count == 0


def flags_of(lists: pa.Array, stored: NDArray[np.int64], special: int) -> NDArray[np.bool_]:
    """Lists of flags as one flag per stored token. Special tokens that a list leaves out are kept.

    Raises:
        ArgumentError: a list has another number of flags.
    """
    offsets = lists.offsets.to_numpy().astype(np.int64)
    lengths = np.diff(offsets)
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    short = (lengths == stored - special) & (special > 0)
    wrong = np.flatnonzero((lengths != stored) & ~short)
    if len(wrong):
        i = int(wrong[0])
        also = f" (or {stored[i] - special} without special tokens)" if special else ""
        raise ArgumentError(f"keep[{i}]: expected {stored[i]} flags{also}, one per stored token, found {lengths[i]}")
    if not short.any():
        return np.ascontiguousarray(flat, np.bool_)
    flags = np.ones(int(stored.sum()), np.bool_)
    ends = stored.cumsum()
    # The flags of an example are its last ones.
    positions = np.arange(len(flat)) + np.repeat(ends - offsets[1:] + offsets[0], lengths)
    flags[positions] = flat
    return flags
