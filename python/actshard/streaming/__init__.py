"""Streams: batches of a store's rows in a reproducible order, read ahead by threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from actshard.base import _arguments
from actshard.base.errors import (
    ArgumentError,
    OverflowWarning,
    warn,
)
from actshard.base.layers import Layer, array_of, is_one, listing, short
from actshard.base.location import Location
from actshard.base.logs import LOG
from actshard.streaming.epochs import Loop, Reader
from actshard.streaming.readable import Readable
from actshard.streaming.rescaling import AS_STORED, STORED_ORDER, Rescaling, RowEpochs, RowOrder
from actshard.streaming.selection import Selection

_UNIT = 4 << 20
"""Bytes that a window requests from a remote store at a time, if its rows are contiguous."""
_MANY = 1_000
"""Number of requests per epoch from which a warning is issued."""
_RING = 3
"""Number of arrays of a stream with ``reuse=True``: one with the user, one ready, one being filled."""

_DOORS = frozenset({"state", "loop", "afresh", "batches_from", "resumes"})
"""Internal names for other modules of this package; ``dir()`` omits them."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch:
    """One batch of a stream.

    Attributes:
        activations: ``(b, d_model)``; ``(b, n_layers, d_model)`` for several aligned layers.
        examples: ``(b,)`` int64, the example number of each row.
        tokens: ``(b,)`` int64, the token's position among the example's stored tokens (for saev with CLS, 0 is CLS).
        layers: layer names as in ``store.layers``, int64, numpy strings, or objects if there are both: ``(b,)``, one per row,
            for interleaved layers; otherwise ``(n_layers,)``, the layers of the second axis or the only layer.
        labels: ``(b,)`` uint8 patch labels; None if the dataset has no labels. With ``tokens="all"`` int16, and -1 for
            special tokens, which have no label.
    """

    activations: Any
    examples: NDArray[np.int64]
    tokens: NDArray[np.int64]
    layers: NDArray[Any]
    labels: NDArray[Any] | None

    def __len__(self) -> int:
        return len(self.examples)

    def __repr__(self) -> str:
        labels = "" if self.labels is None else f", labels {self.labels.dtype}"
        layers = short(list(dict.fromkeys(self.layers.tolist())))
        return f"<actshard.Batch: {tuple(self.activations.shape)} {self.activations.dtype}, layers {layers}{labels}>"


class Stream(RowEpochs[Batch]):
    """Batches of a store's rows. :meth:`Store.stream` creates it and documents the arguments.

    ``for batch in stream`` reads one epoch; the next loop reads the next epoch, in another order. After a ``break`` the next
    loop starts the same epoch again, unless a state was loaded in between. A pickle contains the store's path and the state.

    A stream has one active loop: when another loop begins, the iterator of the first raises :class:`ClosedError`. Several
    streams of one store can be read at the same time.

    Attributes:
        epoch: the current epoch, or the next one if no loop is active.
        batch_size, drop_last, rank, world_size, seed, shuffle: the arguments of :meth:`Store.stream`.
        left_out: numbers of rows of an epoch, over all ranks, that are left out: by ``"min_token"``, by ``"max_norm"``, and by
            ``max_norm`` because they are ``"not_finite"``. An aligned row counts once.
    """

    def __init__(
        self,
        store: Readable,
        layer: Layer | Sequence[Layer] | Literal["all"],
        batch_size: int,
        selection: Selection,
        rescaling: Rescaling = AS_STORED,
        order: RowOrder = STORED_ORDER,
        *,
        interleave: bool = False,
        dtype: DTypeLike | None = None,
        memory: int | str = "1GiB",
        reuse: bool = False,
        buffers: list[NDArray[np.generic]] | None = None,
    ) -> None:
        interleave, reuse = _arguments.switch(interleave, "interleave"), _arguments.switch(reuse, "reuse")
        is_single = is_one(layer) and layer != "all"
        if interleave and is_single:
            raise ArgumentError("interleave: expected several layers, found one; there is only one layer to read")
        self.batch_size = _arguments.whole(batch_size, "batch_size", 1, (1 << 31) - 1)
        if reuse and buffers is not None:
            raise ArgumentError("buffers: not supported with reuse=True, which allocates its own buffers")
        self._reuse, self._is_stacked = reuse, not (is_single or interleave)
        self._buffers = None if buffers is None else _arguments.listed(buffers, "buffers: expected arrays")
        super().__init__(
            store,
            layer,
            selection,
            rescaling,
            order,
            dtype=dtype,
            memory=memory,
            interleaved=interleave,
            batch_size=self.batch_size,
        )
        layer_count = len(self._layers) if interleave else 1
        self.left_out = {name: count * layer_count for name, count in self._rows.left_out.items()}
        LOG.debug("%s: stream of layers %s, shuffle=%s", store.path, short(self._layers), self.shuffle)
        path: object = store.path  # a Location, if it is not local
        if self.shuffle == "exact" and isinstance(path, Location) and not path.storage.local:
            self._warn_of_price()

    def _check_arguments(self) -> None:
        d_model = self.store.d_model
        item = (len(self._layers), d_model) if self._is_stacked else (d_model,)
        self._shape = (self.batch_size, *item)
        if self._buffers is not None:
            _check_buffers(self._buffers, self._shape, self.dtype)

    def _warn_of_price(self) -> None:
        if self.num_rows < _MANY:
            return
        row = int(np.prod(self._shape[1:])) * self.store.dtype.itemsize
        read = self.num_rows * row
        price = (
            f'{self.store.path}: shuffle="exact" requests single rows from a remote store: up to {self.num_rows:,} requests per '
            f'epoch for {read / 1e6:,.1f} MB. shuffle="window" reads them in about {-(-read // _UNIT):,} requests.'
        )
        warn(price, code="remote-exact")

    @property
    def num_rows(self) -> int:
        """Number of rows in an epoch, over all ranks. Aligned layers count as one row, interleaved layers as one row each."""
        return int(self._native.items)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of a full batch's activations."""
        return self._shape

    @property
    def reuses(self) -> bool:
        """Whether a batch is valid only until the next one is requested: ``reuse=True`` or ``buffers=``."""
        return self._reuse or self._buffers is not None

    @property
    def window(self) -> int:
        """Maximum number of rows of a window, which fit in ``memory``. An epoch has as few windows as possible."""
        return int(self._native.window)

    def locate(self, rows: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (examples, tokens) of selected rows, given their numbers in stored order. Not for interleaved layers."""
        return self._native.locate(_arguments.index(rows, "rows")[0])

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - _DOORS)

    def __len__(self) -> int:
        """Number of batches per epoch and rank; the same on every rank."""
        return int(self._native.batches)

    def __repr__(self) -> str:
        return (
            f"<actshard.Stream of {self.store.path}: {_arguments.many(len(self), 'batch', plural='batches')} of "
            f"{self._shape} {self.dtype}, "
            f"shuffle={self.shuffle!r}, seed={self.seed}, epoch {self.epoch}>"
        )

    def _loop(self, first: int, every: int, buffers: list[NDArray[np.generic]] | None) -> RowLoop:
        return RowLoop(self, first, every, buffers)

    def _added(self, saved: dict[str, Any]) -> set[str]:
        return (set() if "dataset" in saved else _SINCE_2) | (set() if "sample" in saved else _SINCE_3)

    def _settings(self) -> dict[str, object]:
        """Everything that determines the rows of each batch and their values."""
        settings = {
            **super()._settings(),
            "rows": self.num_rows,
            "interleave": self._options["interleaved"],
            "selection": self._rows.digest,
            "batch_size": self.batch_size,
            "shape": list(self._shape[1:]),
        }
        if self.shuffle == "window":
            settings["window"] = int(self._native.window)
            settings["units"] = f"{self._native.units:016x}"
            if self._native.unit_bytes is not None:
                settings["unit_bytes"] = self._native.unit_bytes
        return settings

    def _ring(self) -> list[NDArray[np.generic]] | None:
        """The arrays that batches are written into; None if each batch gets a new array."""
        if self._buffers is not None:
            return [
                _arguments.writable(b, self.dtype, list(self._shape)).view(self.dtype).reshape(self._shape)
                for b in self._buffers
            ]
        if self._reuse:
            return [self._native.empty() for _ in range(_RING)]
        return None

    def _labels_of(
        self, labels: NDArray[np.uint8] | None, examples: NDArray[np.int64], tokens: NDArray[np.int64]
    ) -> NDArray[Any] | None:
        special = self.store.special_tokens
        if labels is None:
            return None
        if self._tokens != "all" or not special:
            return labels[examples, tokens - special]
        token_labels = labels[examples, np.maximum(tokens - special, 0)].astype(np.int16)
        token_labels[tokens < special] = -1
        return token_labels


def _check_buffers(buffers: Sequence[NDArray[np.generic]], shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    """Raises ArgumentError unless there are at least two arrays of this shape."""
    if len(buffers) < 2:
        raise ArgumentError(f"buffers: expected at least 2, of {shape} {dtype}: one is in use while the next is filled")
    for number, buffer in enumerate(buffers):
        # The last batch of an epoch may be shorter: it is the first rows of its buffer.
        if (buffer_shape := tuple(getattr(buffer, "shape", ()))) != shape:
            raise ArgumentError(
                f"buffers[{number}]: expected an array or tensor of shape {shape}, found {buffer_shape}"
            )


class RowLoop(Loop[Batch]):
    """The iterator of one loop over a stream."""

    def __init__(self, stream: Stream, first: int, every: int, buffers: list[NDArray[np.generic]] | None) -> None:
        self._source = stream
        self._layers = array_of(stream.layers)
        self._overflows = 0
        # Kept in memory until the loop ends, like the open files, even if the store is closed.
        self._labels = None if stream._tokens == "special" else stream.store.labels
        self._hold = buffers is not None
        self._ring = stream._ring() if buffers is None else buffers
        super().__init__(stream, first, every)

    def _start(self) -> Reader:
        start = self._source._native.start
        LOG.debug(
            "%s: epoch %d read from batch %d of %d, every %d",
            self._source.store.path,
            self._epoch,
            self._next,
            len(self._source),
            self._every,
        )
        reader: Reader = start(self._epoch, self._next, self._every, self._ring, hold=self._hold)
        return reader

    def _made(self, arrays: Any) -> Batch:
        stream = self._source
        activations, examples, tokens, groups = arrays
        if overflows := stream._native.take_overflows():
            self._warn(overflows)
        layers = self._layers if groups is None else self._layers[groups]
        if stream._buffers is not None and not self._hold:
            activations = self._yours(activations)
        return Batch(activations, examples, tokens, layers, stream._labels_of(self._labels, examples, tokens))

    def _warn(self, overflows: int) -> None:
        """Warns once per loop, because overflow usually affects many batches."""
        if not self._overflows:
            stream = self._source
            layer_names = listing(stream.layers)
            warn(
                f"{stream.store.path}: layers {layer_names}: {overflows} finite values became infinite as {stream.dtype}, and "
                "later batches may overflow too. Use a wider dtype= or a smaller scale=.",
                OverflowWarning,
            )
        self._overflows += overflows

    def _yours(self, activations: NDArray[np.generic]) -> NDArray[np.generic]:
        """The caller's own object (e.g. a torch tensor) for the buffer that was filled."""
        assert self._ring is not None
        assert self._source._buffers is not None
        address = activations.__array_interface__["data"][0]
        for array, buffer in zip(self._ring, self._source._buffers, strict=True):
            if array.__array_interface__["data"][0] == address and hasattr(buffer, "__getitem__"):
                return buffer if len(activations) == len(array) else buffer[: len(activations)]
        return activations


_SINCE_2 = {"dataset", "format", "d_model", "stored", "center", "scale", "units"}
"""Settings that states of version 1 lack."""
_SINCE_3 = {"sample", "dtype", "shape"}
"""Settings that early states of version 2 lack."""
