"""A dataset on disk, opened."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import operator
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

import actshard._native as _native
from actshard import _arguments
from actshard.codes import Remark
from actshard.errors import (
    ActshardError,
    ActshardWarning,
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    LayerError,
    NotStoredError,
    OutOfRangeError,
    OverflowWarning,
)
from actshard.formats.contents import Contents, Logits, Router
from actshard.location import Location
from actshard.stats import Stats
from actshard.stream import Scale, Shuffle, Stream
from actshard.stream.selection import COMPARED, Mask, Tokens, column, select

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard._native import Rows

_SAMPLES = 8
"""Rows that a dataset is told from others by."""

_SLAB_BYTES = 32 << 20
"""Sequences read together share blocks of about this size: large enough for huge pages, small enough to keep."""


class Store:
    """A dataset of activations: rows of ``d_model`` elements, addressed by (example, layer, token).

    Made by :func:`actshard.open`. A store can be used from many threads at once, survives ``fork``, and pickles as its path
    and options. Reading releases the GIL.

    Attributes:
        format: ``"saev"``, ``"lmprobe"``, ``"zarr"`` or ``"pickle"``.
        path: what was opened.
        layers: layer *names*, in stored order. Negative numbers are names too.
        d_model: elements per row; 0 for a dataset without hidden states.
        dtype: the numpy type of a row as stored; bfloat16 is ``ml_dtypes.bfloat16``. Pickle shards may hold examples of several
            types: that of the first array; examples of another type are read with ``dtype=``, and an error without.
        num_examples: number of examples; also ``len(store)``.
        metadata: the dataset's metadata, as the format holds it.
        warnings: what a reader should know about this dataset: texts, each with a ``code``.
        io: how rows are read: ``"mmap"`` or ``"pread"``.
        special_tokens: tokens at the front of every example that stand for none of its content: 1 for saev with CLS, else 0.
    """

    def __init__(self, contents: Contents, *, io: str, reopen: tuple[Callable[..., Store], tuple[Any, ...]]) -> None:
        self._contents = contents
        self._reopen = reopen
        self._groups = {layer: i for i, layer in enumerate(contents.layers)}
        self._rows: Rows | _Without = contents.rows if contents.rows is not None else _Without(contents)
        self._table: pa.Table | None = None
        self._extras: dict[str, Any] = {}
        self._dtype = contents.dtype
        self.format = contents.format
        self.path: Path = contents.path
        self.layers = contents.layers
        self.d_model = contents.d_model
        self._token_counts: NDArray[np.int64] | None = None
        self._identity: str | None = None
        self._lengths: NDArray[np.int64] | None = None
        self._lengths_read = False
        self.num_examples = contents.num_examples
        self.metadata = contents.metadata
        self.warnings = tuple(map(Remark.of, contents.warnings))
        self.io = io
        self.special_tokens = contents.special_tokens

    @property
    def contents(self) -> Contents:
        """What the format handed over: for actshard's own rooms."""
        return self._contents

    @property
    def rows(self) -> Rows:
        """The native half's rows: for actshard's own rooms.

        Raises:
            NotStoredError, ClosedError: there are none; the store was closed.
        """
        return self._open_rows()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type of a row as stored, whatever the metadata claim."""
        return self._dtype

    @property
    def token_counts(self) -> NDArray[np.int64]:
        """``(num_examples,)`` int64, read-only: tokens stored per example.

        1 where only one vector per example is stored, 0 where none is. Counted when first asked for, then kept: pickle shards
        say how long their samples are nowhere but inside, so that every shard is looked into once.
        """
        if self._token_counts is None:
            counts = self._contents.token_counts()
            counts.flags.writeable = False
            self._token_counts = counts
        return self._token_counts

    def tokens_of(self, examples: ArrayLike) -> NDArray[np.int64]:
        """Tokens stored for some examples: ``token_counts[examples]`` without counting the others.

        Raises:
            OutOfRangeError: no such example.
        """
        wanted, shape = _arguments.index(examples, "examples")
        if self._token_counts is None and self.layers:
            return self._rows.tokens_of(0, wanted).reshape(shape)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.num_examples):
            raise OutOfRangeError(
                f"an example is out of range: the dataset has {self.num_examples} examples", path=self.path
            )
        return self.token_counts[wanted].reshape(shape)

    def tokens_in(self, layer: int) -> NDArray[np.int64]:
        """``(num_examples,)`` int64: tokens stored per example in one layer; 0 for an example that lacks it."""
        group, each = self._group(layer), self._contents.tokens_each
        if each is not None:
            return np.broadcast_to(np.int64(each), (self.num_examples,))
        return self._rows.tokens_of(group, np.arange(self.num_examples))

    def __len__(self) -> int:
        return self.num_examples

    def __repr__(self) -> str:
        return (
            f"<actshard.Store {self.format} {str(self.path)!r}: {self.num_examples} examples, "
            f"layers {_short(self.layers)}, d_model {self.d_model}, {self.dtype}>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps and closes all files at once. Views stay valid, and streams that are being read finish.

        Afterwards reading rows, labels and columns raises ClosedError; what is known without reading (layers, metadata,
        num_examples) stays.
        """
        closed = _Closed(self.path)
        held = [self._rows, self._extras.get("logits"), self._extras.get("router")]
        self._rows = closed
        self._table = None
        self._extras = {"logits": closed, "router": closed, "labels": closed}
        for one in held:
            for rows in (one.values, one.indices) if isinstance(one, Logits) else (getattr(one, "rows", one),):
                if rows is not None and not isinstance(rows, _Without):
                    rows.close()

    def group_of(self, layer: int) -> int:
        """The position of a layer in :attr:`layers`.

        Raises:
            LayerError: no such layer.
        """
        return self._group(layer)

    def _group(self, layer: int) -> int:
        if type(layer) is int and (found := self._groups.get(layer)) is not None:
            return found
        # True and 1.0 are equal to 1 and no layer's name.
        name: Any = None
        if not isinstance(layer, bool | np.bool_ | float | np.floating):
            with contextlib.suppress(TypeError):
                name = operator.index(layer)
        if name in self._groups:
            return self._groups[name]
        what = f"layer {layer!r:.100} is not stored; the layers are {_short(self.layers, 200)}"
        if isinstance(layer, list | tuple | np.ndarray):
            what += "; stream(), and sequences() with a layer for each example, take several"
        raise LayerError(what, path=self.path)

    def _numbers(self, examples: Any) -> Any:
        """Masks and columns as integers; anything else as it is."""
        if type(examples) is int or examples is None:
            return examples
        examples = column(examples)
        if isinstance(examples, list) and examples and all(isinstance(x, bool | np.bool_) for x in examples):
            examples = np.array(examples)
        if isinstance(examples, bool | np.bool_):
            raise ArgumentTypeError(
                f"examples: expected integers or one flag for each example, found {examples}{COMPARED}"
            )
        if not isinstance(examples, np.ndarray):
            return examples
        if examples.dtype == np.bool_:
            if examples.shape != (self.num_examples,):
                raise ArgumentError(
                    f"examples: expected one flag for each of {self.num_examples} examples, found booleans {examples.shape}"
                )
            return np.flatnonzero(examples)
        if examples.size == 0 and self._table is not None:
            # Of a column that was compared wrongly, perhaps; who never asked for the table has compared none.
            said = f"examples: no example was chosen{COMPARED}"
            warnings.warn(ActshardWarning(said, code="no-example-chosen"), stacklevel=3)
        return examples

    def _overflowed(self, found: list[int], layer: Any, dtype: Any) -> None:
        warnings.warn(
            f"{self.path}: layer {layer}: {found[0]} finite values became infinite as {np.dtype(_arguments.dtype(dtype)[0])}; "
            "a wider dtype= holds them",
            OverflowWarning,
            stacklevel=3,
        )

    def gather(
        self,
        layer: int,
        examples: ArrayLike,
        tokens: ArrayLike,
        *,
        out: Any = None,
        dtype: DTypeLike | None = None,
    ) -> NDArray[Any]:
        """Reads any rows of one layer.

        Args:
            layer: a name from :attr:`layers`.
            examples: integers, 0 to ``num_examples - 1``, or a mask: one bool for each example, as numpy or arrow array.
            tokens: integers; negative counts from the example's end. For saev, stored positions: 0 is CLS where there is one.
                Broadcast together with ``examples``.
            out: a writable C-contiguous buffer of exactly the right size (a numpy array, a CPU torch tensor, any buffer); it is
                filled and returned. Large outputs that were dropped are recycled anyway; ``out`` makes it certain.
            dtype: convert while copying, in the same pass: float16, bfloat16, float32 or float64. None keeps the stored type.
                Finite values that are too large for it become infinite, with an :class:`~actshard.OverflowWarning`.

        Returns:
            ``(n, d_model)`` for n indices (1 for two plain integers), a copy that the caller owns; indices of more dimensions
            give their broadcast shape + ``(d_model,)``.

        Raises:
            LayerError, OutOfRangeError: no such layer, example or token.
            ArgumentError, DtypeError: indices that are no integers, an ``out`` that does not fit, a type that cannot be given.
            MissingFileError, TruncatedFileError, FormatError: a file is missing, was truncated after opening, or holds fewer rows
                than the index says.
        """
        group = self._group(layer)
        if type(examples) is not int:
            examples = self._numbers(examples)
        if dtype is None:
            rows: NDArray[Any] = self._rows.gather(group, examples, tokens, out, None)
            return rows
        lost: list[int] = []
        rows = self._rows.gather(group, examples, tokens, out, dtype, lost)
        if lost:
            self._overflowed(lost, layer, dtype)
        return rows

    def last_tokens(
        self,
        layer: int,
        examples: ArrayLike | None = None,
        *,
        out: Any = None,
        dtype: DTypeLike | None = None,
    ) -> NDArray[Any]:
        """Reads the last token's row of each example (lmprobe: the row that ``shard_index``/``row_offset`` name).

        Args:
            layer: a name from :attr:`layers`.
            examples: integers or a mask, as in :meth:`gather`; None means all, in order.
            out: as in :meth:`gather`.
            dtype: as in :meth:`gather`.

        Returns:
            ``(n, d_model)``, a copy.

        Raises:
            As :meth:`gather`.
        """
        group = self._group(layer)
        examples = self._numbers(examples)
        tokens = None
        if (lengths := self.content_lengths) is not None:
            examples = np.arange(self.num_examples) if examples is None else examples
            wanted, shape = _arguments.index(examples, "examples")
            if wanted.size and (wanted.min() < 0 or wanted.max() >= self.num_examples):
                raise self._out_of_range(wanted)
            last = self.special_tokens + lengths[wanted] - 1
            if (last < 0).any():
                raise OutOfRangeError(f"example {wanted[last < 0][0]} has no tokens", path=self.path)
            examples, tokens = wanted.reshape(shape), last.reshape(shape)
        lost: list[int] = []
        rows: NDArray[Any] = self._rows.gather(group, examples, tokens, out, dtype, lost)
        if lost:
            self._overflowed(lost, layer, dtype)
        return rows

    def sequence(self, example: int, layer: int, *, out: Any = None, dtype: DTypeLike | None = None) -> NDArray[Any]:
        """All stored tokens of one example.

        Args:
            example: an integer, 0 to ``num_examples - 1``.
            layer: a name from :attr:`layers`.
            out: as in :meth:`gather`.
            dtype: as in :meth:`gather`.

        Returns:
            ``(T, d_model)``. A read-only view wherever the rows lie together in one mapped file, and neither ``out`` nor another
            ``dtype`` was asked for: no byte is copied until it is looked at, and the view keeps the file mapped after the store
            is gone. A copy otherwise.

            A view shows the file: if that is cut short while a view is held, looking at the lost part kills the process
            (SIGBUS), as with any memory-mapped array. ``io="pread"`` and ``out=`` give copies. All other reads copy, and check
            the file's length before.

        Raises:
            As :meth:`gather`.
        """
        group = self._group(layer)
        one = self._example(example)
        as_stored = dtype is None or _arguments.dtype(dtype)[0] == self.dtype
        if dtype is not None and as_stored and self._contents.types_may_differ:
            as_stored = self._rows.stored_types(group, np.array([one], np.int64)) == [self.dtype]
        if out is None and as_stored:
            view = self._rows.view(group, one)
            if view is not None:
                return view
        lost: list[int] = []
        copy: NDArray[Any] = self._rows.gather_whole(group, np.array([one], np.int64), out, dtype, lost)
        if lost:
            self._overflowed(lost, layer, dtype)
        return copy

    def sequences(
        self, examples: ArrayLike, layer: int | Sequence[int], *, dtype: DTypeLike | None = None
    ) -> list[NDArray[Any]]:
        """All stored tokens of many examples, read in parallel.

        Args:
            examples: integers, 0 to ``num_examples - 1``, or a mask, as in :meth:`gather`.
            layer: a name from :attr:`layers`, or one for each example: ``sequences([4, 4, 9], [0, 7, 7])`` reads two layers of
                example 4 and one of example 9.
            dtype: as in :meth:`gather`.

        Returns:
            A list of ``(T_i, d_model)`` arrays, copies. Neighbours in the list share blocks of memory of about 32 MiB; copy an
            array to keep it for long without its neighbours.

        Raises:
            As :meth:`gather`.
        """
        wanted, shape = _arguments.index(self._numbers(examples), "examples")
        group = self._groups_of(layer, wanted.size)
        if len(shape) != 1:
            raise ArgumentError(f"examples: expected one dimension, found {len(shape)}")
        if wanted.size == 0:
            return []
        if wanted.min() < 0 or wanted.max() >= self.num_examples:
            raise self._out_of_range(wanted)
        itemsize = self.dtype.itemsize if dtype is None else _arguments.dtype(dtype)[0].itemsize
        ends = np.cumsum(self._rows.tokens_of(group, wanted))
        slab = np.maximum(ends - 1, 0) * (self.d_model * itemsize) // _SLAB_BYTES
        starts = [0, *(np.flatnonzero(np.diff(slab)) + 1).tolist(), wanted.size]
        found: list[NDArray[Any]] = []
        lost: list[int] = []
        for first, last in itertools.pairwise(starts):
            groups = group[first:last] if isinstance(group, np.ndarray) else group
            block = self._rows.gather_whole(groups, wanted[first:last], None, dtype, lost)
            before = int(ends[first - 1]) if first else 0
            stops = (ends[first:last] - before).tolist()
            found.extend(block[a:b] for a, b in zip([0, *stops], stops, strict=False))
        if lost:
            self._overflowed([sum(lost)], layer, dtype)
        return found

    def _out_of_range(self, examples: NDArray[np.int64]) -> OutOfRangeError:
        bad = examples[(examples < 0) | (examples >= self.num_examples)][0]
        return OutOfRangeError(
            f"example {bad} is out of range: the dataset has {self.num_examples} examples", path=self.path
        )

    def stream(
        self,
        layer: int | Sequence[int] | Literal["all"],
        batch_size: int,
        *,
        shuffle: Shuffle = None,
        seed: int = 0,
        epoch: int = 0,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        interleave: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dtype: DTypeLike | None = None,
        center: ArrayLike | None = None,
        scale: Scale = None,
        memory: int | str = "1GiB",
        reuse: bool = False,
        buffers: Sequence[Any] | None = None,
    ) -> Stream:
        """Rows as batches, in an order: what a training loop reads.

        Reading, shuffling and copying happen on threads of ours, at most one batch ahead of the loop. The same settings give the
        same batches, whatever the number of threads, workers or machines.

        Args:
            layer: a name from :attr:`layers`, a list of names, or ``"all"``. Several layers share one order.
            batch_size: rows per batch (an aligned row has all its layers). The last batch of an epoch may be shorter.
            shuffle: ``None``: stored order, example after example. ``"window"`` (recommended): pieces of examples, of 64 KiB or
                more, are read in a random order into a pool of ``memory`` bytes, whose rows are given out in a random order
                while the next pool is filled.
                ``"exact"``: all rows in a random order; needs no memory, and a disk that is good at random reads.
            seed: decides every random order, with the epoch.
            epoch: each has another order; it counts up by itself.
            tokens: ``"content"`` (all but special ones), ``"all"``, ``"last"`` or ``"special"`` (saev's CLS).
            ignore_labels: rows with these patch labels are left out (saev).
            keep: rows to read: a bool per example, a bool array per example (one flag per stored token, or per content token), a
                2-D bool array, or a function of :attr:`table` that gives one of these.
            interleave: for several layers: False gives ``(b, n_layers, d_model)``, a row with all its layers; True gives
                ``(b, d_model)``, rows of one layer each, named in ``batch.layers``.
            drop_last: leave out the rows that do not fill a batch.
            rank: the share to read, of ``world_size``.
            world_size: shares are disjoint, hold all rows together, and have equally many batches. Unless ``shuffle="window"``, the
                first k batches of all ranks together hold the same rows for any ``world_size`` of which
                ``batch_size * world_size`` is the same.
            dtype: convert while copying, as in :meth:`gather`.
            center: ``(d_model,)`` or ``(n_layers, d_model)``: subtracted from every row.
            scale: a number, ``(d_model,)`` or ``(n_layers, d_model)``: rows are multiplied by it after that. To standardize
                columns: ``center=stats.mean, scale=stats.inverse_std``. ``"unit-norm"`` and ``"sqrt-d"``
                bring every row's L2 norm to 1 or to sqrt(d_model).
            memory: of the pool, in bytes or as ``"512MiB"``. It is part of what decides the order of ``shuffle="window"``.
            reuse: write batches into three arrays in turn: a batch is valid until the next one is asked for.
            buffers: the same with yours: two arrays or tensors (pinned, perhaps) or more, of a whole batch's shape.

        Returns:
            A :class:`~actshard.Stream`. Its batches are copies that the caller owns, unless they are reused.

        Raises:
            LayerError, ArgumentError, DtypeError: no such layer; arguments that make no sense.
            NotStoredError: no labels, no special tokens, or layers with different tokens.
            What :meth:`gather` raises: while iterating, with file and offset.
        """
        return Stream(
            self,
            layer,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            epoch=epoch,
            tokens=tokens,
            ignore_labels=ignore_labels,
            keep=keep,
            interleave=interleave,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            dtype=dtype,
            center=center,
            scale=scale,
            memory=memory,
            reuse=reuse,
            buffers=buffers,
        )

    def check_open(self) -> None:
        """Does nothing while the store is open.

        Raises:
            ClosedError: it was closed.
        """
        self._open_rows()

    def native_stream(self, selection: Any, options: dict[str, Any]) -> _native.Stream:
        """For :class:`~actshard.Stream`: the native half of one."""
        return _native.Stream(self._open_rows(), selection, **options)

    def stats(
        self,
        layer: int,
        *,
        tokens: Tokens = "content",
        ignore_labels: Sequence[int] = (),
        keep: Mask = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Stats:
        """Mean, variance, extremes and what is no number, per column, in one parallel pass over a layer.

        Sums are float64 over blocks of a fixed size: the result is the same, to the last bit, for any number of threads.

        Args:
            layer: a name from :attr:`layers`.
            tokens: as in :meth:`stream`.
            ignore_labels: as in :meth:`stream`.
            keep: as in :meth:`stream`.
            progress: called with (rows done, rows in all) now and then.

        Raises:
            As :meth:`stream`; DtypeError for rows that are not floating.
        """
        group = self._group(layer)
        selection = select(self, [layer], tokens, ignore_labels, keep)
        total = _native.count_selected(self.num_examples, selection)
        tell = None if progress is None else lambda done: progress(done, total)
        return Stats.of(self._open_rows().stats(group, selection, tell))

    def _open_rows(self) -> Rows:
        if isinstance(self._rows, _Without):
            self._rows.gather()
        return self._rows

    def _groups_of(self, layer: int | Sequence[int], n: int) -> int | NDArray[np.int64]:
        if isinstance(layer, int | np.integer | str) or not np.iterable(layer):
            return self._group(layer)
        groups = np.array([self._group(x) for x in layer], np.int64)
        if groups.size != n:
            raise ArgumentError(f"layer: expected one layer, or one for each of {n} examples, found {groups.size}")
        return groups

    def _example(self, example: int) -> int:
        flat, shape = _arguments.index(example, "example")
        if shape != [1]:
            raise ArgumentError(f"example: expected one integer, found {shape}; sequences() takes many")
        return int(flat[0])

    @property
    def table(self) -> pa.Table:
        """What the format holds about each example: a pyarrow table of ``num_examples`` rows, columns named as in the format.

        Read when first asked for, then kept. lmprobe's per-token address lists are left out (they can be gigabytes, and are
        in the store's layout already): :meth:`read_columns` gives them. Holds texts, labels and ids for lmprobe; saev stores
        nothing about an example but its number, ``example_idx``.
        """
        self._check_not_closed()
        if self._table is None:
            self._table = self.read_columns(self._contents.column_names)
        return self._table

    def read_columns(self, names: Sequence[str]) -> pa.Table:
        """Reads some columns only, by their names in the format; not kept.

        Raises:
            NotStoredError: no such column.
        """
        self._check_not_closed()
        return self._contents.columns(_arguments.listed(names, "names: expected a list of columns"))

    def _check_not_closed(self) -> None:
        if isinstance(self._rows, _Closed):
            self._rows.gather()

    @property
    def identity(self) -> str:
        """A digest of the dataset's shape and of a few of its rows: the same wherever the dataset lies, another for another one."""
        if self._identity is None:
            shape = [self.format, list(self.layers), self.d_model, self.dtype.name, self.num_examples]
            digest = hashlib.sha256(json.dumps(shape).encode())
            n = self.num_examples
            # Of what is decoded together only the beginning, which was looked at when it was opened. Last tokens: those at the
            # beginning of a text may be the same in any dataset of a model.
            few = range(min(n, 1)) if self._contents.units is not None else range(0, n, -(-n // _SAMPLES) or 1)
            for example in few:
                try:
                    digest.update(self._rows.gather(0, example, None, None, None).tobytes())
                except ClosedError:
                    raise
                except ActshardError:
                    digest.update(b"unreadable")
            self._identity = digest.hexdigest()[:16]
        return self._identity

    @property
    def content_lengths(self) -> NDArray[np.int64] | None:
        """``(num_examples,)`` int64: content tokens of each example, where shorter ones were filled up with rows of zeros.

        saev's examples all have as many tokens; actshard keeps their lengths beside. Streams, statistics and :meth:`last_tokens`
        leave the zeros out; :meth:`gather` and :meth:`sequence` read what is stored. None where nothing was filled up.
        """
        if not self._lengths_read:
            self._lengths, self._lengths_read = self._contents.content_lengths(), True
        return self._lengths

    @property
    def labels(self) -> NDArray[np.uint8] | None:
        """saev's patch labels, ``(num_examples, patches)`` uint8, read-only, without a column for CLS; None if there are none.

        Read into memory when first asked for, then kept.

        lmprobe keeps one label per example: ``store.table["label"]``.
        """
        if "labels" not in self._extras:
            self._extras["labels"] = self._contents.labels()
        found = self._extras["labels"]
        if isinstance(found, _Closed):
            found.gather()
        labels: NDArray[np.uint8] | None = found
        return labels

    def logits(self, examples: ArrayLike | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Top-k logits at each example's last token.

        Args:
            examples: integers; None means all, in order.

        Returns:
            values ``(n, k)`` and token indices ``(n, k)``, of the stored types, copies.

        Raises:
            NotStoredError: the dataset holds no logits.
        """
        logits = self._extra("logits", self._contents.logits, "logits")
        if isinstance(logits, _Closed):
            logits.gather()
        assert isinstance(logits, Logits)
        return logits.values.gather(0, examples, None, None, None), logits.indices.gather(0, examples, None, None, None)

    def router(self, layer: int, examples: ArrayLike | None = None) -> NDArray[Any]:
        """Router logits of a mixture-of-experts layer.

        Args:
            layer: one of the router's layers; a wrong one raises an error that lists them.
            examples: integers; None means all, in order.

        Returns:
            ``(n, experts)``, of the stored type, a copy.

        Raises:
            NotStoredError: the dataset holds no router tensors.
            LayerError: not for this layer.
        """
        router = self._extra("router", self._contents.router, "router tensors")
        if isinstance(router, _Closed):
            router.gather()
        assert isinstance(router, Router)
        if isinstance(layer, bool | np.bool_ | float | np.floating) or layer not in router.layers:
            raise LayerError(
                f"router of layer {layer!r} is not stored; those of {_short(router.layers)} are", path=self.path
            )
        rows: NDArray[Any] = router.rows.gather(router.layers.index(layer), examples, None, None, None)
        return rows

    def _extra(self, name: str, make: Any, what: str) -> Any:
        if name not in self._extras:
            self._extras[name] = make()
        if self._extras[name] is None:
            raise NotStoredError(f"holds no {what}", path=self.path)
        return self._extras[name]

    def info(self) -> dict[str, Any]:
        """What ``actshard info`` shows, as plain Python values."""
        present = missing = total = 0
        for file in self._contents.files():
            found = None
            with contextlib.suppress(ActshardError):
                found = Location.at(file).found()
            if found is None:
                missing += 1
            else:
                present += 1
                total += found.size
        each = self._contents.tokens_each
        known = self._contents.counts_are_cheap or self._token_counts is not None
        counts = self.token_counts if each is None and known else None
        return {
            "format": self.format,
            "path": str(self.path),
            "model": self._contents.model,
            "examples": self.num_examples,
            "tokens": (None if each is None else each * self.num_examples) if counts is None else int(counts.sum()),
            "tokens_per_example": (None if each is None else [each, each] if self.num_examples else [0, 0])
            if counts is None
            else [int(counts.min()), int(counts.max())]
            if len(counts)
            else [0, 0],
            "layers": list(self.layers),
            "d_model": self.d_model,
            "dtype": str(self.dtype),
            "shards": present,
            "missing_shards": missing,
            "bytes": total,
            "io": self.io,
            "columns": list(self._contents.column_names),
            "also": list(self._contents.extras),
            "provenance": self._contents.provenance,
            "warnings": [str(w) for w in self.warnings],
            "warning_codes": [w.code for w in self.warnings],
        }


class _Without:
    """Stands in for the rows of a dataset that has no hidden states; no layer gets this far."""

    def __init__(self, contents: Contents) -> None:
        self._path = contents.path

    def gather(self, *_: Any) -> NoReturn:
        raise NotStoredError("holds no hidden states", path=self._path)

    view = gather_whole = tokens_of = stored_types = gather


class _Closed(_Without):
    """Stands in for the rows of a closed store."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def gather(self, *_: Any) -> NoReturn:
        raise ClosedError("the store was closed", path=self._path)

    view = gather_whole = tokens_of = stored_types = gather


def _short(layers: Sequence[int], at_most: int = 12) -> str:
    shown = ", ".join(map(str, layers[:at_most]))
    return f"[{shown}, ... {len(layers)} in all]" if len(layers) > at_most else f"[{shown}]"
