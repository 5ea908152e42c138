"""Selections: translates the user's choice of tokens and examples into the arrays that the Rust core expects."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from actshard import _arguments
from actshard._arguments import is_one_of, listed
from actshard.errors import ArgumentError, ArgumentTypeError, FileAccessError, NotStoredError, OutOfRangeError
from actshard.layers import Layer, plain
from actshard.stream.supervised import flags_of, is_lists_of_flags, nonzero

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.stream.readable import Readable

Tokens = Literal["content", "all", "last", "special"]
Mask = Any
"""A bool per example, a bool array per example, a 2-D bool array, the name of a list column whose entries other than 0 are kept, or
a function of ``store.table`` that returns flags."""

COMPARED = ". Compare a column of store.table: column.to_numpy() == x or pyarrow.compute.equal(column, x); column == x is a bool."

_Native = (
    tuple[int, int]
    | tuple[int, NDArray[np.int64]]
    | tuple[int, NDArray[np.int64], NDArray[np.bool_]]
    | tuple[NDArray[np.int64]]
)


def column(values: Any) -> Any:
    """Returns an Arrow, polars or pandas column as numpy, with null flags as False; returns other values unchanged."""
    if isinstance(values, np.ndarray) or not hasattr(values, "to_numpy"):
        return values
    if not hasattr(values, "fill_null"):
        return values.to_numpy()
    if str(getattr(values, "type", getattr(values, "dtype", ""))).lower() in ("bool", "boolean"):
        values = values.fill_null(False)
    return values.to_numpy(zero_copy_only=False) if hasattr(values, "type") else values.to_numpy()


_EXPECTED = "expected an integer, a slice, integers or a bool mask"


def plain_index(part: Any) -> Any:
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


def select(
    store: Readable,
    layers: Sequence[Layer],
    tokens: Tokens,
    ignore_labels: Sequence[int] = (),
    keep: Mask = None,
    also: NDArray[np.bool_] | None = None,
) -> _Native:
    """Returns the selection in the form that ``_native.Stream`` expects. ``also``: one more flag per stored token.

    Raises:
        ArgumentError: an invalid value or mask.
        NotStoredError: the dataset has no labels or special tokens, or the layers store different tokens.
        FileAccessError: not enough memory for one flag per example.
    """
    with memory_for_flags(store):
        return _select(store, layers, tokens, ignore_labels, keep, also)


@contextlib.contextmanager
def memory_for_flags(store: Readable) -> Iterator[None]:
    """Converts MemoryError to FileAccessError."""
    try:
        yield
    except MemoryError as error:
        detail = f"not enough memory for the flags of {_arguments.many(store.num_examples, 'example')}"
        raise FileAccessError(detail, path=store.path) from error


def _select(
    store: Readable,
    layers: Sequence[Layer],
    tokens: Tokens,
    ignore_labels: Sequence[int],
    keep: Mask,
    also: NDArray[np.bool_] | None,
) -> _Native:
    if not is_one_of(tokens, ("content", "all", "last", "special")):
        raise ArgumentError(f'tokens: expected "content", "all", "last" or "special", found {tokens!r}')
    special = store.special_tokens
    if tokens == "special" and special == 0:
        raise NotStoredError(
            'tokens="special": the dataset contains no special tokens, or its metadata does not list them',
            path=store.path,
        )
    ignore_labels = labels_of(ignore_labels)
    each = store.contents.tokens_each
    if each is not None and not ignore_labels and keep is None and also is None and store.content_lengths is None:
        # All examples are equal: computed without memory per example.
        if tokens == "last":
            return (each - 1, 1) if each else (0, 0)
        first = special if tokens == "content" else 0
        return first, min(each, special) if tokens == "special" else max(each - first, 0)
    stored = stored_tokens(store, layers)
    if tokens == "special":
        first, counts = 0, np.minimum(stored, special)
    elif tokens == "content":
        first, counts = special, np.maximum(stored - special, 0)
    else:
        first, counts = 0, stored
    if (lengths := store.content_lengths) is not None and tokens in ("content", "last"):
        # Padding rows of short examples are not content.
        has = np.minimum(stored, special + lengths)
        if not ignore_labels and keep is None and also is None:
            return (has - 1,) if tokens == "last" else (special, np.maximum(has - special, 0))
        ends = np.cumsum(stored)
        filled = np.arange(int(stored.sum())) - np.repeat(ends - stored, stored) < np.repeat(has, stored)
    else:
        has, filled = stored, None
    masks = (_unlabelled(store, tokens, ignore_labels, stored), _kept(store, keep, stored), filled, also)
    flags = [f for f in masks if f is not None]
    if not flags:
        if tokens == "last":
            same = _same(stored)
            return (stored - 1,) if same is None else (same - 1, 1) if same else (0, 0)
        same = _same(counts)
        return (first, counts) if same is None else (first, same)
    wanted = functools.reduce(np.logical_and, flags)  # one flag per stored token
    ends = np.cumsum(stored)
    if tokens == "last":
        last = np.full(len(stored), -1, np.int64)
        some = has > 0
        last[some] = np.where(wanted[(ends - stored + has)[some] - 1], has[some] - 1, -1)
        return (last,)
    if len(wanted) != counts.sum():
        local = np.arange(len(wanted)) - np.repeat(ends - stored, stored)
        wanted = wanted[(local >= first) & (local < first + np.repeat(counts, stored))]
    return first, np.ascontiguousarray(counts, np.int64), np.ascontiguousarray(wanted, np.bool_)


def labels_of(ignore_labels: Iterable[int]) -> list[int]:
    """The ``ignore_labels`` of a call as Python integers, in the given order; an iterator is read.

    Raises:
        ArgumentTypeError, ArgumentError: not several integers from 0 to 255.
    """
    if isinstance(ignore_labels, str | bytes) or not np.iterable(ignore_labels):
        raise ArgumentTypeError(f"ignore_labels: expected a list of integers, found {type(ignore_labels).__name__}")
    found = listed(ignore_labels, "ignore_labels: expected a list of integers")
    if any(isinstance(x, bool) or not isinstance(x, int | np.integer) or not 0 <= x <= 255 for x in found):
        raise ArgumentError(f"ignore_labels: expected integers from 0 to 255, found {found!r:.200}")
    return [int(x) for x in found]


def stored_tokens(store: Readable, layers: Sequence[Layer]) -> NDArray[np.int64]:
    """Tokens per example. Raises NotStoredError if layers store different numbers."""
    first, *others = (store.tokens_in(layer) for layer in (layers if store.contents.layers_differ else layers[:1]))
    for layer, other in zip(layers[1:], others, strict=False):
        if len(differ := np.flatnonzero(first != other)):
            i = int(differ[0])
            raise NotStoredError(
                f"example {i} has {_arguments.many(first[i], 'token')} in layer {plain(layers[0])} and {other[i]} in layer "
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
    table[ignore] = False
    if not len(stored):
        return np.ones(0, np.bool_)
    wanted = np.ones((store.num_examples, int(stored[0])), np.bool_)
    wanted[:, store.special_tokens :] = table[store.labels]
    return wanted.reshape(-1)


def keep_of(store: Readable, keep: Mask) -> Mask:
    """Returns the result of ``keep(store.table)`` if it is a function or the name of a list column, else ``keep``."""
    if isinstance(keep, str):
        keep = nonzero(keep)
    if not callable(keep):
        return keep
    ask: Callable[[pa.Table], Any] = keep
    found = ask(store.table)
    if found is None:
        raise ArgumentError("keep: expected a function that returns flags, found None as its result")
    return found


def _kept(store: Readable, keep: Mask, stored: NDArray[np.int64]) -> NDArray[np.bool_] | None:
    """The user's ``keep`` as one flag per stored token; None keeps all."""
    if keep is None:
        return None
    keep = keep_of(store, keep)
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
    elif len(keep) != n:
        raise ArgumentError(f"keep: expected {n} entries, one per example, found {len(keep)}")
    elif n and all(isinstance(x, bool | np.bool_) for x in keep):
        return np.repeat(np.asarray(keep, np.bool_), stored)
    parts = []
    padded = isinstance(keep, np.ndarray) and _same(stored) is None
    for i, (flags, t) in enumerate(zip(keep, stored.tolist(), strict=True)):
        try:
            part = np.asarray(flags)
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"keep[{i}]: expected a bool array, found {type(flags).__name__}") from error
        if part.dtype != np.bool_ or part.ndim != 1:
            raise ArgumentError(f"keep[{i}]: expected a bool array, found {part.dtype} {part.shape}")
        if padded and len(part) > t:
            part = part[:t]  # a 2-D mask has padding after short examples
        if len(part) == t - special and special:
            part = np.concatenate([np.ones(special, np.bool_), part])
        if len(part) != t:
            also = f" (or {t - special} without special tokens)" if special else ""
            raise ArgumentError(f"keep[{i}]: expected {t} flags{also}, one per stored token, found {len(part)}")
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0, np.bool_)
