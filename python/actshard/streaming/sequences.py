"""Streams of whole sequences: packed one after the other, or padded to one length.

The core (``_native.Packing``) assigns lengths to batches, once for all epochs (first-fit decreasing), and sequences to these
places, for each epoch. A batch is then one parallel read, on a thread ahead of the loop. Position, states, workers and pickling
work as for all streams (:mod:`actshard.streaming.epochs`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

import actshard._native as _native
from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError, FormatError, OverflowWarning, warn
from actshard.base.layers import Layer, array_of, listing, short
from actshard.streaming.epochs import Loop, ReadAhead
from actshard.streaming.readable import Readable, content_range
from actshard.streaming.rescaling import Rescaling, RowEpochs, RowOrder
from actshard.streaming.selection import Selection

if TYPE_CHECKING:
    import pyarrow as pa


# Columns of the table for the rows of a batch: one value per example, or a list with one entry per token.


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
            if self.names and len(examples):
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


TooLong = Literal["error", "truncate", "split", "drop"]

_AHEAD = 2
"""Batches that are ready or being read while the loop uses one."""
_STORED_WINDOW = 128
"""Number of batches in a window for stored order: sequences are packed with others of their window."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SequenceBatch:
    """A batch of whole sequences.

    If packed, arrays of tokens have the shape ``(n,)``, sequence after sequence, where n is the number of tokens. If padded, they
    have the shape ``(b, T)``, where b is the number of sequences and T the length of the longest.

    Attributes:
        activations: ``(n, d_model)`` or ``(b, T, d_model)``, with an axis of layers before the last one if the stream has a list
            of layers. Padding is zero.
        lengths: ``(b,)`` int64, tokens of each sequence.
        offsets: ``(b + 1,)`` int32, 0 and the running sum of lengths: ``cu_seqlens`` of flash-attention.
        position_ids: int64, the position in the sequence, from 0. Padding is 0.
        segment_ids: int32, the number of the sequence in the batch, 0 to b - 1. Padding is -1.
        mask: bool, False for padding; None if there is no padding.
        examples: ``(b,)`` int64, the example number of each sequence.
        tokens: int64, the token's position among the example's stored tokens. Padding is -1.
        layers: ``(n_layers,)`` layer names, int64 or numpy strings.
        labels: patch labels, if the dataset has them: uint8; int16 with -1 for padding and special tokens, if the stream pads or
            has ``tokens="all"``.
        columns: the columns of the stream's ``columns=`` by name: one entry per token, zero for padding, or ``(b,)``.
    """

    activations: Any
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int32]
    position_ids: NDArray[np.int64]
    segment_ids: NDArray[np.int32]
    mask: NDArray[np.bool_] | None
    examples: NDArray[np.int64]
    tokens: NDArray[np.int64]
    layers: NDArray[Any]
    labels: NDArray[Any] | None = None
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence: ``max_seqlen`` of flash-attention."""
        return int(self.lengths.max(initial=0))

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """All arrays by name, columns included."""
        arrays_by_name = {name: getattr(self, name) for name in self.__slots__ if name != "columns"}
        return {name: array for name, array in arrays_by_name.items() if array is not None} | self.columns

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return (
            f"<actshard.SequenceBatch: {_arguments.many(len(self), 'sequence')}, "
            f"{_arguments.many(int(self.offsets[-1]), 'token')}, "
            f"{tuple(self.activations.shape)} {self.activations.dtype}, layers {short(self.layers.tolist())}>"
        )


class SequenceStream(RowEpochs[SequenceBatch]):
    """Batches of whole sequences. :meth:`Store.sequences_stream` creates it and documents the arguments.

    Loops, states, workers and pickling work as for :class:`~actshard.Stream`.

    Attributes:
        epoch: the current epoch, or the next one if no loop is active.
        batch_tokens, pack, drop_last, rank, world_size, seed, shuffle: the arguments of :meth:`Store.sequences_stream`.
        left_out: ``"examples"``: number of examples that ``too_long="drop"`` leaves out. ``"tokens"``: number of tokens in these,
            or cut from other examples. ``"min_token"``, ``"max_norm"``: numbers of tokens that these arguments leave out;
            ``"not_finite"``: those that ``max_norm`` leaves out because of NaN or infinite values.
    """

    def __init__(
        self,
        store: Readable,
        layer: Layer | Sequence[Layer] | Literal["all"],
        batch_tokens: int,
        selection: Selection,
        rescaling: Rescaling,
        order: RowOrder,
        *,
        pack: bool,
        fixed_shape: bool,
        too_long: TooLong,
        columns: Sequence[str],
        dtype: DTypeLike | None,
        memory: int | str,
    ) -> None:
        self.batch_tokens = _arguments.whole(batch_tokens, "batch_tokens", 1, (1 << 31) - 1)
        self.pack = _arguments.switch(pack, "pack")
        self.fixed_shape = _arguments.switch(fixed_shape, "fixed_shape")
        if self.fixed_shape and not self.pack:
            raise ArgumentError(
                "fixed_shape: expected pack=True; padded batches have the length of their longest sequence"
            )
        if selection.tokens not in ("content", "all"):
            raise ArgumentError(f'tokens: expected "content" or "all", found {selection.tokens!r}')
        if not _arguments.is_one_of(too_long, ("error", "truncate", "split", "drop")):
            raise ArgumentError(f'too_long: expected "error", "truncate", "split" or "drop", found {too_long!r}')
        self.too_long: TooLong = too_long
        self._columns = BatchColumns(store, columns)
        super().__init__(store, layer, selection, rescaling, order, dtype=dtype, memory=memory)
        before = self._native.before()
        self._cut(np.diff(before))
        self.left_out |= self._rows.left_out
        self._packing = self._packed()
        self._before = before

    def _cut(self, counts: NDArray[np.int64]) -> None:
        """Makes sequences of the examples' selected tokens: their examples, first tokens and lengths."""
        most, too_long = self.batch_tokens, self.too_long
        examples = np.flatnonzero(counts)
        lengths = counts[examples]
        self.left_out = {"examples": 0, "tokens": 0}
        self._starts: NDArray[np.int64] | None = None
        long = lengths > most
        if long.any():
            first, count = int(examples[long][0]), int(long.sum())
            if too_long == "error":
                raise ArgumentError(
                    f"batch_tokens: example {first} has {_arguments.many(counts[first], 'token')}, and {count} of "
                    f"{_arguments.many(len(examples), 'example')} more than "
                    f'{most}. Raise batch_tokens, or pass too_long="truncate", "split" or "drop".',
                    path=self.store.path,
                )
            if too_long == "split":
                pieces = -(-lengths // most)
                ends = np.cumsum(pieces)
                self._starts = (np.arange(ends[-1]) - np.repeat(ends - pieces, pieces)) * most
                examples, lengths = np.repeat(examples, pieces), np.repeat(lengths, pieces)
                lengths = np.minimum(lengths - self._starts, most)
            else:
                dropped = too_long == "drop"
                gone = int(lengths[long].sum()) - (0 if dropped else count * most)
                self.left_out = {"examples": count if dropped else 0, "tokens": gone}
                examples, lengths = (examples[~long], lengths[~long]) if dropped else (examples, lengths.clip(max=most))
                did = f"{_arguments.many(count, 'example', 'is', 'are')} {'left out' if dropped else 'cut'}"
                text = (
                    f"{self.store.path}: {did}, with {_arguments.many(gone, 'token')}: longer than batch_tokens={most} "
                    f"(too_long={too_long!r})"
                )
                warn(text, code="sequences-too-long")
        self._examples, self._lengths = examples, lengths

    def _packed(self) -> _native.Packing:
        bounds = self._native.unit_bounds() if self.shuffle == "window" else None
        units = None if bounds is None else np.unique(np.searchsorted(self._examples, bounds))
        window = max(int(self._native.window), 1)
        if self.shuffle is None:
            most = _STORED_WINDOW * self.batch_tokens
            window = min(most, max(window, self.batch_tokens)) if self._native.decodes else most
        # The packing also depends on memory= and on how the files are decoded.
        self._planned: dict[str, object] = {} if self.shuffle == "exact" else {"window": window}
        if units is not None:
            self._planned["units"] = hashlib.sha256(units.tobytes()).hexdigest()[:16]
        return _native.Packing(
            self._lengths,
            units,
            budget=self.batch_tokens,
            pack=self.pack,
            shuffle=self.shuffle,
            seed=self.seed,
            world_size=self.world_size,
            drop_last=self.drop_last,
            window=window,
        )

    @property
    def reuses(self) -> bool:
        """False: each batch is a new array."""
        return False

    @property
    def num_sequences(self) -> int:
        """Number of sequences of all ranks: examples with tokens, or, with ``too_long="split"``, their pieces."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return int(self._lengths.sum())

    @property
    def fill(self) -> float:
        """Tokens of all sequences, divided by ``batch_tokens`` times the number of batches of all ranks."""
        batches = int(self._packing.all_batches)
        return self.num_tokens / (batches * self.batch_tokens) if batches else 1.0

    def __len__(self) -> int:
        """Number of batches per epoch and rank; the same on every rank and in every epoch."""
        return int(self._packing.batches)

    def __repr__(self) -> str:
        how = "packed" if self.pack else "padded"
        return (
            f"<actshard.SequenceStream of {self.store.path}: {_arguments.many(len(self), 'batch', plural='batches')} of "
            f"{_arguments.many(self.batch_tokens, 'token')}, {how}, "
            f"{_arguments.many(self.num_sequences, 'sequence')}, {self.dtype}, shuffle={self.shuffle!r}, seed={self.seed}, "
            f"epoch {self.epoch}>"
        )

    def _loop(self, first: int, every: int, buffers: list[NDArray[np.generic]] | None) -> _SequenceLoop:
        assert buffers is None, "batches of sequences are new arrays"
        return _SequenceLoop(self, first, every)

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        del state["_packing"], state["_before"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._packing, self._before = self._packed(), self._native.before()

    def _settings(self) -> dict[str, object]:
        """Everything that determines the sequences of each batch and their values."""
        return {
            **super()._settings(),
            "sequences": self.num_sequences,
            "selection": self._fingerprint(),
            "batch_tokens": self.batch_tokens,
            "pack": self.pack,
            "too_long": self.too_long,
            "columns": list(self._columns.names),
            "stacked": self._options["stacked"],
            "fixed_shape": self.fixed_shape,
            **self._planned,
        }

    def _added(self, saved: dict[str, object]) -> set[str]:
        return set() if "sample" in saved else {"sample", "dtype", "stacked", "fixed_shape"}

    def _fingerprint(self) -> str:
        """A digest of the sequences: their examples and lengths."""
        fingerprint = self.__dict__.get("_print")
        if fingerprint is None:
            digest = hashlib.sha256()
            for part in (*self._rows.native, self._examples, self._lengths):
                digest.update(part.tobytes() if isinstance(part, np.ndarray) else str(part).encode() + b";")
            fingerprint = self._print = digest.hexdigest()[:16]
        return fingerprint


class _SequenceLoop(Loop[SequenceBatch]):
    """The iterator of one loop over a stream of sequences."""

    def __init__(self, stream: SequenceStream, first: int, every: int) -> None:
        self._source = stream
        self._layers = array_of(stream.layers)
        self._warned = False
        # Kept in memory until the loop ends, like the open files, even if the store is closed.
        examples = np.sort(stream._examples)
        # np.unique imports a module at its first call, and a child that is forked meanwhile would wait for it for ever.
        examples = examples[np.flatnonzero(np.diff(examples, prepend=-1))]
        self._labels, self._columns = stream.store.labels, stream._columns.read(examples)
        super().__init__(stream, first, every)

    def _start(self) -> ReadAhead:
        stream, epoch = self._source, self._epoch
        pool = _Pool(stream, epoch, self._every) if stream._native.decodes and stream.shuffle != "exact" else None
        read = _Sequences(stream, epoch).read if pool is None else pool.read
        return ReadAhead(read, range(self._next, len(stream), self._every), _AHEAD)

    def _made(self, arrays: tuple[NDArray[np.int64], NDArray[np.generic], NDArray[np.int64]]) -> SequenceBatch:
        stream = self._source
        numbers, activations, tokens = arrays
        examples, lengths = stream._examples[numbers], stream._lengths[numbers]
        starts = np.zeros(len(numbers), np.int64) if stream._starts is None else stream._starts[numbers]
        offsets = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(lengths, out=offsets[1:])
        real = tokens >= 0
        segments = np.full(tokens.shape, -1, np.int32)
        positions = np.zeros(tokens.shape, np.int64)
        sequence_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        segments[real] = sequence_ids
        positions[real] = np.arange(offsets[-1]) - (offsets[:-1] - starts)[sequence_ids]
        if stream._native.take_overflows() and not self._warned:
            self._warned = True
            self._warn()
        return SequenceBatch(
            activations,
            lengths,
            offsets,
            positions,
            segments,
            None if stream.pack and not stream.fixed_shape else real,
            examples,
            tokens,
            self._layers,
            self._labels_of(tokens, real, examples[sequence_ids]),
            self._columns.of(examples, examples[sequence_ids], tokens, real),
        )

    def _warn(self) -> None:
        stream = self._source
        layer_names = listing(stream.layers)
        warn(
            f"{stream.store.path}: layers {layer_names}: finite values became infinite as {stream.dtype}. Use a wider dtype= or a "
            "smaller scale=.",
            OverflowWarning,
        )

    def _labels_of(
        self, tokens: NDArray[np.int64], real: NDArray[np.bool_], examples: NDArray[np.int64]
    ) -> NDArray[Any] | None:
        if self._labels is None:
            return None
        stream, special = self._source, self._source.store.special_tokens
        positions = tokens[real] - special
        # By the arguments, not by the batch: all batches have one dtype.
        if stream.pack and not stream.fixed_shape and not (special and stream._tokens == "all"):
            return self._labels[examples, positions].reshape(tokens.shape)
        labels = np.full(tokens.shape, -1, np.int16)
        labels[real] = np.where(positions < 0, np.int16(-1), self._labels[examples, np.maximum(positions, 0)])
        return labels


_Found = tuple[NDArray[np.int64], NDArray[np.generic], NDArray[np.int64]]
"""Sequence numbers, activations, tokens."""


class _Sequences:
    """Reads the batches of an epoch."""

    def __init__(self, stream: SequenceStream, epoch: int) -> None:
        self._stream, self._epoch = stream, epoch
        # References to the binding's objects: this loop is unaffected if the stream is closed or replaced during it.
        self._native, self._packing = stream._native, stream._packing

    def numbers(self, batch: int) -> NDArray[np.int64]:
        """The sequences of a batch."""
        return self._packing.batch(self._epoch, self._stream.rank, batch)

    def places(self, lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[int]]:
        """The first row of each sequence in its batch, and the batch's shape."""
        stream = self._stream
        if not stream.pack:
            longest = int(lengths.max())
            return np.arange(len(lengths)) * longest, [len(lengths), longest]
        ends = np.cumsum(lengths)
        return ends - lengths, [stream.batch_tokens if stream.fixed_shape else int(ends[-1])]

    def picks(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first selected row of each sequence."""
        stream = self._stream
        firsts = stream._before[stream._examples[numbers]]
        return firsts if stream._starts is None else firsts + stream._starts[numbers]

    def read(self, batch: int) -> _Found:
        """Reads a batch."""
        numbers = self.numbers(batch)
        lengths = self._stream._lengths[numbers]
        places, shape = self.places(lengths)
        rows, tokens = self._native.read(self.picks(numbers), lengths, places, shape)
        return numbers, rows, tokens.reshape(shape)


class _Pool(_Sequences):
    """Reads a whole window of rows in stored order, so that each unit is decoded once."""

    def __init__(self, stream: SequenceStream, epoch: int, every: int) -> None:
        super().__init__(stream, epoch)
        self._every, self._end = every, 0
        self._rows = np.empty(0)
        self._tokens = np.empty(0, np.int64)
        self._at: dict[int, int] = {}

    def read(self, batch: int) -> _Found:
        """Cuts a batch from its window."""
        if batch >= self._end:
            self._fill(batch)
        numbers = self.numbers(batch)
        lengths = self._stream._lengths[numbers]
        places, shape = self.places(lengths)
        size = int(np.prod(shape))
        rows = np.zeros((size, *self._rows.shape[1:]), self._rows.dtype)
        tokens = np.full(size, -1, np.int64)
        for number, target, length in zip(numbers.tolist(), places.tolist(), lengths.tolist(), strict=True):
            start = self._at[number]
            rows[target : target + length] = self._rows[start : start + length]
            tokens[target : target + length] = self._tokens[start : start + length]
        return numbers, rows.reshape(*shape, *rows.shape[1:]), tokens.reshape(shape)

    def _fill(self, batch: int) -> None:
        end = self._packing.end_of_window(self._epoch, self._stream.rank, batch)
        self._rows, self._at = np.empty(0), {}  # freed before the next window is read
        numbers = np.sort(np.concatenate([self.numbers(b) for b in range(batch, end, self._every)]))
        lengths = self._stream._lengths[numbers]
        ends = np.cumsum(lengths)
        places = ends - lengths
        self._rows, self._tokens = self._native.read(self.picks(numbers), lengths, places, [int(ends[-1])])
        self._at = dict(zip(numbers.tolist(), places.tolist(), strict=True))
        self._end = end
