"""Selections: translate the user's choice of tokens and examples into the arrays that the Rust core expects."""

from __future__ import annotations

import contextlib
import functools
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
    FileAccessError,
    NotStoredError,
    OutOfRangeError,
    warn,
)
from actshard.base.layers import Layer, plain, short
from actshard.base.logs import LOG
from actshard.streaming.content import content_range, positions
from actshard.streaming.norms import Limit, parsed, within
from actshard.streaming.rows import LIMITS, NativeSelection, SelectedRows
from actshard.streaming.supervised import flags_of, is_lists_of_flags, nonzero

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents
    from actshard.streaming.readable import Readable

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
        return cls(**{option.name: options.pop(option.name) for option in fields(cls) if option.name in options})

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
