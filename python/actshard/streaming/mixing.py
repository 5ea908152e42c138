"""Mixtures: batches in which each of several stores has a fixed share of the rows.

A mixed batch has a constant number of rows of each store: the shares of ``batch_size``, rounded by largest remainders. So each
source is a separate stream with a constant batch size. Batch ``t`` of the mixture, counted over all epochs, consists of batch ``t``
of every source, counted over all of that source's epochs. It follows that:

- the state to resume is the mixture's epoch and batch;
- ranks and workers divide the sources as they divide any stream;
- a source begins its next epoch, in another order, when it has no more rows, independently of the mixture's epochs. Over many
  epochs all rows of a source are read equally often.

Rows of a batch are interleaved in a pseudo-random order that depends on the seed, epoch, batch and rank, so that halves of a batch
have about the same shares. Each source reads into separate buffers; one copy then moves the rows to their positions in the batch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError, InternalError
from actshard.base.layers import Layer
from actshard.reading.choosing import scrambled
from actshard.reading.store import Store
from actshard.streaming import Batch, Stream
from actshard.streaming.epochs import Epochs, Loop, Reader
from actshard.streaming.rescaling import Rescaling, RowOrder, Shuffle
from actshard.streaming.selection import CONTENT, Selection

_RING = 3
"""Number of arrays of a stream with ``reuse=True``, as for streams of one store."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MixedBatch(Batch):
    """One batch of a mixture.

    Attributes:
        sources: ``(b,)`` int64, the index of each row's store in :attr:`MixedStores.stores`. ``examples`` and ``tokens`` are
            numbers in that store.
    """

    sources: NDArray[np.int64]


class MixedStores:
    """Several stores with a share each. :func:`mix` creates it.

    Attributes:
        stores: the stores, in the order given.
        shares: their shares as given, divided by their sum.
        seed, exhausted: the arguments of :func:`mix`.
    """

    def __init__(
        self, stores: Sequence[Store], weights: Sequence[Fraction], seed: int, exhausted: Literal["stop", "repeat"]
    ) -> None:
        self.stores = tuple(stores)
        self.seed, self.exhausted = seed, exhausted
        self._weights = tuple(weights)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each store; they add up to 1."""
        total = sum(self._weights)
        return tuple(float(weight / total) for weight in self._weights)

    def __repr__(self) -> str:
        texts = [f"{share:.3g} of {store.path}" for share, store in zip(self.shares, self.stores, strict=True)]
        suffix = f", and {len(texts) - 4} more" if len(texts) > 4 else ""
        return f"<actshard.MixedStores: {', '.join(texts[:4])}{suffix}; exhausted={self.exhausted!r}>"

    def stream(
        self,
        layer: Layer | Sequence[Layer] | Literal["all"],
        batch_size: int,
        *,
        shuffle: Shuffle = "window",
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
        memory: int | str = "1GiB",
        reuse: bool = False,
        **options: Any,
    ) -> MixedStream:
        """Returns a stream of mixed batches; it resumes, pickles and feeds loaders like :meth:`Store.stream`.

        Every batch has ``batch_size`` rows, and exactly ``stream.counts`` of them from each store. Rows of a
        store that do not fill its last batch are left out of that store's epoch (``drop_last``).

        Args:
            layer: the name of a layer, or several names. Every store must have them.
            batch_size: rows per batch, over all stores.
            shuffle: order of each store's rows. ``None``: stored order, and each batch contains one store after another.
            epoch: the first epoch. An epoch ends when the first store (``exhausted="stop"``) or the last store (``"repeat"``)
                has no more rows.
            rank: index of this rank.
            world_size: number of ranks; all have equally many batches.
            memory: size of all windows in bytes, divided among the stores by their shares.
            reuse: batches share three arrays; a batch is valid until the next one is requested.
            options: other arguments of :meth:`Store.stream`, for every store: ``tokens``, ``keep`` (a function), ``dtype``, ...

        Raises:
            ArgumentError: the stores have different layers, widths or dtypes (``dtype=`` converts); a store's share gives it no
                row in a batch; a store has too few rows for one batch.
            Errors of :meth:`Store.stream`.
        """
        for name in sorted({"drop_last", "buffers", "seed"} & options.keys()):
            also = "; give it to actshard.mix" if name == "seed" else ""
            raise ArgumentError(f"{name}: not an argument of a mixture's stream{also}")
        # Given to every store, and an iterator can be read once.
        layer = list(layer) if isinstance(layer, Iterator) else layer
        selection, rescaling = Selection.pop(options), _arguments.popped(Rescaling, options)
        size = _arguments.whole(batch_size, "batch_size", 1)
        bound = _arguments.size(memory, "memory")
        counts = _counts(self._weights, size)
        order = RowOrder(shuffle, rank=rank, world_size=world_size)
        sources = [
            Stream(
                store,
                layer,
                count,
                selection,
                rescaling,
                replace(order, seed=_seed_of(self.seed, i), drop_last=True),
                reuse=True,
                memory=max(1, bound * count // size),
                **options,
            )
            for i, (store, count) in enumerate(zip(self.stores, counts, strict=True))
        ]
        _check_alike(sources)
        # Never iterated: it only allocates arrays of whole batches, with reused memory. Selecting all rows reads none.
        template = Stream(self.stores[0], layer, size, CONTENT, order=order, reuse=True, **options)
        return MixedStream(self, sources, template, epoch=_arguments.whole(epoch, "epoch"), reuse=reuse)


class MixedStream(Epochs[MixedBatch]):
    """Batches of a mixture. :meth:`MixedStores.stream` creates it and documents the arguments.

    Attributes:
        mixture: the mixture.
        counts: number of rows of each store in every batch.
        batch_size: their sum.
        layers: names of the layers.
        dtype: numpy dtype of activations.
        batch_shape: shape of a batch's activations.
        epoch: the current epoch, or the next one if no loop is active.
        left_out: for each store, the rows that ``min_token`` and ``max_norm`` leave out, as in :class:`~actshard.Stream`.
    """

    def __init__(
        self, mixture: MixedStores, sources: list[Stream], template: Stream, *, epoch: int, reuse: bool
    ) -> None:
        self.mixture = mixture
        self.counts = tuple(source.batch_size for source in sources)
        self.batch_size = template.batch_size
        self.layers, self.dtype, self.batch_shape = template.layers, template.dtype, template.batch_shape
        self.left_out = tuple(source.left_out for source in sources)
        self.rank, self.world_size = template.rank, template.world_size
        self._sources, self._template = sources, template
        self._reuse = _arguments.switch(reuse, "reuse")
        lengths = [len(source) for source in sources]
        for length, source in zip(lengths, sources, strict=True):
            if not length:
                raise ArgumentError(
                    f"batch_size: a batch needs {_arguments.many(source.batch_size, 'row')} of this store on each of "
                    f"{_arguments.many(source.world_size, 'rank')}, "
                    f"but the store has {source.num_rows}. Use a smaller batch_size or share.",
                    path=source.store.path,
                )
        self._length = min(lengths) if mixture.exhausted == "stop" else max(lengths)
        super().__init__(epoch)

    def __len__(self) -> int:
        """Number of batches per epoch and rank; the same on every rank."""
        return self._length

    @property
    def reuses(self) -> bool:
        """Whether a batch is valid only until the next one is requested: ``reuse=True``."""
        return self._reuse

    def __repr__(self) -> str:
        return (
            f"<actshard.MixedStream of {_arguments.many(len(self.counts), 'store')}: "
            f"{_arguments.many(len(self), 'batch', plural='batches')} of {self.batch_shape} {self.dtype}, "
            f"rows {', '.join(map(str, self.counts[:8]))}{', ...' if len(self.counts) > 8 else ''}, epoch {self.epoch}>"
        )

    def _count(self) -> int:
        return self._length

    def _place(self) -> Path:
        return self.mixture.stores[0].path

    def _ready(self) -> None:
        for source in self._sources:
            source._ready()

    def _loop(self, first: int, every: int, buffers: list[NDArray[np.generic]] | None) -> _MixLoop:
        return _MixLoop(self, first, every)

    def _settings(self) -> dict[str, object]:
        return {
            "mixture": [source._settings() for source in self._sources],
            "exhausted": self.mixture.exhausted,
            "seed": self.mixture.seed,
        }

    def _common(
        self, current: dict[str, Any], saved: dict[str, object]
    ) -> tuple[dict[str, object], dict[str, object], set[str]]:
        """As of each source's stream."""
        states = saved.get("mixture")
        if not isinstance(states, list) or len(states) != len(self._sources):
            return current, saved, set()
        if not all(isinstance(state, dict) for state in states):
            return current, saved, set()
        source_settings = [
            source._common(*settings)
            for source, *settings in zip(self._sources, current["mixture"], states, strict=True)
        ]
        mine, theirs = ([settings[i] for settings in source_settings] for i in range(2))
        return (
            {**current, "mixture": mine},
            {**saved, "mixture": theirs},
            set[str]().union(*(settings[2] for settings in source_settings)),
        )


class _MixLoop(Loop[MixedBatch]):
    """The iterator of one loop over a mixture."""

    def __init__(self, stream: MixedStream, first: int, every: int) -> None:
        self._source = stream
        native = stream._template._native
        self._ring = itertools.cycle([native.empty() for _ in range(_RING)]) if stream._reuse else None
        super().__init__(stream, first, every)

    def _start(self) -> Reader:
        return _Together(self._source, self._epoch, self._next, self._every)

    def _made(self, raw_batch: tuple[int, list[Batch]]) -> MixedBatch:
        number, parts = raw_batch
        stream = self._source
        sources = _places(stream, self._epoch, number)
        places: list[Any]
        if stream._template.shuffle is None:
            bounds = np.cumsum([0, *stream.counts]).tolist()
            places = [slice(first, last) for first, last in itertools.pairwise(bounds)]
        else:
            places = [np.flatnonzero(sources == i) for i in range(len(parts))]
        activations = stream._template._native.empty() if self._ring is None else next(self._ring)
        for rows, part in zip(places, parts, strict=True):
            activations[rows] = part.activations

        def joined(name: str) -> NDArray[Any]:
            values = [getattr(part, name) for part in parts]
            array = np.empty(len(sources), np.result_type(*values))
            for rows, value in zip(places, values, strict=True):
                array[rows] = value
            return array

        by_row = stream._template._options["interleaved"]
        return MixedBatch(
            activations,
            joined("examples"),
            joined("tokens"),
            joined("layers") if by_row else parts[0].layers,
            None if any(part.labels is None for part in parts) else joined("labels"),
            sources,
        )


class _Together:
    """Reads one batch of every source at a time. Each source reads ahead on its own threads."""

    def __init__(self, stream: MixedStream, epoch: int, first: int, every: int) -> None:
        self._length, self._before = len(stream), epoch * len(stream)
        self._at, self._every = first, every
        self._sources = [_Share(source.afresh()) for source in stream._sources]

    def next(self) -> tuple[int, list[Batch]] | None:
        number = self._at
        if number >= self._length:
            return None
        parts = [source.batch(self._before + number, self._every) for source in self._sources]
        self._at += self._every
        return number, parts

    def ready(self) -> bool:
        return self._at < self._length and all(source.ready(self._before + self._at) for source in self._sources)

    def release(self, number: int) -> None:
        """Does nothing: a mixture copies each batch into its own arrays."""

    def stop(self) -> None:
        for source in self._sources:
            source.stream.close()


class _Share:
    """One store's stream, read epoch after epoch."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._epoch = -1
        self._loop: Any = None

    def batch(self, number: int, every: int) -> Batch:
        """Batch ``number``, counted over all epochs; the next call must request ``number + every``."""
        epoch, position = divmod(number, len(self.stream))
        if epoch != self._epoch:
            self.stream.close()
            self.stream.set_epoch(epoch)
            self._loop, self._epoch = self.stream.batches_from(position, every), epoch
        for batch in self._loop:
            next_batch: Batch = batch
            return next_batch
        raise InternalError(f"batch {position} of epoch {epoch} is missing", path=self.stream.store.path)

    def ready(self, number: int) -> bool:
        """Whether :meth:`batch` would return without waiting."""
        return number // len(self.stream) == self._epoch and self._loop is not None and self._loop.ready()


def mix(
    stores: Mapping[Store, float] | Iterable[tuple[Store, float]],
    *,
    seed: int = 0,
    exhausted: Literal["stop", "repeat"] = "stop",
) -> MixedStores:
    """Mixes stores by shares of rows: ``actshard.mix({a: 0.7, b: 0.3}).stream(5, 16384)``.

    Shares are exact in every batch, up to rounding to whole rows; they need not add up to 1.

    Args:
        stores: shares by store, or pairs (store, share).
        seed: another seed gives other orders.
        exhausted: when a store has no more rows: ``"stop"`` ends the epoch, and the next epoch continues the other stores at their
            positions; ``"repeat"`` begins that store again in another order, until every store was read at least once.

    Raises:
        ArgumentError, ArgumentTypeError: no stores; a share that is not a positive number; an argument is invalid.
    """
    expected = "stores: expected shares by store, such as {a: 0.7, b: 0.3}"
    if isinstance(stores, str | bytes | os.PathLike):
        raise ArgumentTypeError(f"{expected} with a = actshard.open(path), found {type(stores).__name__}")
    pairs = _arguments.listed(stores.items() if isinstance(stores, Mapping) else stores, expected)
    if not pairs:
        raise ArgumentError("stores: expected at least one store, found none")
    weights = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ArgumentTypeError(f"stores: expected pairs (store, share), found {pair!r:.80}")
        store, share = pair
        if not isinstance(store, Store):
            raise ArgumentTypeError(
                f"stores: expected open stores, found {type(store).__name__}. Open a path first: actshard.open(path)"
            )
        number = _arguments.real(share)
        if number is None or not 0 < number < float("inf"):
            raise ArgumentError(f"share of {store.path}: expected a positive number, found {share!r:.80}")
        weights.append(Fraction(number))
    if not _arguments.is_one_of(exhausted, ("stop", "repeat")):
        raise ArgumentError(f'exhausted: expected "stop" or "repeat", found {exhausted!r:.80}')
    return MixedStores([store for store, _ in pairs], weights, _arguments.whole(seed, "seed"), exhausted)


def _counts(weights: Sequence[Fraction], batch_size: int) -> list[int]:
    """Rows of each source in a batch, by largest remainders; ties go to the first."""
    total = sum(weights)
    exact = [weight * batch_size / total for weight in weights]
    counts = [int(rows) for rows in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: batch_size - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        i = counts.index(0)
        raise ArgumentError(
            f"batch_size: {batch_size} rows leave no row for source {i}, whose share is {float(exact[i] / batch_size):.3g}. "
            "Use a larger batch_size."
        )
    return counts


def _seed_of(seed: int, source: int) -> int:
    """A seed for each source, so that equal stores are not read in the same order."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{source}".encode()).digest()[:7], "little")


def _check_alike(sources: Sequence[Stream]) -> None:
    """Refuses sources whose rows do not fit into one batch."""
    first = sources[0]
    for source in sources[1:]:
        for what, expected, actual, remedy in (
            ("layers", first.layers, source.layers, "Name the layers that both have."),
            ("d_model", first.store.d_model, source.store.d_model, "Rows of different widths cannot be in one batch."),
            ("dtype", first.dtype, source.dtype, f"dtype={first.dtype.name!r} converts."),
        ):
            if expected != actual:
                raise ArgumentError(
                    f"{what}: expected {expected}, as in {first.store.path}, found {actual}. {remedy}",
                    path=source.store.path,
                )


def _places(stream: MixedStream, epoch: int, number: int) -> NDArray[np.int64]:
    """The source of each row of a batch."""
    sources = np.repeat(np.arange(len(stream.counts)), stream.counts)
    if stream._template.shuffle is None:
        return sources
    order = scrambled(stream.batch_size, f"{stream.mixture.seed}/{epoch}/{number}/{stream.rank}")
    return sources[np.argsort(order)]  # the numbers are distinct, so every sort algorithm gives the same order
