"""The store: an open dataset of activations."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

import actshard._native as _native
from actshard._native import Rows
from actshard.base import _arguments
from actshard.base.codes import Remark
from actshard.base.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    LayerError,
    NotStoredError,
    OutOfRangeError,
    OverflowWarning,
    warn,
)
from actshard.base.late import Late
from actshard.base.layers import Layer, is_one, not_stored, one, plain, short, stored
from actshard.formats.contents import Contents, Logits, Router
from actshard.looking.sampled import SampledVerbs
from actshard.looking.stats import Stats
from actshard.reading.absent import Closed, Without
from actshard.reading.arrays import LayerArray
from actshard.reading.describing import columns_of, identity_of, info_of, sample_of
from actshard.reading.extending import ColumnVerbs
from actshard.streaming.normalizer import Normalizer, RowKind, read_normalized
from actshard.streaming.readable import NativeSelection, SelectedRows, content_range, tokens_anywhere
from actshard.streaming.selection import COMPARED, column, memory_for_flags
from actshard.streaming.verbs import StreamVerbs

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.reading.chosen import Chosen
else:
    pa = Late("pyarrow")

_SLAB_BYTES = 32 << 20
"""Approximate size of the blocks that sequences share: large enough for huge pages, small enough to keep."""

_DOORS = frozenset(
    {
        "contents",
        "rows",
        "group_of",
        "row_kind",
        "gather_of",
        "check_open",
        "native_stream",
        "known_stats",
        "sample_of",
        "stats_of",
    }
)
"""Internal names for other modules of this package; ``dir()`` omits them."""


@_arguments.check_names_of_methods
class Store(StreamVerbs, SampledVerbs, ColumnVerbs):
    """A dataset of activations: rows of ``d_model`` elements, addressed by (example, layer, token).

    :func:`actshard.open` creates it. Thread-safe, usable after ``fork``, and pickled as its path and options. Reads release the
    GIL.

    Attributes:
        format: ``"saev"``, ``"lmprobe"``, ``"zarr"``, ``"pickle"`` or another installed format.
        path: the opened path.
        layers: layer *names*, in stored order: integers (negative ones are names too), or strings such as
            ``"blocks.5.hook_resid_post"``, depending on the dataset.
        d_model: elements per row; 0 for a dataset without hidden states.
        dtype: numpy dtype of stored rows; bfloat16 is ``ml_dtypes.bfloat16``. Pickle shards may contain several dtypes: this is
            the first array's, and reading examples of another dtype requires ``dtype=``.
        num_examples: number of examples; also ``len(store)``.
        metadata: the dataset's metadata in the format's own structure.
        warnings: problems of this dataset: strings, each with a ``code``.
        io: how rows are read: ``"mmap"`` or ``"pread"``.
        special_tokens: number of tokens at the start of each example that are not content: 1 for saev with CLS, else 0.
    """

    def __init__(self, contents: Contents, *, io: str, reopen: tuple[Callable[..., Store], tuple[object, ...]]) -> None:
        self._contents = contents
        self._reopen = reopen
        self.layers = stored(contents.layers, contents.path)
        self._groups = {layer: i for i, layer in enumerate(self.layers)}
        self._rows: Rows | Without = contents.rows if contents.rows is not None else Without(contents)
        self._table: pa.Table | None = None
        self._extras: dict[str, Any] = {}
        self._dtype = contents.dtype
        self.format = contents.format
        self.path: Path = contents.path
        self.d_model = contents.d_model
        self._token_counts: NDArray[np.int64] | None = None
        self._identity: str | None = None
        self._samples: dict[tuple[int, ...], str] = {}
        self._lengths: NDArray[np.int64] | None = None
        self._lengths_read = False
        self.num_examples = contents.num_examples
        self.metadata = contents.metadata
        self.warnings = tuple(map(Remark.of, contents.warnings))
        self.io = io
        self.special_tokens = contents.special_tokens

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - _DOORS)

    @property
    def contents(self) -> Contents:
        """The format's description of the dataset. Internal."""
        return self._contents

    @property
    def rows(self) -> Rows:
        """The binding's rows. Internal.

        Raises:
            NotStoredError, ClosedError: the dataset has no hidden states; the store was closed.
        """
        return self._open_rows()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of stored rows, as in the files. The metadata may contain another one."""
        return self._dtype

    @property
    def token_counts(self) -> NDArray[np.int64]:
        """``(num_examples,)`` int64, read-only: number of stored tokens per example.

        1 if an example has one pooled vector, 0 if it has none. Computed on first use and cached. For pickle shards, whose
        lengths are only in the data, this reads every shard once.
        """
        if self._token_counts is None:
            try:
                counts = self._contents.token_counts()
            except ClosedError as error:  # the core does not know the dataset's path
                error.path = error.path or self.path
                raise
            self._token_counts = _arguments.shared(counts)
        return self._token_counts

    def tokens_of(self, examples: ArrayLike) -> NDArray[np.int64]:
        """Returns ``token_counts[examples]`` without counting the other examples.

        Raises:
            OutOfRangeError: an example is out of range.
        """
        numbers, shape = _arguments.index(self._numbers(examples), "examples")
        differ = self._contents.layers_differ
        if self._token_counts is None and self.layers and not differ:
            return self._rows.tokens_of(0, numbers).reshape(shape)
        if numbers.size and (numbers.min() < 0 or numbers.max() >= self.num_examples):
            raise self._out_of_range(numbers)
        if self._token_counts is None and self.layers and differ:
            return tokens_anywhere(self._open_rows(), len(self.layers), numbers).reshape(shape)
        return self.token_counts[numbers].reshape(shape)

    def tokens_in(self, layer: Layer) -> NDArray[np.int64]:
        """Returns the number of stored tokens per example in one layer, ``(num_examples,)`` int64; 0 if an example lacks it."""
        group, tokens_each = self._group(layer), self._contents.tokens_each
        if tokens_each is not None:
            return np.broadcast_to(np.int64(tokens_each), (self.num_examples,))
        return self._rows.tokens_of(group, np.arange(self.num_examples))

    def __len__(self) -> int:
        return self.num_examples

    def __repr__(self) -> str:
        dataset = self._contents.whole
        prefix = "" if dataset is None else f"{self.num_examples:,} of "
        examples = _arguments.many((dataset or self).num_examples, "example")
        return (
            f"<actshard.Store {self.format} {str(self.path)!r}: {prefix}{examples}, "
            f"layers {short(self.layers)}, d_model {self.d_model}, {self.dtype}>"
        )

    def __reduce__(self) -> tuple[object, ...]:
        chosen = self._contents.chosen
        return self._reopen if chosen is None else (_filtered, (*self._reopen, chosen))

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes and unmaps all files immediately. Views stay valid, and active streams finish.

        Later reads of rows, labels and columns raise ClosedError. Attributes such as layers, metadata and num_examples remain
        available.
        """
        closed = Closed(self.path)
        resources = [self._rows, self._extras.get("logits"), self._extras.get("router")]
        self._rows = closed
        self._table = None
        self._extras = {"logits": closed, "router": closed, "labels": closed}
        for has in resources:
            for rows in (has.values, has.indices) if isinstance(has, Logits) else (getattr(has, "rows", has),):
                if rows is not None and not isinstance(rows, Without):
                    rows.close()

    def group_of(self, layer: Layer) -> int:
        """Returns the index of a layer in :attr:`layers`. Internal.

        Raises:
            LayerError: the dataset has no such layer.
        """
        return self._group(layer)

    def _group(self, layer: object) -> int:
        if type(layer) is int and (group := self._groups.get(layer)) is not None:
            return group
        if isinstance(layer, np.ndarray) and not layer.ndim:
            layer = layer[()]
        # True and 1.0 compare equal to 1 but are not layer names.
        with contextlib.suppress(ArgumentTypeError):
            if (group := self._groups.get(one(layer))) is not None:
                return group
        raise LayerError(not_stored(layer, self.layers), path=self.path)

    def __getitem__(self, key: object) -> NoReturn:
        """Not supported: an example has rows of several layers, and columns.

        Raises:
            ArgumentTypeError: always; names :meth:`layer`, :meth:`sequence` and :attr:`table`.
        """
        layer = next(iter(self.layers), 0)
        raise ArgumentTypeError(
            f"a store is indexed by layer: store.layer({layer!r})[0], store.sequence(example=0, layer={layer!r}); columns are in "
            "store.table"
        )

    def _numbers(self, examples: Any) -> Any:
        """Converts masks and columns to integers; returns other values unchanged."""
        if type(examples) is int or examples is None:
            return examples
        examples = column(examples)
        if isinstance(examples, list) and examples and all(isinstance(x, bool | np.bool_) for x in examples):
            examples = np.array(examples)
        if isinstance(examples, bool | np.bool_):
            raise ArgumentTypeError(f"examples: expected integers or one flag per example, found {examples}{COMPARED}")
        if not isinstance(examples, np.ndarray):
            return examples
        if examples.dtype == np.bool_:
            if examples.shape != (self.num_examples,):
                raise ArgumentError(
                    f"examples: expected {self.num_examples} flags, one per example, found booleans {examples.shape}"
                )
            return np.flatnonzero(examples)
        if examples.size == 0 and self._table is not None:
            # Possibly from `column == x`, which is one bool. Only users who have read the table can compare columns.
            text = f"examples: no example was chosen{COMPARED}"
            warn(text, code="no-example-chosen")
        return examples

    def _overflowed(self, counts: list[int], layer: Any, dtype: DTypeLike | None) -> None:
        warn(
            f"{self.path}: layer {plain(layer)}: {counts[0]} finite values became infinite as "
            f"{_arguments.dtype(dtype or self.dtype)[0]}. Use a wider dtype=.",
            OverflowWarning,
        )

    def gather(
        self,
        layer: Layer,
        examples: ArrayLike,
        tokens: ArrayLike,
        *,
        out: object = None,
        dtype: DTypeLike | None = None,
        normalize: Normalizer | None = None,
    ) -> NDArray[Any]:
        """Reads arbitrary rows of one layer.

        Args:
            layer: a name from :attr:`layers`.
            examples: integers, 0 to ``num_examples - 1``, or a mask: one bool per example, as a numpy or Arrow array.
            tokens: integers; negative ones count from the example's end. For saev these are stored positions: 0 is CLS if there
                is one. Broadcast against ``examples``.
            out: a writable C-contiguous buffer of the exact size (a numpy array, a CPU torch tensor, any buffer), which is filled
                and returned. Freed large outputs are reused in any case; ``out`` guarantees the reuse.
            dtype: dtype of the result: float16, bfloat16, float32 or float64. None keeps the stored dtype. Finite values that are
                too large become infinite, with an :class:`~actshard.OverflowWarning`.
            normalize: :meth:`normalizer` of this layer, as in :meth:`stream`. None returns rows as they are stored.

        Returns:
            ``(n, d_model)`` for n indices (n is 1 for two integers), a copy. Multi-dimensional indices return their broadcast
            shape + ``(d_model,)``.

        Raises:
            LayerError, OutOfRangeError: the layer, example or token does not exist.
            ArgumentError, DtypeError: indices are not integers, ``out`` has the wrong size, the dtype is not supported.
            MissingFileError, TruncatedFileError, FormatError: a file is missing, was truncated after opening, or contains fewer
                rows than the index claims.
        """
        group = self._group(layer)
        if type(examples) is not int:
            examples = self._numbers(examples)
        if normalize is not None:
            return read_normalized(
                normalize,
                self.row_kind(layer),
                dtype,
                out,
                lambda stored: self.gather(layer, examples, tokens, dtype=stored),
            )
        if dtype is None and not self._contents.converts:
            rows = self._rows.gather(group, examples, tokens, out, None)
            return rows
        lost: list[int] = []
        rows = self._rows.gather(group, examples, tokens, out, dtype, lost)
        if lost:
            self._overflowed(lost, layer, dtype)
        return rows

    def gather_of(
        self, groups: NDArray[np.int64], examples: Any, tokens: Any, out: Any, dtype: DTypeLike | None, layer: Any
    ) -> NDArray[np.generic]:
        """:meth:`gather` from several groups: ``(..., groups, d_model)``. ``layer``: their names, for messages. Internal."""
        e, t, shape = _arguments.broadcast(self._numbers(examples), tokens)
        n, lost = len(groups), list[int]()
        every = np.tile(groups, len(e))
        rows = self._rows.gather(every, np.repeat(e, n), np.repeat(t, n), out, dtype, lost)
        if lost:
            self._overflowed(lost, layer, dtype)
        shaped = rows if out is not None else rows.reshape(*shape, n, self.d_model)
        return shaped

    def filter(self, examples: object) -> Store:
        """Returns a store of some of the examples, numbered from 0: it reads, streams, converts and pickles like any store.

        Reads no rows. Memory: none for a slice or evenly spaced numbers, otherwise 8 bytes per chosen example. Keep this store
        open while the result is in use.

        Args:
            examples: a condition over the columns of :attr:`table`, as a text (``"label == 1 and verb in ('run', 'walk')"``; names
                that are no identifiers in backquotes) or as a pyarrow expression (``pc.field("label") == 1``), a function of the
                table, one bool per example, integers in any order (repeated and negative ones as in numpy), or a slice. Examples
                for which a condition is null are left out. A mask, a function or a condition that chooses no example warns.

        Raises:
            ArgumentError, OutOfRangeError: the argument has another type; a mask has the wrong length; an expression has an unknown
                column; an integer is out of range.
        """
        from actshard.reading.choosing import resolve

        self._check_not_closed()
        return self._choose(resolve(self, examples))

    def split(self, test: float = 0.2, *, by: str | ArrayLike | None = None, seed: int = 0) -> tuple[Store, Store]:
        """Returns two stores, for training and for testing: ``train, test = store.split(test=0.2, by="verb")``.

        The split depends only on the arguments, and is the same on every machine. With ``by`` it depends on the groups' values, not
        on the order of the examples. Both stores keep the stored order.

        Args:
            test: share of test examples, 0 to 1, or their number. With ``by``, the nearest number that whole groups allow.
            by: name of a column, or one value per example: examples with equal values are in the same store. Null is a value.
            seed: another seed gives another split.

        Raises:
            ArgumentError: there are fewer than two groups, or an argument is invalid.
            NotStoredError: the dataset has no such column.
        """
        from actshard.reading.choosing import split

        self._check_not_closed()
        with memory_for_flags(self):
            train, held_out = split(self, test, by, seed)
        return self._choose(train), self._choose(held_out)

    def _choose(self, positions: Chosen) -> Store:
        from actshard.reading.choosing import choose

        return Store(choose(self._contents, positions), io=self.io, reopen=self._reopen)

    def whole(self) -> Store:
        """Returns a store of the whole dataset, if this store was filtered; else the store itself.

        Raises:
            ClosedError: the dataset's store was closed.
        """
        from actshard.reading.choosing import check_whole_open

        dataset = self._contents.whole
        if dataset is None:
            return self
        check_whole_open(dataset)
        return Store(dataset, io=self.io, reopen=self._reopen)

    @property
    def chosen(self) -> NDArray[np.int64] | None:
        """``(num_examples,)`` int64: the examples' numbers in the opened dataset; None for the dataset itself."""
        chosen = self._contents.chosen
        return None if chosen is None else chosen.array()

    @property
    def parts(self) -> tuple[Store, ...]:
        """The stores that :func:`actshard.concat` joined, in order; empty for any other store."""
        return (self._contents.whole or self._contents).joined

    def origins(self, examples: ArrayLike | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns each example's index in :attr:`parts` and its number there, int64 ``(n,)``; ``examples`` as in :meth:`logits`."""
        from actshard.reading.joining import places

        return places(self._contents, np.arange(self.num_examples) if examples is None else self._numbers(examples))

    def layer(self, layer: Layer, *, dtype: DTypeLike | None = None, normalize: Normalizer | None = None) -> LayerArray:
        """Returns one layer as an array over (example, token, element), which reads nothing until it is indexed.

        ``acts = store.layer(5)`` supports ``acts[17]``, ``acts[17, -1]``, ``acts[mask, 0]``, ``np.asarray(acts)``.
        ``acts.rows()`` is the two-dimensional array of all rows; ``acts.ragged()`` returns values and offsets.

        Args:
            layer: a name from :attr:`layers`.
            dtype: dtype of the array, as in :meth:`gather`.
            normalize: as in :meth:`gather`. Normalized arrays are copies.

        Raises:
            LayerError, DtypeError: the dataset has no such layer; the dtype is not supported.
        """
        return LayerArray(self, layer, dtype, normalize)

    def last_tokens(
        self,
        layer: Layer,
        examples: ArrayLike | None = None,
        *,
        out: object = None,
        dtype: DTypeLike | None = None,
        normalize: Normalizer | None = None,
    ) -> NDArray[Any]:
        """Reads the last token's row of each example (lmprobe: the row at ``shard_index``/``row_offset``).

        Args:
            layer: a name from :attr:`layers`.
            examples: integers or a mask, as in :meth:`gather`; None means all, in order.
            out: as in :meth:`gather`.
            dtype: as in :meth:`gather`.
            normalize: as in :meth:`gather`.

        Returns:
            ``(n, d_model)``, a copy.

        Raises:
            As :meth:`gather`.
        """
        if normalize is not None:
            return read_normalized(
                normalize,
                self.row_kind(layer),
                dtype,
                out,
                lambda stored: self.last_tokens(layer, examples, dtype=stored),
            )
        group = self._group(layer)
        examples = self._numbers(examples)
        tokens = None
        if self.content_lengths is not None:
            examples = np.arange(self.num_examples) if examples is None else examples
            numbers, shape = _arguments.index(examples, "examples")
            if numbers.size and (numbers.min() < 0 or numbers.max() >= self.num_examples):
                raise self._out_of_range(numbers)
            last = content_range(self, self.tokens_of(numbers), numbers)[1] - 1
            if (last < 0).any():
                raise OutOfRangeError(f"example {numbers[last < 0][0]} has no tokens", path=self.path)
            examples, tokens = numbers.reshape(shape), last.reshape(shape)
        lost: list[int] = []
        rows = self._rows.gather(group, examples, tokens, out, dtype, lost)
        if lost:
            self._overflowed(lost, layer, dtype)
        return rows

    def sequence(
        self,
        example: int,
        layer: Layer,
        *,
        out: Any = None,
        dtype: DTypeLike | None = None,
        normalize: Normalizer | None = None,
    ) -> NDArray[Any]:
        """Reads all stored tokens of one example.

        Args:
            example: an integer, 0 to ``num_examples - 1``.
            layer: a name from :attr:`layers`.
            out: as in :meth:`gather`.
            dtype: as in :meth:`gather`.
            normalize: as in :meth:`gather`.

        Returns:
            ``(T, d_model)``. A read-only view if the rows are contiguous in one memory-mapped file and none of ``out``,
            ``normalize`` and another ``dtype`` is given: pages are read on first access, and the view keeps the file mapped
            after the store is closed.
            Otherwise a copy.

            If the file is truncated while a view exists, accessing the lost part kills the process (SIGBUS), as for any
            memory-mapped array. ``io="pread"`` and ``out=`` return copies. All other reads copy, and check the file's length
            first.

        Raises:
            As :meth:`gather`.
        """
        if normalize is not None:
            return read_normalized(
                normalize, self.row_kind(layer), dtype, out, lambda stored: self.sequence(example, layer, dtype=stored)
            )
        group = self._group(layer)
        number = self._example(example)
        as_stored = dtype is None or _arguments.dtype(dtype)[0] == self.dtype
        if dtype is not None and as_stored and self._contents.types_may_differ:
            as_stored = self._rows.stored_types(group, np.array([number], np.int64)) == [self.dtype]
        if out is None and as_stored:
            view = self._rows.view(group, number)
            if view is not None:
                return view
        lost: list[int] = []
        copy = self._rows.gather_whole(group, np.array([number], np.int64), out, dtype, lost)
        if lost:
            self._overflowed(lost, layer, dtype)
        return copy

    def sequences(
        self,
        examples: ArrayLike,
        layer: Layer | Sequence[Layer],
        *,
        dtype: DTypeLike | None = None,
        normalize: Normalizer | None = None,
    ) -> list[NDArray[Any]]:
        """Reads all stored tokens of several examples in parallel.

        Args:
            examples: integers, 0 to ``num_examples - 1``, or a mask, as in :meth:`gather`.
            layer: a name from :attr:`layers`, or one name per example: ``sequences([4, 4, 9], [0, 7, 7])`` reads two layers of
                example 4 and one of example 9.
            dtype: as in :meth:`gather`.
            normalize: as in :meth:`gather`, for one layer.

        Returns:
            A list of ``(T_i, d_model)`` arrays, copies. Adjacent arrays share memory blocks of about 32 MiB; to keep one array
            without its block, copy it.

        Raises:
            As :meth:`gather`.
        """
        numbers, shape = _arguments.index(self._numbers(examples), "examples")
        group = self._groups_of(layer, numbers.size)
        if len(shape) != 1:
            raise ArgumentError(f"examples: expected one dimension, found {len(shape)}")
        if normalize is not None and isinstance(group, np.ndarray):
            raise ArgumentError("normalize: expected one layer, found one per example")
        if numbers.size == 0:
            return []
        if numbers.min() < 0 or numbers.max() >= self.num_examples:
            raise self._out_of_range(numbers)
        if normalize is not None:
            kind = self.row_kind(self.layers[int(group)])
            rows = self.sequences(examples, layer, dtype=kind.exact(normalize, dtype))

            def rescale(stored_rows: NDArray[np.generic]) -> NDArray[np.generic]:
                return read_normalized(normalize, kind, dtype, None, lambda _: stored_rows)

            return [rescale(stored_rows) for stored_rows in rows]
        itemsize = self.dtype.itemsize if dtype is None else _arguments.dtype(dtype)[0].itemsize
        ends = np.cumsum(self._rows.tokens_of(group, numbers))
        slab = np.maximum(ends - 1, 0) * (self.d_model * itemsize) // _SLAB_BYTES
        starts = [0, *(np.flatnonzero(np.diff(slab)) + 1).tolist(), numbers.size]
        sequences: list[NDArray[np.generic]] = []
        lost: list[int] = []
        for first, last in itertools.pairwise(starts):
            groups = group[first:last] if isinstance(group, np.ndarray) else group
            block = self._rows.gather_whole(groups, numbers[first:last], None, dtype, lost)
            before = int(ends[first - 1]) if first else 0
            stops = (ends[first:last] - before).tolist()
            sequences.extend(block[a:b] for a, b in zip([0, *stops], stops, strict=False))
        if lost:
            self._overflowed([sum(lost)], layer, dtype)
        return sequences

    def row_kind(self, layer: Layer) -> RowKind:
        """The rows of a layer. Internal."""
        group = self._group(layer)
        stored = self._open_rows().stored_types(group, None) if self._contents.types_may_differ else ()
        is_mixed = any(dtype != self.dtype for dtype in stored)
        return RowKind(self.layers[group], self.d_model, self.dtype, is_mixed, self._contents.reads_convert)

    def _out_of_range(self, examples: NDArray[np.int64]) -> OutOfRangeError:
        bad = examples[(examples < 0) | (examples >= self.num_examples)][0]
        return OutOfRangeError(
            f"example {bad} is out of range: the dataset has {_arguments.many(self.num_examples, 'example')}",
            path=self.path,
        )

    def check_open(self) -> None:
        """Raises if the store was closed. Internal.

        Raises:
            ClosedError: the store was closed.
        """
        self._open_rows()

    def native_stream(self, selection: NativeSelection, options: dict[str, Any]) -> _native.Stream:
        """Returns the binding's stream, for :class:`~actshard.Stream`. Internal."""
        return _native.Stream(self._open_rows(), selection, **options)

    def known_stats(self, layer: Layer, rows: SelectedRows) -> Stats:
        """Returns saved statistics of a layer's rows if they are still valid; otherwise computes them without saving. Internal."""
        from actshard.looking.saved import known

        return known(self, layer, rows)

    def _open_rows(self) -> Rows:
        if isinstance(self._rows, Without):
            self._rows.gather()
        return self._rows

    def _groups_of(self, layer: Layer | Sequence[Layer], n: int) -> int | NDArray[np.int64]:
        if is_one(layer) or not np.iterable(layer):
            return self._group(layer)
        groups = np.array([self._group(x) for x in layer], np.int64)
        if groups.size != n:
            raise ArgumentError(f"layer: expected one layer, or one for each of {n} examples, found {groups.size}")
        return groups

    def _example(self, example: int) -> int:
        flat, shape = _arguments.index(example, "example")
        if shape != [1]:
            raise ArgumentError(f"example: expected one integer, found {shape}. Use sequences() for several.")
        return int(flat[0])

    @property
    def table(self) -> pa.Table:
        """The columns of all examples: a pyarrow table of ``num_examples`` rows with the format's column names.

        Read on first use and cached. lmprobe's per-token address lists are left out, because they can take gigabytes;
        :meth:`read_columns` returns them. lmprobe has texts, labels and ids; saev has only the example number, ``example_idx``.
        """
        self._check_not_closed()
        if self._table is None:
            self._table = self.read_columns(self._contents.column_names)
        return self._table

    def read_columns(self, names: str | Sequence[str], examples: ArrayLike | None = None) -> pa.Table:
        """Reads some columns by their names in the format. Not cached.

        ``"text"`` and ``"prompt"`` both name the examples' texts in every format that stores whole texts. The result has the
        requested name.

        Args:
            names: the columns, or one.
            examples: the examples to read, in this order: integers, or a mask, as in :meth:`gather`; None: all. Stores of
                draft-model caches read only their values; other formats read the whole columns.

        Raises:
            NotStoredError: the dataset has no such column.
            OutOfRangeError: there is no such example.
        """
        self._check_not_closed()
        numbers = None if examples is None else _arguments.index(self._numbers(examples), "examples")[0]
        if numbers is not None and numbers.size and (numbers.min() < 0 or numbers.max() >= self.num_examples):
            raise self._out_of_range(numbers)
        column_names = (
            [names] if isinstance(names, str) else _arguments.listed(names, "names: expected a list of columns")
        )
        return columns_of(self._contents, column_names, numbers)

    def _check_not_closed(self) -> None:
        if isinstance(self._rows, Closed):
            self._rows.gather()

    @property
    def identity(self) -> str:
        """A digest of the dataset's shape and of the last tokens of up to eight examples in the first layer.

        Copies of a dataset have equal digests. Datasets of another shape, or that differ in these rows, have others.
        """
        if self._identity is None:
            self._identity = identity_of(self)
        return self._identity

    def sample_of(self, layers: Sequence[Layer]) -> str:
        """A digest of a few rows of each of these layers, for states of streams; cached. Internal.

        The last tokens of up to eight examples; of data that is decoded in units, of the first example, and the sizes of files.
        """
        key = tuple(map(self._group, layers))
        if key not in self._samples:
            self._samples[key] = sample_of(self, layers)
        return self._samples[key]

    @property
    def content_lengths(self) -> NDArray[np.int64] | None:
        """``(num_examples,)`` int64, read-only: number of content tokens per example, if short examples are padded; else None.

        saev requires equal lengths, so actshard stores the lengths in an extra file. Streams, statistics and :meth:`last_tokens`
        skip padding; :meth:`gather` and :meth:`sequence` read it.
        """
        if not self._lengths_read:
            lengths = self._contents.content_lengths()
            self._lengths, self._lengths_read = None if lengths is None else _arguments.shared(lengths), True
        return self._lengths

    @property
    def labels(self) -> NDArray[np.uint8] | None:
        """saev's patch labels, ``(num_examples, patches)`` uint8, read-only, without a column for CLS; None without labels.

        Read into memory on first use and cached. lmprobe stores one label per example: ``store.table["label"]``.
        """
        if "labels" not in self._extras:
            labels = self._contents.labels()
            self._extras["labels"] = None if labels is None else _arguments.shared(labels)
        patch_labels = self._extras["labels"]
        if isinstance(patch_labels, Closed):
            patch_labels.gather()
        return cast("NDArray[np.uint8] | None", patch_labels)

    def logits(self, examples: ArrayLike | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Reads the top-k logits at each example's last token.

        Args:
            examples: integers or a mask, as in :meth:`gather`; None means all, in order.

        Returns:
            Values ``(n, k)`` and token indices ``(n, k)`` in the stored dtypes, copies.

        Raises:
            NotStoredError: the dataset contains no logits.
        """
        logits = self._extra("logits", self._contents.logits, "logits")
        if isinstance(logits, Closed):
            logits.gather()
        assert isinstance(logits, Logits)
        examples = self._numbers(examples)
        return logits.values.gather(0, examples, None, None, None), logits.indices.gather(0, examples, None, None, None)

    def router(self, layer: Layer, examples: ArrayLike | None = None) -> NDArray[Any]:
        """Reads the router logits of a mixture-of-experts layer.

        Args:
            layer: one of the router's layers.
            examples: integers or a mask, as in :meth:`gather`; None means all, in order.

        Returns:
            ``(n, experts)`` in the stored dtype, a copy.

        Raises:
            NotStoredError: the dataset contains no router tensors.
            LayerError: no router tensor for this layer; the message lists the layers.
        """
        router = self._extra("router", self._contents.router, "router tensors")
        if isinstance(router, Closed):
            router.gather()
        assert isinstance(router, Router)
        if not is_one(layer) or layer not in router.layers:
            raise LayerError(
                f"router of layer {layer!r} is not stored; the router's layers are {short(router.layers)}",
                path=self.path,
            )
        rows = router.rows.gather(router.layers.index(layer), self._numbers(examples), None, None, None)
        return rows

    def _extra(self, name: str, make: Callable[[], object], what: str) -> Any:
        if name not in self._extras:
            self._extras[name] = make()
        if self._extras[name] is None:
            raise NotStoredError(f"the dataset contains no {what}", path=self.path)
        return self._extras[name]

    def info(self) -> dict[str, Any]:
        """Returns the properties that ``actshard info`` prints, as plain Python values.

        ``shards``, ``missing_shards`` and ``bytes`` are None if they would need one request for each of many chunks, because a web
        server cannot list them. ``ratio`` is that of ``bytes`` to the bytes of the rows, uncompressed; None if one is unknown.
        """
        return info_of(self, counted=self._token_counts is not None)


def _filtered(make: Callable[..., Store], args: tuple[object, ...], chosen: Chosen) -> Store:
    """A filtered store, opened again."""
    return make(*args)._choose(chosen)
