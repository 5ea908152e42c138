"""The layers of a stream, and its ``center=``, ``scale=``, ``divide=`` and ``normalize=`` as numbers for the core.

The core computes ``(row - center) * scale`` or ``(row - center) / divide`` while it copies, or scales rows to a norm. This module
converts all other arguments to that form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError, NotStoredError
from actshard.base.layers import Layer, is_one, one
from actshard.looking.stats import Stats, is_deviation
from actshard.streaming.epochs import Epochs
from actshard.streaming.normalizer import Normalizer, of_stats
from actshard.streaming.readable import Readable, SelectedRows, covered_by, native_options
from actshard.streaming.selection import Selection

Center = ArrayLike | Literal["mean"] | None
Scale = float | ArrayLike | Literal["unit-norm", "sqrt-d", "mean-sqrt-d"] | None
Divide = ArrayLike | Literal["std"] | None
Normalize = Stats | Normalizer | Sequence[Stats | Normalizer] | Literal["stats"] | None


class Rescaling(NamedTuple):
    """How a stream rescales rows: arguments of :meth:`Store.stream`, not yet checked."""

    center: Center = None
    scale: Scale = None
    divide: Divide = None
    normalize: Normalize = None


AS_STORED = Rescaling()


def layers_of(store: Readable, layer: Layer | Sequence[Layer] | Literal["all"]) -> list[Layer]:
    """The requested layers as a list of names."""
    if _arguments.is_one_of(layer, ("all",)):
        if not store.layers:
            raise NotStoredError("the dataset contains no hidden states", path=store.path)
        if "all" in store.layers:
            raise ArgumentError(
                'layer: a layer of this dataset is named "all". Use ["all"] for it, store.layers for all'
            )
        return list(store.layers)
    if is_one(layer):
        return [one(layer)]
    if not np.iterable(layer) or isinstance(
        layer, set | frozenset | dict | bytes
    ):  # sets have another order in each process
        raise ArgumentError(f'layer: expected a layer\'s name, a list of them or "all", found {layer!r}')
    names = _arguments.listed(layer, "layer: expected names")
    if not names:
        raise ArgumentError("layer: expected at least one layer")
    return [one(x) if is_one(x) else x for x in names]


def rows_and_rescaling(
    store: Readable,
    layers: Sequence[Layer],
    selection: Selection,
    values: Rescaling,
    options: dict[str, object],
) -> tuple[SelectedRows, dict[str, object]]:
    """Resolves a stream's selection, and its ``center``, ``scale``, ``divide`` and ``normalize`` to options of the core.

    Errors that do not depend on rows come before rows are read for ``max_norm`` and statistics. Warns if no row is selected.
    ``options``: the other options of the native stream.
    """
    _check(store, layers, values)
    store.native_stream((0, 0), options)
    rows = selection.resolve(store, layers)
    selection.warn_of_nothing(store, layers, rows)
    return rows, rescaling(store, layers, values, rows)


def _check(store: Readable, layers: Sequence[Layer], values: Rescaling) -> None:
    """Raises the errors of :func:`rescaling` that do not depend on statistics, before these are computed."""
    _check_names(values)
    if isinstance(values.normalize, str):
        _refuse_beside_normalize(values)
        return
    center = 0.0 if isinstance(values.center, str) else values.center
    scale = 1.0 if _arguments.is_one_of(values.scale, ("mean-sqrt-d",)) else values.scale
    divide = 1.0 if isinstance(values.divide, str) else values.divide
    rescaling(store, layers, Rescaling(center, scale, divide, values.normalize), None)


def _refuse_beside_normalize(values: Rescaling) -> None:
    for name in ("center", "scale", "divide"):
        if getattr(values, name) is not None:
            raise ArgumentError(f"{name}: not supported with normalize=, which subtracts the mean and divides by std")


def rescaling(
    store: Readable,
    layers: Sequence[Layer],
    values: Rescaling,
    rows: SelectedRows | None,
) -> dict[str, Any]:
    """The options ``center``, ``scale``, ``divide``, ``norm`` and ``wide`` of ``_native.Stream``.

    ``rows``: the rows of the stream, of which an argument may name statistics, such as ``"mean"``; None: no argument does.

    Raises:
        ArgumentError: an argument is invalid, or two of them exclude each other.
        Errors of :meth:`actshard.Store.stats`, if named statistics were not saved.
    """
    d_model, n = store.d_model, len(layers)
    if is_deviation(values.center):
        raise ArgumentError("center: expected an offset, found stats.std. Use center=stats.mean, divide=stats.std.")
    values = _resolve_names(store, layers, values, rows)
    center, scale, divide, normalize = values
    if normalize is not None:
        _refuse_beside_normalize(values)
        return _merge(_normalizers(store, normalize, layers))
    if divide is not None:
        if scale is not None:
            raise ArgumentError("divide: not supported with scale=, which multiplies; pass one of them")
        divisors = vectors(divide, "divide", d_model, n)
        assert divisors is not None
        if not (np.isfinite(divisors) & (divisors != 0)).all():
            raise ArgumentError(
                "divide: expected finite numbers other than 0, found "
                f"{divisors[~(np.isfinite(divisors) & (divisors != 0))][0]}. normalize=stats keeps columns without variance"
            )
        return {
            "center": vectors(center, "center", d_model, n),
            "scale": None,
            "norm": None,
            "divide": divisors,
            "wide": False,
        }
    norm = _norm_of(store, scale)
    if is_deviation(scale):
        raise ArgumentError(
            "scale: expected a factor, found stats.std. Rows are multiplied by scale. "
            "Use normalize=stats, divide=stats.std or scale=stats.inverse_std."
        )
    return {
        "center": vectors(center, "center", d_model, n),
        "scale": vectors(None if norm is not None else scale, "scale", d_model, n),
        "norm": norm,
        "divide": None,
        "wide": False,
    }


def _resolve_names(store: Readable, layers: Sequence[Layer], values: Rescaling, rows: SelectedRows | None) -> Rescaling:
    """Replaces names of statistics in the arguments ("mean", "std", "mean-sqrt-d", "stats") by numbers."""
    _check_names(values)
    center, scale, divide, normalize = values
    is_name = (
        isinstance(center, str),
        isinstance(scale, str) and scale == "mean-sqrt-d",
        isinstance(divide, str),
        isinstance(normalize, str),
    )
    if rows is None or not any(is_name):
        return values
    layer_stats = [store.known_stats(layer, rows) for layer in layers]
    _check_range(store, layer_stats)
    if is_name[0]:
        center = np.stack([np.nan_to_num(stats.mean, nan=0.0) for stats in layer_stats])
    if is_name[1]:
        offsets = vectors(center, "center", store.d_model, len(layers))
        scale = _to_mean_square(store, layer_stats, offsets)
    if is_name[2]:
        divide = np.stack([np.where(stats.variance > 0, np.sqrt(stats.variance), 1.0) for stats in layer_stats])
    return Rescaling(center, scale, divide, layer_stats if is_name[3] else normalize)


def _check_range(store: Readable, layer_stats: Sequence[Stats]) -> None:
    """Raises ArgumentError if sums over rows of huge float64 values overflowed: rows rescaled by them would be wrong."""
    if any(np.isinf(values).any() for stats in layer_stats for values in (stats.mean, stats.variance)):
        raise ArgumentError(
            "the mean or the variance of a column is beyond float64; rescale by numbers", path=store.path
        )


def _check_names(values: Rescaling) -> None:
    for name, accepted in (("center", "mean"), ("divide", "std"), ("normalize", "stats")):
        value = getattr(values, name)
        if isinstance(value, str) and value != accepted:
            hint = ' (scale="unit-norm" and "sqrt-d" exist)' if value in ("unit-norm", "sqrt-d") else ""
            raise ArgumentError(f'{name}: expected numbers or "{accepted}", found {value!r}{hint}')


def _to_mean_square(
    store: Readable, layer_stats: Sequence[Stats], offsets: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """One factor per layer, so that its rows minus ``offsets`` have a mean squared norm of d_model; 1 if these are zero.

    Source: Conerly et al., "Update on how we train SAEs", Transformer Circuits, April 2024.
    """
    centers = np.zeros((len(layer_stats), store.d_model)) if offsets is None else offsets.reshape(-1, store.d_model)
    centers = np.broadcast_to(centers, (len(layer_stats), store.d_model))
    factors = np.ones((len(layer_stats), store.d_model))
    for number, stats in enumerate(layer_stats):
        with np.errstate(over="ignore"):
            square = float(np.nansum(stats.variance) + np.nansum((stats.mean - centers[number]) ** 2))
        if np.isinf(square):
            raise ArgumentError('scale: "mean-sqrt-d": the squares of these rows are beyond float64', path=store.path)
        factors[number] = np.sqrt(store.d_model / square) if square > 0 else 1.0
    return factors


def settings_of(options: dict[str, Any]) -> dict[str, object]:
    """The result of :func:`rescaling` as plain values for a stream's state."""
    settings: dict[str, object] = {}
    for name in ("center", "scale", "divide"):
        if options[name] is not None:
            settings[name] = hashlib.sha256(options[name].tobytes()).hexdigest()[:16]
    if options["norm"] is not None:
        settings["scale"] = options["norm"]
    if options["wide"]:
        settings["arithmetic"] = "float64"
    return settings


def normalizer(store: Readable, layer: Layer, selection: Selection, values: Rescaling) -> Normalizer:
    """The rescaling of a layer's rows by these values, of which names are of the selected rows' statistics."""
    name = store.layers[store.group_of(layer)]
    if all(value is None for value in values):  # arrays compare element by element
        values = Rescaling(normalize="stats")
    rows = None
    _check(store, [name], values)
    if any(isinstance(value, str) and value not in ("unit-norm", "sqrt-d") for value in values):
        rows = selection.resolve(store, [name])
        selection.warn_of_nothing(store, [name], rows)
    numbers = rescaling(store, [name], values, rows)
    for what in ("center", "scale", "divide"):
        if (column := numbers[what]) is not None and not np.isfinite(_arguments.shared(column)).all():
            raise ArgumentError(f"{what}: expected finite numbers, found {column[~np.isfinite(column)][0]}")
    return Normalizer(
        name,
        store.d_model,
        np.dtype(np.float64) if store.row_kind(name).is_mixed else store.dtype,
        numbers["center"],
        numbers["scale"],
        numbers["divide"],
        numbers["norm"],
        dataset=store.identity,
        rows=None if rows is None else rows.count,
        selection=None if rows is None else rows.digest,
    )


def _merge(normalizers: Sequence[Normalizer]) -> dict[str, Any]:
    """The options of a stream of several layers, a normalizer each."""
    names = [name for name in ("scale", "divide", "norm") if any(getattr(n, name) is not None for n in normalizers)]
    if len(names) > 1 or len({n.norm for n in normalizers}) > 1:
        raise ArgumentError(
            "normalize: expected normalizers of one kind for the layers of a stream, found "
            f"{'; '.join(str(n) for n in normalizers):.300}"
        )
    options: dict[str, Any] = {"norm": normalizers[0].norm, "wide": any(n.is_wide for n in normalizers)}
    for name, neutral in (("center", 0.0), ("scale", 1.0), ("divide", 1.0)):
        columns = [getattr(n, name) for n in normalizers]
        stacked = [np.full(n.d_model, neutral) if c is None else c for n, c in zip(normalizers, columns, strict=True)]
        options[name] = None if all(c is None for c in columns) else np.concatenate(stacked)
    return options


def _normalizers(store: Readable, normalize: object, layers: Sequence[Layer]) -> list[Normalizer]:
    """The normalizer of each layer: a stream's own, or one of its statistics."""
    values = [normalize] if isinstance(normalize, Stats | Normalizer) else normalize
    if (
        not isinstance(values, Sequence)
        or isinstance(values, str)
        or not all(isinstance(value, Stats | Normalizer) for value in values)
    ):
        raise ArgumentTypeError(
            "normalize: expected store.normalizer(layer), store.stats(layer), or a list of one per layer, found "
            f"{type(normalize).__name__}"
        )
    layer_stats = [value for value in values if isinstance(value, Stats)]
    if len(layer_stats) == len(values):
        _check_stats(store, layer_stats, layers)
    elif len(values) != len(layers):
        raise ArgumentError(f"normalize: expected {len(layers)} normalizers, one per layer, found {len(values)}")
    normalizers = [of_stats(value) if isinstance(value, Stats) else value for value in values]
    for norm, layer in zip(normalizers, layers, strict=True):
        norm.check(layer, store.d_model)
    return normalizers


def _check_stats(store: Readable, layer_stats: Sequence[Stats], layers: Sequence[Layer]) -> None:
    if len(layer_stats) != len(layers):
        raise ArgumentError(
            f"normalize: expected statistics of {len(layers)} layers, in their order, found {len(layer_stats)}"
        )
    for stats, layer in zip(layer_stats, layers, strict=True):
        if stats.layer is not None and stats.layer != layer:
            raise ArgumentError(
                f"normalize: expected statistics of layer {layer!r}, found those of layer {stats.layer!r}. To use them, pass "
                "center=stats.mean, divide=stats.std"
            )
        if len(stats.mean) != store.d_model:
            raise ArgumentError(
                f"normalize: expected statistics of rows of {store.d_model}, found those of {len(stats.mean)}"
            )
    _check_range(store, layer_stats)


def _norm_of(store: Readable, scale: Scale) -> float | None:
    """The L2 norm of scaled rows for ``scale="unit-norm"`` or ``"sqrt-d"``; None for numbers and arrays."""
    if not isinstance(scale, str):
        return None
    if scale not in ("unit-norm", "sqrt-d"):
        raise ArgumentError(
            f'scale: expected a number, an array, "unit-norm", "sqrt-d" or "mean-sqrt-d", found {scale!r}'
        )
    return 1.0 if scale == "unit-norm" else store.d_model**0.5


def vectors(value: object, what: str, d_model: int, layers: int) -> NDArray[np.float64] | None:
    """A factor or offset per column, or per layer and column, as a flat float64 array."""
    if value is None:
        return None
    if isinstance(value, Stats):
        raise ArgumentTypeError(
            f"{what}: expected numbers, found statistics. Use normalize=stats, or {what}=stats.mean etc."
        )
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu().double().numpy()
        if np.asarray(value).dtype == np.bool_:
            raise ArgumentTypeError(f"{what}: expected numbers, found {value!r:.50}")
        array = _arguments.as_array(value, f"{what}: expected numbers").astype(np.float64)
    except ArgumentError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{what}: expected numbers, found {type(value).__name__}: {error!s:.80}") from error
    if array.ndim == 0:
        array = np.broadcast_to(array, (d_model,))
    if array.shape not in ((d_model,), (layers, d_model)):
        raise ArgumentError(f"{what}: expected ({d_model},) or ({layers}, {d_model}), found {array.shape}")
    return np.ascontiguousarray(array).reshape(-1)


# What streams of rows and streams of whole examples have in common.


B_co = TypeVar("B_co", covariant=True)
Shuffle = Literal["window", "exact"] | None


@dataclass(frozen=True)
class RowOrder:
    """The order of an epoch's rows and their division among ranks: arguments of :meth:`Store.stream`, not yet checked."""

    shuffle: Shuffle = None
    seed: int = 0
    epoch: int = 0
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1


STORED_ORDER = RowOrder()


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
        rescaling: Rescaling,
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
