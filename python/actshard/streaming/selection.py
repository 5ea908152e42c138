"""Selections: translate the user's choice of tokens and examples into the arrays that the Rust core expects."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base._arguments import is_one_of, listed
from actshard.base.errors import (
    ArgumentError,
    ArgumentTypeError,
    DtypeError,
    FileAccessError,
    NotStoredError,
    OutOfRangeError,
    warn,
)
from actshard.base.layers import Layer, plain, short
from actshard.base.logs import LOG
from actshard.streaming.readable import (
    LIMITS,
    NativeSelection,
    Readable,
    SelectedRows,
    content_range,
    native_options,
    positions,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents


# Rows that a stream leaves out for their position or their norm: ``min_token=`` and ``max_norm=``.
#
# First tokens of texts are often attention sinks, and some rows have an L2 norm hundreds of times larger than all others. Both
# dominate statistics and losses. The norms of a layer are computed once per store, in one pass with the stream's own reader, so
# memory is bounded; 8 bytes per stored token are kept. Squares are summed in float64 in a fixed tree of additions, so norms are
# bitwise equal on all machines. Rows whose squares overflow or underflow float64 are first multiplied by a power of two.


Limit = float | str | None

_BLOCK = 8 << 20
"""Bytes of rows that are read at a time."""

_LOCK = threading.Lock()
_KNOWN: weakref.WeakKeyDictionary[Readable, dict[Layer, NDArray[np.float64]]] = weakref.WeakKeyDictionary()


_SQUARABLE = (1e-280, 1e280)
"""Range of sums of squares that float64 represents with full precision."""


def norms_of_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """L2 norms of ``(n, d_model)`` rows; NaN or infinite exactly if the row has such values."""
    with np.errstate(all="ignore"):
        sums = _sums(rows * rows)
        norms: NDArray[np.float64] = np.sqrt(sums)
        odd = np.flatnonzero(~((sums > _SQUARABLE[0]) & (sums < _SQUARABLE[1])))
        if len(odd):
            values, power = rows[odd], np.where(sums[odd] < 1, 2.0**600, 2.0**-600)
            scaled_norms = np.sqrt(_sums((values * power[:, None]) ** 2)) / power
            most = np.where(np.isfinite(values).all(axis=1), np.finfo(np.float64).max, np.inf)
            norms[odd] = np.minimum(scaled_norms, most)
    return norms


def _sums(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of rows, overwritten, as a tree: halves are added until one column is left."""
    width = squares.shape[1]
    while width > 1:
        half = (width + 1) // 2
        squares[:, : width - half] += squares[:, half:width]
        width = half
    return squares[:, 0]


def parsed(max_norm: object) -> tuple[float, bool] | None:
    """Parses ``max_norm`` to (number, whether it is a multiple of the median); None if it is None.

    Raises:
        ArgumentError: it is neither a positive number nor a string such as ``"10x median"``.
    """
    if max_norm is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*x\s*median\s*", max_norm) if isinstance(max_norm, str) else None
    number = _arguments.real(float(match[1]) if match else max_norm)
    if number is None or not number > 0 or (match and math.isinf(number)):
        raise ArgumentError(
            'max_norm: expected a positive number, "10x median", or infinity (only rows with NaN or infinite values are left '
            f"out), found {max_norm!r:.80}"
        )
    return number, match is not None


def within(
    store: Readable, layers: Sequence[Layer], stored: NDArray[np.int64], max_norm: tuple[float, bool]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Two flags per stored token: norms are finite in every layer; norms are finite and at most ``max_norm`` in every layer."""
    if store.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
        raise DtypeError(
            f"max_norm: expected rows of float16, bfloat16, float32 or float64, found {store.dtype}", path=store.path
        )
    number, of_median = max_norm
    finite = np.ones(int(stored.sum()), np.bool_)
    small = finite.copy()
    for layer in layers:
        norms = _norms(store, layer)
        ok = np.isfinite(norms)
        finite &= ok
        limit = number * _median(norms[ok & _content(store, stored)]) if of_median else number
        small &= norms <= limit
    return finite, small & finite


def _content(store: Readable, stored: NDArray[np.int64]) -> NDArray[np.bool_]:
    """One flag per stored token: neither special nor padding."""
    token_positions, (first, stop) = positions(stored), content_range(store, stored)
    return (token_positions >= np.repeat(first, stored)) & (token_positions < np.repeat(stop, stored))


def _median(norms: NDArray[np.float64]) -> float:
    return float(np.median(norms)) if len(norms) else 0.0


def _norms(store: Readable, layer: Layer) -> NDArray[np.float64]:
    """Norms of all stored rows of a layer, computed at the first call for a store."""
    with _LOCK:
        norms_by_layer = _KNOWN.setdefault(store, {})
    if layer not in norms_by_layer:
        parts = [norms_of_rows(rows) for rows in _rows_of(store, layer)]
        norms_by_layer[layer] = np.concatenate(parts) if parts else np.zeros(0)
    return norms_by_layer[layer]


def _rows_of(store: Readable, layer: Layer) -> Iterator[NDArray[np.float64]]:
    """All stored rows of a layer in stored order, in blocks ``(rows, d_model)`` of about 8 MiB."""
    counts = store.tokens_in(layer)
    if not counts.any():
        return
    rows = max(1, _BLOCK // (8 * store.d_model or 1))
    options = native_options([store.group_of(layer)], *_arguments.dtype(np.float64), True, batch_size=rows)
    reader = store.native_stream((0, np.ascontiguousarray(counts)), options).start(0, 0, 1, None)
    try:
        while (batch := reader.next()) is not None:
            yield batch[0]
    finally:
        reader.stop()


# Choices of tokens by a list column of the table, such as the ``loss_mask`` of a draft model's data: for ``keep=`` of streams.


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


Tokens = Literal["content", "all", "last", "special"]
Mask = Any
"""A bool per example, a bool array per example, a 2-D bool array, the name of a list column whose entries other than 0 are kept, or
a function of ``store.table`` that returns flags."""

COMPARED = ". Compare a column of store.table: column.to_numpy() == x or pyarrow.compute.equal(column, x); column == x is a bool."


def column(values: Any) -> Any:
    """Returns an Arrow, polars or pandas column as numpy, with null flags as False; returns other values unchanged.

    Raises:
        ArgumentError: a numpy array with masked values.
    """
    if _arguments.is_masked_array(values):
        return _arguments.as_array(values, "expected flags or integers")
    if isinstance(values, np.ndarray) or not hasattr(values, "to_numpy"):
        return values
    if not hasattr(values, "fill_null"):
        return values.to_numpy()
    if str(getattr(values, "type", getattr(values, "dtype", ""))).lower() in ("bool", "boolean"):
        values = values.fill_null(False)
    return values.to_numpy(zero_copy_only=False) if hasattr(values, "type") else values.to_numpy()


_EXPECTED = "expected an integer, a slice, integers or a bool mask"


def plain_index(part: object) -> Any:
    """A part of a key as a slice, an ellipsis, an int or an array."""
    if isinstance(part, EllipsisType) or type(part) is int:
        return part
    if isinstance(part, slice):
        for bound in (part.start, part.stop, part.step):
            if bound is not None:
                _arguments.whole(bound, "slice", -(1 << 62), wrong_type=ArgumentTypeError)
        if part.step == 0:
            raise ArgumentError("slice: expected a step other than 0")
        return part
    if part is None:
        raise ArgumentTypeError(f"index: {_EXPECTED}, found None")
    part = column(part)
    if isinstance(part, bool | np.bool_):
        raise ArgumentTypeError(f"index: {_EXPECTED}, found {part}{COMPARED}")
    if isinstance(part, str):
        raise ArgumentTypeError(
            f"index: {_EXPECTED}, found the text {part!r:.80}. filter() takes expressions: pc.field('label') == 1, with "
            "import pyarrow.compute as pc"
        )
    if isinstance(part, bytes | dict | set):
        raise ArgumentTypeError(f"index: {_EXPECTED}, found {type(part).__name__}")
    array = _arguments.as_array(part, f"index: {_EXPECTED}")
    if array.dtype == bool and array.ndim:
        return array
    _arguments.refuse_bools(part, array, "index")
    flat, _ = _arguments.index(array if array.size else array.astype(np.int64), "index")  # np.asarray([]) is float64
    return int(flat[0]) if array.ndim == 0 else flat.reshape(array.shape)


def index_of(part: Any, count: int, what: str) -> Any:
    """A part as a slice, or as one or several checked numbers from 0 to ``count - 1``."""
    part = plain_index(part)
    if isinstance(part, slice):
        return part
    if isinstance(part, np.ndarray) and part.dtype == bool:
        if part.shape != (count,):
            raise ArgumentError(f"mask: expected {count} flags, one per {what}, found {part.shape}")
        return np.flatnonzero(part)
    if isinstance(part, EllipsisType):
        return slice(None)
    if isinstance(part, int):
        if not -count <= part < count:
            raise OutOfRangeError(f"{what} {part} is out of range: there are {count}")
        return part if part >= 0 else part + count
    return _arguments.members(part.reshape(-1), count, what).reshape(part.shape)


_TOKENS = ("content", "all", "last", "special")


@dataclass(frozen=True, eq=False)
class Selection:
    """Which rows of a store: the arguments of :meth:`~actshard.Store.stream` of these names, checked. Iterators are read once.

    A verb takes the five arguments and passes them on as this value.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.
    """

    tokens: Tokens = "content"
    ignore_labels: Sequence[int] = ()
    keep: Mask = None
    max_norm: Limit = None
    min_token: int = 0

    def __post_init__(self) -> None:
        if not is_one_of(self.tokens, _TOKENS):
            raise ArgumentError(f'tokens: expected "content", "all", "last" or "special", found {self.tokens!r}')
        object.__setattr__(self, "ignore_labels", tuple(_labels_of(self.ignore_labels)))
        object.__setattr__(self, "keep", nonzero(self.keep) if isinstance(self.keep, str) else self.keep)
        object.__setattr__(self, "min_token", _arguments.whole(self.min_token, "min_token", 0))
        parsed(self.max_norm)

    @classmethod
    def pop(cls, options: dict[str, Any]) -> Selection:
        """The selection in the options of a call, from which it is removed."""
        return _arguments.popped(cls, options)

    def as_options(self) -> dict[str, Any]:
        """The five arguments, for a verb of a store."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    @property
    def is_default(self) -> bool:
        """Whether it is all content."""
        return self.tokens == "content" and not self.ignore_labels and self.keep is None and not self._has_limits

    @property
    def arguments(self) -> dict[str, Any] | None:
        """``tokens`` and ``ignore_labels``, if there are no other arguments: files name rows by them. Else None."""
        if self.keep is not None or self._has_limits:
            return None
        return {"tokens": self.tokens, "ignore_labels": sorted(set(self.ignore_labels))}

    @property
    def _has_limits(self) -> bool:
        return self.min_token > 0 or self.max_norm is not None

    def resolve(self, store: Readable, layers: Sequence[Layer]) -> SelectedRows:
        """The rows in a store. A function of ``keep`` is called, and ``max_norm`` reads the layers, once per store.

        Raises:
            ArgumentError: an invalid mask.
            NotStoredError: the dataset has no labels or special tokens, or the layers store different tokens.
            FileAccessError: not enough memory for one flag per token.
        """
        with memory_for_flags(store):
            if self.tokens == "special" and store.special_tokens == 0:
                raise NotStoredError(
                    'tokens="special": the dataset contains no special tokens, or its metadata does not list them',
                    path=store.path,
                )
            masked = bool(self.ignore_labels) or self.keep is not None or self._has_limits
            tokens_per_example = store.contents.tokens_each
            if not masked and tokens_per_example is not None and store.content_lengths is None:
                return SelectedRows(
                    _of_equal(store, self.tokens, tokens_per_example), store.num_examples, arguments=self.arguments
                )
            stored = stored_tokens(store, layers)
            masks = (_unlabelled(store, self.tokens, self.ignore_labels, stored), _kept(store, self.keep, stored))
            flags = [mask for mask in masks if mask is not None]
            native = _native_form(store, self.tokens, stored, flags)
            rows = SelectedRows(native, store.num_examples, arguments=self.arguments)
            return self._limited(store, layers, stored, flags, rows) if self._has_limits else rows

    def _limited(
        self,
        store: Readable,
        layers: Sequence[Layer],
        stored: NDArray[np.int64],
        flags: list[NDArray[np.bool_]],
        rows: SelectedRows,
    ) -> SelectedRows:
        """The rows that ``min_token`` and ``max_norm`` leave."""
        late = positions(stored) >= self.min_token
        steps = {"min_token": late}
        if (limit := parsed(self.max_norm)) is not None:
            finite, small = within(store, layers, stored, limit)
            steps |= {"not_finite": late & finite, "max_norm": late & small}
        left_out = dict.fromkeys(LIMITS, 0)
        for name, step in steps.items():
            before = rows.count
            rows = SelectedRows(_native_form(store, self.tokens, stored, [*flags, step]), store.num_examples, left_out)
            left_out[name] = before - rows.count
        LOG.info("%s: layers %s: rows left out: %s; %d remain", store.path, short(layers), left_out, rows.count)
        return rows

    def warn_of_nothing(self, store: Readable, layers: Sequence[Layer], rows: SelectedRows) -> None:
        """Warns if no row is left of a dataset that has rows."""
        if rows.count or not _has_rows(store.contents):
            return
        numbers = [f"{name} {n:,}" for name, n in rows.left_out.items() if n]
        masks = ["ignore_labels"] * bool(self.ignore_labels) + ["keep"] * (self.keep is not None)
        if not store.num_examples:
            why = "No example was chosen."
        elif numbers:
            why = f"Of the rows of tokens={self.tokens!r}: left out: {', '.join(numbers)}."
        elif masks:
            leave = "leaves" if len(masks) == 1 else "leave"
            why = f"Of the rows of tokens={self.tokens!r}: {' and '.join(masks)} {leave} out all."
        else:
            why = f"Layers {short(layers)} have no rows of tokens={self.tokens!r}."
        warn(f"{store.path}: the stream has no rows. {why}", code="no-example-chosen")


def _has_rows(contents: Contents) -> bool:
    """Whether the datasets that ``contents`` are part of have rows."""
    dataset = contents.whole or contents
    if dataset.parts:
        return any(_has_rows(part.contents) for part in dataset.parts)
    return bool(dataset.token_counts().any())


@contextlib.contextmanager
def memory_for_flags(store: Readable) -> Iterator[None]:
    """Converts MemoryError to FileAccessError."""
    try:
        yield
    except MemoryError as error:
        detail = f"not enough memory for the flags of {_arguments.many(store.num_examples, 'example')}"
        raise FileAccessError(detail, path=store.path) from error


def _of_equal(store: Readable, tokens: Tokens, tokens_per_example: int) -> NativeSelection:
    """The selected tokens of examples of ``tokens_per_example`` tokens without padding: needs no memory per example."""
    special = min(store.special_tokens, tokens_per_example)
    if tokens == "last":
        return (tokens_per_example - 1, 1) if tokens_per_example else (0, 0)
    return {
        "content": (store.special_tokens, tokens_per_example - special),
        "all": (0, tokens_per_example),
        "special": (0, special),
    }[tokens]


def _native_form(
    store: Readable, tokens: Tokens, stored: NDArray[np.int64], flags: Sequence[NDArray[np.bool_]]
) -> NativeSelection:
    """The selected tokens whose flags are all set; ``flags``: arrays with one flag per stored token."""
    first, stop = content_range(store, stored)
    padded = store.content_lengths is not None
    special = store.special_tokens if tokens == "content" else 0
    counts = {"content": stop - first, "special": first}.get(tokens, stored)
    if not flags:
        if tokens == "last":
            same = None if padded else _same(stop)  # states have a digest of this form
            return (stop - 1,) if same is None else (same - 1, 1) if same else (0, 0)
        same = None if padded and tokens == "content" else _same(counts)
        return (special, counts) if same is None else (special, same)
    chosen = functools.reduce(np.logical_and, flags)
    if tokens == "last":
        last = np.full(len(stored), -1, np.int64)
        has_tokens = stop > 0
        starts = np.cumsum(stored) - stored
        last[has_tokens] = np.where(chosen[(starts + stop)[has_tokens] - 1], stop[has_tokens] - 1, -1)
        return (last,)
    if tokens == "content":  # padding has flags, too
        counts = stored - first
        chosen = chosen & (positions(stored) < np.repeat(stop, stored))
    if len(chosen) != counts.sum():
        local = positions(stored)
        chosen = chosen[(local >= special) & (local < special + np.repeat(counts, stored))]
    return special, np.ascontiguousarray(counts, np.int64), np.ascontiguousarray(chosen, np.bool_)


def _labels_of(ignore_labels: Iterable[int]) -> list[int]:
    """The ``ignore_labels`` of a call as Python integers, in the given order; an iterator is read.

    Raises:
        ArgumentTypeError, ArgumentError: not several integers from 0 to 255.
    """
    if isinstance(ignore_labels, str | bytes) or not np.iterable(ignore_labels):
        raise ArgumentTypeError(f"ignore_labels: expected a list of integers, found {type(ignore_labels).__name__}")
    labels = listed(ignore_labels, "ignore_labels: expected a list of integers")
    if any(isinstance(x, bool) or not isinstance(x, int | np.integer) or not 0 <= x <= 255 for x in labels):
        raise ArgumentError(f"ignore_labels: expected integers from 0 to 255, found {labels!r:.200}")
    return [int(x) for x in labels]


def stored_tokens(store: Readable, layers: Sequence[Layer]) -> NDArray[np.int64]:
    """Tokens per example. Raises NotStoredError if layers store different numbers."""
    first, *other_counts = (
        store.tokens_in(layer) for layer in (layers if store.contents.layers_differ else layers[:1])
    )
    for layer, counts in zip(layers[1:], other_counts, strict=False):
        if len(differ := np.flatnonzero(first != counts)):
            i = int(differ[0])
            raise NotStoredError(
                f"example {i} has {_arguments.many(first[i], 'token')} in layer {plain(layers[0])} and {counts[i]} in layer "
                f"{plain(layer)}: "
                "these layers cannot be streamed together; use one stream per layer",
                path=store.path,
            )
    return first


def _same(counts: NDArray[np.int64]) -> int | None:
    """The common count if all counts are equal, else None."""
    if not len(counts):
        return 0
    return int(counts[0]) if (counts == counts[0]).all() else None


def _unlabelled(
    store: Readable, tokens: Tokens, ignore: Sequence[int], stored: NDArray[np.int64]
) -> NDArray[np.bool_] | None:
    """One flag per stored token, False for ignored labels. Special tokens have no label and stay True."""
    if not ignore:
        return None
    if tokens == "special":
        raise ArgumentError('ignore_labels: special tokens have no labels. Use tokens="content".')
    if store.labels is None:
        why = "labels.bin not found"
        if store.contents.parts:
            why = "a part has none, or another number of patches or of special tokens; see store.parts"
        raise NotStoredError(f"ignore_labels: the dataset contains no patch labels ({why})", path=store.path)
    table = np.ones(256, np.bool_)
    table[list(ignore)] = False
    if not len(stored):
        return np.ones(0, np.bool_)
    width = int(stored.max())
    if not width:
        return np.ones(0, np.bool_)
    flags = np.ones((store.num_examples, width), np.bool_)
    flags[:, store.special_tokens :] = table[store.labels]
    return flags[stored > 0].reshape(-1)  # examples that are left out of an incomplete dataset have none


def _kept(store: Readable, keep: Mask, stored: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """The user's ``keep`` as one flag per stored token; None keeps all."""
    if keep is None:
        return None
    if callable(keep):
        ask: Callable[[pa.Table], object] = keep
        keep = ask(store.table)
        if keep is None:
            raise ArgumentError("keep: expected a function that returns flags, found None as its result")
    if is_lists_of_flags(keep) and len(keep) == len(stored):
        return flags_of(keep, stored, store.special_tokens)
    keep = column(keep)
    if isinstance(keep, bool | np.bool_):
        raise ArgumentTypeError(f"keep: expected one flag per example, found {keep}{COMPARED}")
    if not isinstance(keep, np.ndarray) and not (hasattr(keep, "__len__") and hasattr(keep, "__iter__")):
        raise ArgumentTypeError(f"keep: expected flags or a function of the table, found {type(keep).__name__}")
    n, special = len(stored), store.special_tokens
    if isinstance(keep, np.ndarray) and keep.dtype != object:
        if keep.dtype != np.bool_:
            raise ArgumentError(f"keep: expected bool, found {keep.dtype}")
        if keep.shape == (n,):
            return np.repeat(keep, stored)
        if keep.ndim != 2 or len(keep) != n:
            raise ArgumentError(f"keep: expected ({n},) or ({n}, tokens), found {keep.shape}")
        return _rectangular(store, keep, stored)
    if len(keep) != n:
        raise ArgumentError(f"keep: expected {n} entries, one per example, found {len(keep)}")
    if n and all(isinstance(x, bool | np.bool_) for x in keep):
        return np.repeat(np.asarray(keep, np.bool_), stored)
    parts = []
    for i, (flags, t) in enumerate(zip(keep, stored.tolist(), strict=True)):
        part = _arguments.as_array(flags, f"keep[{i}]: expected a bool array")
        if part.dtype != np.bool_ or part.ndim != 1:
            raise ArgumentError(f"keep[{i}]: expected a bool array, found {part.dtype} {part.shape}")
        if len(part) == t - special and special:
            part = np.concatenate([np.ones(special, np.bool_), part])
        if len(part) != t:
            also = f" (or {t - special} without special tokens)" if special else ""
            raise ArgumentError(f"keep[{i}]: expected {t} flags{also}, one per stored token, found {len(part)}")
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0, np.bool_)


def _rectangular(store: Readable, keep: NDArray[np.bool_], stored: NDArray[np.int64]) -> NDArray[np.bool_]:
    """A mask with a row per example, which is padded after short examples, as one flag per stored token.

    Its width decides for all examples whether it has columns of special tokens. Without special tokens it may be wider than the
    longest example: as the whole dataset of a filtered store, and as a tokenizer pads, if it marks none of the columns behind.
    """
    width, most, special = keep.shape[1], int(stored.max(initial=0)), store.special_tokens
    widest, contents = most, store.contents
    if contents.chosen is not None and contents.whole is not None and not special and width > most:
        widest = max(most, int(contents.whole.token_counts().max(initial=0)))
    if special and width == most - special:
        keep = np.concatenate([np.ones((len(keep), special), np.bool_), keep], axis=1)
    elif width < most or (width > widest and (special or keep[:, most:].any())):
        also = f" (or {most - special} without special tokens)" if special else ""
        raise ArgumentError(f"keep: expected {most} columns{also}, one per token of the longest example, found {width}")
    return keep[np.arange(keep.shape[1]) < stored[:, None]]


CONTENT = Selection()
"""All content."""
