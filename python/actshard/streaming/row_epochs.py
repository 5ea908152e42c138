"""What streams of rows and streams of whole examples have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from numpy.typing import DTypeLike

from actshard.base import _arguments
from actshard.base.errors import ArgumentError
from actshard.base.layers import Layer, is_one
from actshard.streaming.epochs import Epochs
from actshard.streaming.readable import Readable, covered_by, native_options
from actshard.streaming.rescaling import Center, Divide, Normalize, Scale, layers_of, rows_and_rescaling, settings_of
from actshard.streaming.selection import Selection

B_co = TypeVar("B_co", covariant=True)
Shuffle = Literal["window", "exact"] | None


@dataclass(frozen=True)
class RowOrder:
    """The order of an epoch's rows and their division among ranks: arguments of :meth:`Store.stream`, not yet checked."""

    shuffle: Shuffle
    seed: int
    epoch: int
    drop_last: bool
    rank: int
    world_size: int


class RowEpochs(Epochs[B_co]):
    """Batches of the selected rows of a store's layers.

    Attributes:
        store: the store.
        dtype: numpy dtype of the batches.
        drop_last, rank, world_size, seed, shuffle: as passed.
    """

    def __init__(
        self,
        store: Readable,
        layer: Layer | Sequence[Layer] | Literal["all"],
        selection: Selection,
        rescaling: tuple[Center, Scale, Divide, Normalize],
        order: RowOrder,
        *,
        dtype: DTypeLike | None,
        memory: int | str,
        **options: object,
    ) -> None:
        """Resolves layers, rows and rescaling, and opens the native stream.

        ``options``: further options of the native stream (:func:`native_options`). One that shuffles gets those of the order by
        ``batch_size``; for others the caller orders the rows.
        """
        self.shuffle = order.shuffle
        if self.shuffle is not None and not _arguments.is_one_of(self.shuffle, ("window", "exact")):
            raise ArgumentError(f'shuffle: expected "window", "exact" or None, found {self.shuffle!r}')
        self.store = store
        self._layers = layers_of(store, layer)
        groups = [store.group_of(x) for x in self._layers]
        self.world_size = _arguments.whole(order.world_size, "world_size", 1, 1 << 32)
        self.rank = _arguments.whole(order.rank, "rank", 0, self.world_size - 1)
        self.seed = _arguments.whole(order.seed, "seed")
        self.drop_last = _arguments.switch(order.drop_last, "drop_last")
        self._tokens = selection.tokens
        dtype_and_name = (store.dtype, _arguments.name_of(store.dtype)) if dtype is None else _arguments.dtype(dtype)
        self.dtype, name = dtype_and_name
        if "batch_size" in options:
            options |= {"shuffle": self.shuffle, "seed": self.seed, "drop_last": self.drop_last}
            options |= {"rank": self.rank, "world_size": self.world_size}
        self._options = native_options(
            groups,
            self.dtype,
            name,
            dtype is not None or store.contents.reads_convert,
            stacked=not is_one(layer) or layer == "all",
            memory=_arguments.size(memory, "memory"),
            **options,
        )
        super().__init__(_arguments.whole(order.epoch, "epoch"))
        self._check_arguments()
        self._rows, rescaling_options = rows_and_rescaling(store, self._layers, selection, rescaling, self._options)
        self._options |= rescaling_options
        self._native = store.native_stream(self._rows.native, self._options)

    def _check_arguments(self) -> None:
        """Raises the errors of a class's own arguments that depend on layers and dtype, before rows are read."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Names of the layers of this stream."""
        return tuple(self._layers)

    def _count(self) -> int:
        return len(self)

    def _place(self) -> Path:
        return self.store.path

    def _ready(self) -> None:
        self.store.check_open()
        # Computed while the files are open: state_dict() may be called after the store is closed.
        self._covered()

    def _covered(self) -> dict[str, object]:
        return covered_by(self.store, self._layers)

    def __getstate__(self) -> dict[str, object]:
        state = super().__getstate__()
        del state["_native"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._native = self.store.native_stream(self._rows.native, self._options)

    def _settings(self) -> dict[str, object]:
        """Everything that determines the rows of each batch and their values, as far as all streams have it."""
        return {
            **self._covered(),
            "layers": self._layers,
            "tokens": self._tokens,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "world_size": self.world_size,
            "dtype": self.dtype.name,
            **settings_of(self._options),
        }
