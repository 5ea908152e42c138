"""Rows of one layer as arrays: ``store.layer(5)``.

There are three classes. The first two contain no rows and depend on no format.

- :class:`LayerArray`: axes (example, token, element). Indexing resolves the key to example and token numbers and reads them with
  one call of the store: a whole example is a view where the store has one, everything else is one parallel gather.
- :class:`RowArray`: axes (row, element), the same rows in stored order. It resolves row numbers to examples and tokens.
- :class:`Ragged`: values and offsets, for Arrow and awkward.

A key is resolved in three steps: *parts* (one index per axis: an ellipsis is expanded, a two-dimensional mask becomes two lists),
*numbers* (each part becomes an int, an array, or stays a slice; negative numbers count from the end), and *rows* (the numbers
are broadcast as in numpy: two lists are paired, a list and a slice make a grid). Lengths are read only if the key depends on
them: ``acts[3]``, ``acts[:, -1]`` and ``acts[[1, 2], 0]`` need none.

If examples have different numbers of tokens, a slice of tokens is resolved for each example separately. The result must be
rectangular.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, OutOfRangeError, OverflowWarning, warn
from actshard.base.layers import Layer, plain
from actshard.streaming.normalizer import read_normalized, required
from actshard.streaming.selection import index_of, plain_index

if TYPE_CHECKING:
    from actshard.streaming.normalizer import Normalizer
    from actshard.streaming.readable import Readable


class Ragged(NamedTuple):
    """Rows of several examples, one after another: the layout of Arrow's and awkward's lists.

    Attributes:
        values: ``(rows, d_model)``, read-only if it is a view.
        offsets: ``(n + 1,)`` int64: example i has the rows ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]

    def __repr__(self) -> str:
        return (
            f"<actshard.Ragged: {_arguments.many(len(self.offsets) - 1, 'example')}, values {self.values.shape} "
            f"{self.values.dtype}, "
            f"offsets {self.offsets.dtype}>"
        )


class _Lazy(ABC):
    """Base class of both arrays: a layer of a store, read as ``dtype``. Reads nothing until indexed."""

    ndim: int

    def __init__(
        self, store: Readable, layer: Layer, dtype: DTypeLike | None = None, normalize: Normalizer | None = None
    ) -> None:
        self._store = store
        self._layer = store.layers[store.group_of(layer)]
        self._asked = None if dtype is None else _arguments.dtype(dtype)[0]
        self._normalize = normalize
        if normalize is not None:
            required(normalize).check(self._layer, store.d_model)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._store, self._layer, self._asked, self._normalize)

    @property
    @abstractmethod
    def shape(self) -> tuple[int | None, ...]:
        """Lengths of the axes."""

    @property
    def store(self) -> Readable:
        """The store that is read."""
        return self._store

    @property
    def layer(self) -> Layer:
        """The layer's name."""
        return self._layer

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows that are read."""
        return self._store.dtype if self._asked is None else self._asked

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self._counts.sum()) * self._store.d_model

    @property
    def nbytes(self) -> int:
        """Bytes of all elements as :attr:`dtype`."""
        return self.size * self.itemsize

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Tokens per example in this layer. Needs no memory if all examples have the same number."""
        return self._store.tokens_in(self._layer)

    def __repr__(self) -> str:
        return f"<actshard.{type(self).__name__} of {self._store.path}, layer {plain(self._layer)}: {self._shown()} {self.dtype}>"

    @abstractmethod
    def _shown(self) -> str:
        """The shape, for ``repr``."""

    def _whole(self, examples: NDArray[np.int64], dtype: np.dtype[np.generic] | None) -> NDArray[np.generic]:
        """All tokens of these examples, one after another, ``(rows, d_model)``: a view of one example if possible, else a copy."""
        if self._store.contents.layers_differ:  # reading an example that lacks the layer is an error
            examples = examples[self._lengths(examples) > 0]
        if self._normalize is None:
            return self._stored(examples, dtype)
        kind = self._layer, self._store.d_model, self._store.dtype
        return read_normalized(self._normalize, kind, dtype, None, lambda stored: self._stored(examples, stored))

    def _stored(self, examples: NDArray[np.int64], dtype: DTypeLike | None) -> NDArray[np.generic]:
        """As :meth:`_whole`, not normalized."""
        if len(examples) == 1 and dtype is None:
            return self._store.sequence(int(examples[0]), self._layer)
        lost: list[int] = []
        group = self._store.group_of(self._layer)
        rows: NDArray[np.generic] = self._store.rows.gather_whole(group, examples, None, dtype, lost)
        if lost:
            text = (
                f"{self._store.path}: layer {plain(self._layer)}: {lost[0]} finite values became infinite as {dtype}."
            )
            warn(f"{text} Use a wider dtype=", OverflowWarning)
        return rows

    def _lengths(self, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of these examples, without counting the others."""
        return self._store.rows.tokens_of(self._store.group_of(self._layer), examples)

    def _gather(self, examples: ArrayLike, tokens: ArrayLike) -> NDArray[np.generic]:
        """One row per (example, token), with the shape of the indices: a copy."""
        if not np.size(examples) or not np.size(tokens):  # the store warns about empty lists; an empty slice is valid
            self._store.check_open()
            return np.empty((0, self._store.d_model), self.dtype)
        return self._store.gather(self._layer, examples, tokens, dtype=self._asked, normalize=self._normalize)

    @abstractmethod
    def _read(self, dtype: np.dtype[np.generic] | None) -> NDArray[np.generic]:
        """The whole array, as ``dtype``."""

    @abstractmethod
    def _view(self) -> NDArray[np.generic] | None:
        """The whole array as a read-only view of the mapped file; None if the files' layout does not allow it."""

    def _view_of_all(self) -> tuple[NDArray[np.generic], int, int | None] | None:
        """A view that contains all rows, ``(r, d_model)``; the first example's row in it; rows from one example to the next."""
        if self.dtype != self._store.dtype or self._normalize is not None:
            return None
        view: tuple[NDArray[np.generic], int, int | None] | None = self._store.rows.view_all(
            self._store.group_of(self._layer)
        )
        return view

    def _view_of_examples(self, tokens_each: int) -> NDArray[np.generic] | None:
        """All examples, of ``tokens_each`` rows, as a view ``(n, tokens_each, d_model)``."""
        if (view := self._view_of_all()) is None:
            return None
        (rows, first, step), n = view, self._store.num_examples
        if step is None:
            return rows.reshape(n, tokens_each, -1) if len(rows) == n * tokens_each else None
        if len(rows) != abs(step) * (n - 1) + tokens_each:
            return None
        row, element = rows.strides
        # Unlike as_strided, this checks that the strides stay in the buffer.
        shape, strides = (n, tokens_each, rows.shape[1]), (step * row, row, element)
        return np.ndarray(shape, rows.dtype, rows.view(np.uint8).reshape(-1), first * row, strides)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        target_dtype = self.dtype if dtype is None else _arguments.numpy_type(dtype, "dtype=")
        if not copy and target_dtype == self.dtype and (view := self._view()) is not None:
            return view
        direct = {target_dtype.kind, self._store.dtype.kind} <= set(
            "fV"
        ) and target_dtype in _arguments.NUMPY_BY_NAME.values()
        array = self._read(target_dtype if direct and target_dtype != self._store.dtype else self._asked)
        owned = array.base is None or array.flags.writeable
        if copy is False and (owned or array.dtype != target_dtype):
            raise ArgumentError(
                f"copy=False: the rows are not one block of mapped memory as {target_dtype}. Use copy=None."
            )
        return array.astype(target_dtype, copy=bool(copy) and not owned)


class LayerArray(_Lazy):
    """One layer of a store as an array over (example, token, element). :meth:`Store.layer` creates it. Reads nothing until indexed.

    ``acts[17]`` is ``(T, d_model)``, ``acts[17, -1]`` is ``(d_model,)``, ``acts[[1, 5, 5], -1]``, ``acts[mask, 0]`` and
    ``acts[:, -1]`` are ``(n, d_model)``. Integers, slices, lists, masks, negative numbers and ``...`` mean the same as for a numpy
    array. ``np.asarray(acts)`` is the whole layer: a read-only view if its rows are evenly spaced in one memory-mapped file,
    else a copy, read in parallel. ``np.array(acts)`` (or ``copy=True``) is always a writable copy; ``copy=False`` raises unless
    there is a view.

    Results of indexing are copies, except whole examples and slices of one: those are read-only views where
    :meth:`Store.sequence` has one. Views keep their file mapped after the store is closed.
    Thread-safe, usable after ``fork``, and pickled as its store's path.
    """

    ndim = 3

    @property
    def shape(self) -> tuple[int, int | None, int]:
        """``(examples, tokens, d_model)``; tokens is None if examples have different numbers of tokens.

        For pickle shards, whose lengths are only in the data, the first use reads every shard once.
        """
        return len(self), self._each, self._store.d_model

    @cached_property
    def _each(self) -> int | None:
        """The number of tokens of all examples; None if they differ."""
        counts = self._counts
        if len(counts) and counts.strides == (0,):  # one number, broadcast
            return int(counts[0])
        most = int(counts.max()) if len(counts) else 0
        return most if not len(counts) or int(counts.min()) == most else None

    def __len__(self) -> int:
        return self._store.num_examples

    def _shown(self) -> str:
        each = self._store.contents.tokens_each or "tokens"
        return f"({_arguments.many(len(self), 'example')}, {each}, {self._store.d_model})"

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: object) -> NDArray[Any]:
        """Reads a part; see the class.

        Raises:
            OutOfRangeError: an example, token or element does not exist. It is an IndexError.
            ArgumentError: the examples have different numbers of tokens, so they do not form an array; a mask has the wrong
                shape; the key has a type that is not an index.
            Errors of :meth:`Store.gather`.
        """
        if type(key) is tuple and len(key) == 2 and type(key[0]) is int and type(key[1]) is int:
            row: NDArray[np.generic] = self._gather(index_of(key[0], len(self), "example"), key[1])[0]
            return row
        if type(key) is int and -len(self) <= key < len(self):
            return self._store.sequence(
                key if key >= 0 else key + len(self), self._layer, dtype=self._asked, normalize=self._normalize
            )
        parts = _parts(key, self.ndim, self._masked)
        examples = index_of(parts[0], len(self), "example")
        tokens = parts[1] if isinstance(parts[1], slice) else self._tokens(parts[1], examples)
        _check_elements(examples, tokens, parts[2])
        rows = self._rows(examples, tokens)
        return _narrowed(rows, parts[2])

    def _masked(self, mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The examples and tokens of a mask over both axes."""
        expected = len(self), self._each
        if mask.shape != expected:
            also = "" if self._each is not None else ", as examples have different numbers of tokens. Use acts.rows()"
            raise ArgumentError(f"mask: expected {expected} or ({expected[0]},) flags, found {mask.shape}{also}")
        examples, tokens = np.nonzero(mask)
        return examples, tokens

    def _tokens(self, part: Any, examples: int | slice | NDArray[np.int64]) -> Any:
        """Tokens that are not a slice, as an int or an array. The store counts negative ones from each example's end."""
        if isinstance(part, np.ndarray) and part.dtype == bool:
            tokens_each = int(self._lengths(np.array([examples]))[0]) if isinstance(examples, int) else self._each
            if part.shape != (tokens_each,):
                also = "" if tokens_each is not None else ": examples have different numbers of tokens"
                raise ArgumentError(f"mask: expected ({tokens_each},) flags, one per token, found {part.shape}{also}")
            return np.flatnonzero(part)
        nothing = not (range(*examples.indices(len(self))) if isinstance(examples, slice) else np.size(examples))
        # No row is read then, which would find tokens out of range. numpy checks them unless two lists are paired.
        if nothing and self._each is not None and (isinstance(part, int) or isinstance(examples, slice)):
            index_of(part, self._each, "token")
        return part

    def _rows(self, examples: Any, tokens: Any) -> NDArray[np.generic]:
        """The rows of resolved examples and of tokens that are integers or a slice."""
        if isinstance(tokens, slice):
            return self._sliced(examples, tokens)
        numbers = np.arange(*examples.indices(len(self))) if isinstance(examples, slice) else np.asarray(examples)
        if isinstance(examples, slice):
            numbers = numbers.reshape(-1, *[1] * np.ndim(tokens))
        try:
            shape = np.broadcast_shapes(numbers.shape, np.shape(tokens))
        except ValueError:
            raise ArgumentError(
                f"examples {numbers.shape} and tokens {np.shape(tokens)} cannot be broadcast together. "
                "acts[np.ix_(examples, tokens)] reads a grid"
            ) from None
        rows = self._gather(numbers if numbers.ndim else examples, tokens)
        return rows.reshape(*shape, self._store.d_model)

    def _sliced(self, examples: int | slice | NDArray[np.int64], tokens: slice) -> NDArray[np.generic]:
        """The same slice of each example."""
        d_model = self._store.d_model
        if isinstance(examples, int):
            return self._part_of(examples, tokens)
        numbers = np.arange(*examples.indices(len(self))) if isinstance(examples, slice) else examples
        flat = np.ascontiguousarray(numbers).reshape(-1)
        lengths, which = np.unique(self._lengths(flat), return_inverse=True)
        ranges = [range(*tokens.indices(int(t))) for t in lengths] or [range(*tokens.indices(self._each or 0))]
        counts = {len(r) for r in ranges}
        if len(counts) > 1:
            raise ArgumentError(
                f"these examples have {min(counts)} to {max(counts)} tokens there, which do not form an array. Use acts.rows() for "
                "all rows, acts.ragged() for values and offsets, or acts[i] for one example",
                path=self._store.path,
            )
        (count,) = counts
        shape = (*numbers.shape, count, d_model)
        if all(r == range(int(t)) for r, t in zip(ranges, lengths, strict=False)) and len(lengths):
            return self._whole(flat, self._asked).reshape(shape)
        starts = np.array([r.start for r in ranges], np.int64)[which]
        positions = starts[:, None] + np.arange(count) * ranges[0].step
        return self._gather(np.broadcast_to(flat[:, None], positions.shape), positions).reshape(shape)

    def _part_of(self, example: int, tokens: slice) -> NDArray[np.generic]:
        """A slice of one example: a view if possible."""
        store = self._store
        if tokens == slice(None):
            return store.sequence(example, self._layer, dtype=self._asked, normalize=self._normalize)
        is_stored = self._asked is None and self._normalize is None
        if is_stored and (view := store.rows.view(store.group_of(self._layer), example)) is not None:
            return view[tokens]
        token_count = int(self._lengths(np.array([example]))[0])
        numbers = np.arange(*tokens.indices(token_count))
        return self._gather(np.full(len(numbers), example), numbers)

    def _even(self) -> int:
        """The number of tokens of all examples."""
        if self._each is None:
            counts = self._counts
            raise ArgumentError(
                f"examples have {counts.min()} to {counts.max()} tokens, which do not form an array. Use acts.rows() for all rows, "
                "(rows, d_model), or acts.ragged() for values and offsets",
                path=self._store.path,
            )
        return self._each

    def _view(self) -> NDArray[np.generic] | None:
        return self._view_of_examples(self._even())

    def _read(self, dtype: np.dtype[np.generic] | None) -> NDArray[np.generic]:
        tokens_each = self._even()
        return self._whole(np.arange(len(self)), dtype).reshape(len(self), tokens_each, self._store.d_model)

    def rows(self) -> RowArray:
        """Returns all rows, example after example, as an array over (row, element). Reads nothing until indexed."""
        return RowArray(self._store, self._layer, self._asked, self._normalize)

    def ragged(self, examples: ArrayLike | slice | None = None) -> Ragged:
        """Reads whole examples of any lengths in parallel.

        Args:
            examples: integers, a mask or a slice, as in ``acts[examples]``; None means all, in order.

        Returns:
            :class:`Ragged`: values ``(rows, d_model)`` and offsets ``(n + 1,)`` int64, for
            ``pyarrow.LargeListArray.from_arrays`` and ``awkward.contents.ListOffsetArray``. The values of all examples are a
            read-only view if they are contiguous in one memory-mapped file, and those of one example as in
            :meth:`Store.sequence`; otherwise they are a copy.

        Raises:
            As ``acts[examples]``.
        """
        chosen = index_of(slice(None) if examples is None else examples, len(self), "example")
        numbers = np.arange(*chosen.indices(len(self))) if isinstance(chosen, slice) else np.atleast_1d(chosen)
        if numbers.ndim != 1:
            raise ArgumentError(f"examples: expected one dimension, found {numbers.ndim}")
        offsets = np.zeros(len(numbers) + 1, np.int64)
        np.cumsum(self._lengths(numbers), out=offsets[1:])
        view = self.rows()._view() if examples is None else None
        return Ragged(self._whole(numbers, self._asked) if view is None else view, offsets)


class RowArray(_Lazy):
    """All rows of one layer as an array over (row, element), example after example. ``acts.rows()`` creates it.

    ``rows[a:b]``, ``rows[[3, 1]]``, ``rows[mask]`` and ``rows[-1]`` mean the same as for a numpy array. They read in parallel and
    return copies, or a read-only view if a slice is within one example. ``np.asarray(rows)`` is a read-only view if all rows are
    contiguous in one memory-mapped file, else a copy. scikit-learn, faiss and
    ``dask.array.from_array(rows, chunks=(65536, -1))`` accept it.
    """

    ndim = 2

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """One past the last row of each example."""
        return np.cumsum(self._counts)

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, d_model)``. For pickle shards, the first use reads every shard once."""
        return len(self), self._store.d_model

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _shown(self) -> str:
        return f"(rows, {self._store.d_model})"

    @cached_property
    def examples(self) -> NDArray[np.int64]:
        """``(rows,)`` int64, read-only: the example of each row. Computed on first use and cached."""
        numbers = np.repeat(np.arange(len(self._counts)), self._counts)
        numbers.flags.writeable = False
        return numbers

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """``(rows,)`` int64, read-only: the position of each row among its example's stored tokens. Cached."""
        positions = np.arange(len(self)) - np.repeat(self._ends - self._counts, self._counts)
        positions.flags.writeable = False
        return positions

    def locate(self, rows: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (examples, tokens) of row numbers, without computing those of other rows."""
        numbers = np.asarray(
            index_of(rows, len(self), "row") if not isinstance(rows, slice) else _numbers(rows, len(self))
        )
        examples = np.searchsorted(self._ends, numbers, "right")
        return examples, numbers - (self._ends[examples] - self._counts[examples])

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: object) -> NDArray[Any]:
        """Reads a part; see the class.

        Raises:
            OutOfRangeError: a row or element does not exist. It is an IndexError.
            ArgumentError: a mask has the wrong shape, or the key has a type that is not an index.
            Errors of :meth:`Store.gather`.
        """
        which, elements = _parts(key, self.ndim, None)
        chosen = index_of(which, len(self), "row")
        _check_elements(chosen, 0, elements)
        if isinstance(chosen, slice):
            read = self._run(range(*chosen.indices(len(self))))
        else:
            read = self._gather(*self.locate(chosen)).reshape(*np.shape(chosen), self._store.d_model)
        return _narrowed(read, elements)

    def _run(self, numbers: range) -> NDArray[np.generic]:
        """Rows of a slice. Adjacent rows are read as whole examples, so that a block needs no index per row."""
        if numbers.step == 1 and len(numbers):
            first, last = np.searchsorted(self._ends, (numbers[0], numbers[-1]), "right").tolist()
            begin = int(self._ends[first] - self._counts[first])
            spare = int(self._ends[last]) - begin - len(numbers)
            if spare * 4 <= len(numbers):  # few rows are read unnecessarily
                block = self._whole(np.arange(first, last + 1), self._asked)
                return block[numbers[0] - begin : numbers[-1] + 1 - begin]
        return self._gather(*self.locate(np.arange(numbers.start, numbers.stop, numbers.step)))

    def _view(self) -> NDArray[np.generic] | None:
        counts = self._counts
        if len(counts) and int(counts.min()) == int(counts.max()) == 1:  # evenly spaced rows form an array too
            examples = self._view_of_examples(1)
            return None if examples is None else examples.reshape(-1, self._store.d_model)
        view = self._view_of_all()
        return view[0] if view is not None and view[2] is None and len(view[0]) == len(self) else None

    def _read(self, dtype: np.dtype[np.generic] | None) -> NDArray[np.generic]:
        return self._whole(np.arange(self._store.num_examples), dtype)


def _parts(
    key: object, ndim: int, masked: Callable[[NDArray[np.bool_]], tuple[NDArray[np.int64], NDArray[np.int64]]] | None
) -> list[Any]:
    """One index per axis; axes that the key does not name are whole."""
    parts = list(key) if isinstance(key, tuple) else [key]
    parts = [plain_index(part) for part in parts]
    if (
        masked is not None
        and parts
        and isinstance(parts[0], np.ndarray)
        and parts[0].dtype == bool
        and parts[0].ndim == 2
    ):
        parts[:1] = masked(parts[0])
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise ArgumentError("an index has at most one ellipsis ('...')")
    if len(parts) - len(dots) > ndim:
        raise OutOfRangeError(f"too many indices: the array has {ndim} axes, found {len(parts) - len(dots)}")
    rest = [slice(None)] * (ndim - len(parts) + len(dots))
    position = dots[0] if dots else len(parts)
    moves = (
        position == 2
        and isinstance(parts[0], slice)
        and not isinstance(parts[1], slice)
        and not isinstance(parts[-1], slice)
        and any(isinstance(part, np.ndarray) for part in parts)
    )
    if dots and not rest and moves:
        raise ArgumentError(
            "index: an ellipsis between a list and a number is ambiguous: numpy moves the list's axes to the front. Leave it out."
        )
    return [*parts[:position], *rest, *parts[position + 1 :]]


def _numbers(part: slice, count: int) -> NDArray[np.int64]:
    return np.arange(*part.indices(count))


def _narrowed(rows: NDArray[np.generic], part: int | slice | NDArray[np.generic]) -> NDArray[np.generic]:
    """Rows cut to a part of their last axis."""
    elements: NDArray[np.generic] = rows[
        ..., part if isinstance(part, slice) else index_of(part, rows.shape[-1], "element")
    ]
    return elements


def _check_elements(first: object, second: object, elements: object) -> None:
    """Refuses lists of elements where numpy would pair them with other lists, or move their axis to the front."""
    if not isinstance(elements, np.ndarray):
        return
    lists = any(isinstance(part, np.ndarray) for part in (first, second))
    is_separated = isinstance(second, slice) and not isinstance(first, slice)
    if lists or is_separated:
        raise ArgumentError(
            "elements: a list combined with other lists or numbers is ambiguous. Index the result: acts[...][..., elements]"
        )
