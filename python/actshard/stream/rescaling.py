"""The layers of a stream, and its ``center=``, ``scale=``, ``divide=`` and ``normalize=`` as numbers for the core.

The core computes ``(row - center) * scale`` or ``(row - center) / divide`` while it copies, or scales rows to a norm. Everything
else is translated here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actshard import _arguments
from actshard.errors import ArgumentError, ArgumentTypeError, NotStoredError
from actshard.layers import Layer, is_one, one
from actshard.stats import Stats, is_deviation
from actshard.stream.readable import Readable

Scale = float | ArrayLike | Literal["unit-norm", "sqrt-d"] | None
Normalize = Stats | Sequence[Stats] | None


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


def rescaling(
    store: Readable, layers: Sequence[Layer], center: ArrayLike | None, scale: Scale, divide: Any, normalize: Normalize
) -> dict[str, Any]:
    """The options ``center``, ``scale``, ``divide`` and ``norm`` of ``_native.Stream``.

    Raises:
        ArgumentError: an argument is invalid, or two of them exclude each other.
    """
    d_model, n = store.d_model, len(layers)
    if normalize is not None:
        for name, value in (("center", center), ("scale", scale), ("divide", divide)):
            if value is not None:
                raise ArgumentError(
                    f"{name}: not supported with normalize=, which subtracts the mean and divides by std"
                )
        each = _stats_of(normalize, layers)
        center = np.stack([np.nan_to_num(stats.mean, nan=0.0) for stats in each])
        scale = np.stack([stats.inverse_std for stats in each])
    elif divide is not None:
        if scale is not None:
            raise ArgumentError("divide: not supported with scale=, which multiplies; pass one of them")
        divisors = vectors(divide, "divide", d_model, n)
        assert divisors is not None
        if not (np.isfinite(divisors) & (divisors != 0)).all():
            raise ArgumentError(
                "divide: expected finite numbers other than 0, found "
                f"{divisors[~(np.isfinite(divisors) & (divisors != 0))][0]}. normalize=stats keeps columns without variance"
            )
        return {"center": vectors(center, "center", d_model, n), "scale": None, "norm": None, "divide": divisors}
    norm = _norm_of(store, scale)
    if is_deviation(scale) or is_deviation(center):
        raise ArgumentError(
            "scale: expected a factor, found stats.std, and rows are multiplied by it. "
            "Use normalize=stats, divide=stats.std or scale=stats.inverse_std."
        )
    return {
        "center": vectors(center, "center", d_model, n),
        "scale": vectors(None if norm is not None else scale, "scale", d_model, n),
        "norm": norm,
        "divide": None,
    }


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """What :func:`rescaling` made, as plain values for a stream's state."""
    made: dict[str, Any] = {}
    for name in ("center", "scale", "divide"):
        if options[name] is not None:
            made[name] = hashlib.sha256(options[name].tobytes()).hexdigest()[:16]
    if options["norm"] is not None:
        made["scale"] = options["norm"]
    return made


def _stats_of(normalize: Any, layers: Sequence[Layer]) -> list[Stats]:
    """The statistics of each layer."""
    each = [normalize] if isinstance(normalize, Stats) else normalize
    if not isinstance(each, Sequence) or isinstance(each, str) or not all(isinstance(stats, Stats) for stats in each):
        raise ArgumentTypeError(
            f"normalize: expected store.stats(layer), or a list of one per layer, found {type(normalize).__name__}"
        )
    if len(each) != len(layers):
        raise ArgumentError(
            f"normalize: expected statistics of {len(layers)} layers, in their order, found {len(each)}"
        )
    for stats, layer in zip(each, layers, strict=True):
        if stats.layer is not None and stats.layer != layer:
            raise ArgumentError(
                f"normalize: expected statistics of layer {layer!r}, found those of layer {stats.layer!r}. If that is meant, pass "
                "center=stats.mean, divide=stats.std"
            )
    return list(each)


def _norm_of(store: Readable, scale: Scale) -> float | None:
    """The L2 norm of scaled rows for ``scale="unit-norm"`` or ``"sqrt-d"``; None for numbers and arrays."""
    if not isinstance(scale, str):
        return None
    if scale not in ("unit-norm", "sqrt-d"):
        raise ArgumentError(f'scale: expected a number, an array, "unit-norm" or "sqrt-d", found {scale!r}')
    return 1.0 if scale == "unit-norm" else store.d_model**0.5


def vectors(value: Any, what: str, d_model: int, layers: int) -> NDArray[np.float64] | None:
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
        array = np.asarray(value, np.float64)
    except ArgumentError:
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{what}: expected numbers, found {type(value).__name__}") from error
    if array.ndim == 0:
        array = np.broadcast_to(array, (d_model,))
    if array.shape not in ((d_model,), (layers, d_model)):
        raise ArgumentError(f"{what}: expected ({d_model},) or ({layers}, {d_model}), found {array.shape}")
    return np.ascontiguousarray(array).reshape(-1)
