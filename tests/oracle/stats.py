"""Statistics of rows, and rows that are rescaled by them."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.oracle.examples import Examples, Layer, Rows
from tests.oracle.selection import Place, norm


@dataclass
class Summary:
    """Statistics of a layer's selected rows; arrays ``(d_model,)``."""

    rows: int
    mean: np.ndarray
    variance: np.ndarray
    min: np.ndarray
    max: np.ndarray
    nan: np.ndarray
    inf: np.ndarray
    zeros: np.ndarray
    norms: list[float]
    """Finite norms, in stored order."""
    largest_rows: list[Place]
    largest_columns: list[tuple[int, float, int, int]]
    """Column, magnitude, example, token; of equal magnitudes the first row."""
    norms_by_position: dict[int, list[float]]
    different: int
    """Different rows among those with finite norms."""


def summarize(data: Examples, layer: Layer, places: list[Place]) -> Summary:
    """Statistics without NaN and infinite values, which are counted."""
    stored = [data.examples[example].rows[layer][token] for example, token in places]
    wide = np.array([row.astype(np.float64) for row in stored]).reshape(-1, data.d_model)
    finite = np.isfinite(wide)
    with warnings.catch_warnings():  # of columns without finite values
        warnings.simplefilter("ignore")
        mean = np.nanmean(np.where(finite, wide, np.nan), axis=0) if len(wide) else np.full(data.d_model, np.nan)
        variance = np.nanvar(np.where(finite, wide, np.nan), axis=0) if len(wide) else np.full(data.d_model, np.nan)
        if len(wide):  # numpy's mean of equal values may differ from them
            least, most = (reduce(np.where(finite, wide, np.nan), axis=0) for reduce in (np.nanmin, np.nanmax))
            variance = np.where(least == most, 0.0, variance)
    norms = [norm(row) for row in stored]
    usable = [k for k, size in enumerate(norms) if math.isfinite(size)]
    by_position: dict[int, list[float]] = {}
    for k in usable:
        by_position.setdefault(places[k][1], []).append(norms[k])
    columns = []
    for column in range(data.d_model):
        sizes = [abs(float(row[column])) for row in wide]
        known = [k for k, size in enumerate(sizes) if 0 < size < math.inf]
        if known:
            k = min(known, key=lambda k: (-sizes[k], k))
            columns.append((column, sizes[k], *places[k]))
    return Summary(
        rows=len(places),
        mean=mean,
        variance=variance,
        min=np.where(finite, wide, np.inf).min(axis=0, initial=np.inf),
        max=np.where(finite, wide, -np.inf).max(axis=0, initial=-np.inf),
        nan=np.isnan(wide).sum(axis=0),
        inf=np.isinf(wide).sum(axis=0),
        zeros=(wide == 0).sum(axis=0),
        norms=[norms[k] for k in usable],
        largest_rows=[places[k] for k in sorted(usable, key=lambda k: (-norms[k], k))[:16]],
        largest_columns=sorted(columns, key=lambda each: (-each[1], each[0]))[:16],
        norms_by_position=by_position,
        different=len({wide[k].tobytes() for k in usable}),
    )


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def rescale(row: Rows, options: dict[str, Any], summary: Summary) -> np.ndarray:
    """A row after ``center``, ``scale``, ``divide`` and ``normalize``, in float64."""
    wide = row.astype(np.float64)
    mean = np.nan_to_num(summary.mean)
    deviation = np.sqrt(np.nan_to_num(summary.variance))
    deviation = np.where(deviation > 0, deviation, 1.0)
    with np.errstate(all="ignore"):
        if options.get("normalize") is not None:
            return (wide - mean) / deviation
        center = options.get("center")
        if center is not None:
            wide = wide - (mean if isinstance(center, str) else center)
        if options.get("divide") is not None:
            wide = wide / deviation
        scale = options.get("scale")
        if scale in ("unit-norm", "sqrt-d"):
            size, length = norm(wide), 1.0 if scale == "unit-norm" else math.sqrt(len(row))
            return wide / size * length if math.isfinite(size) and size > 0 else wide
        if scale == "mean-sqrt-d":
            offset = 0.0 if center is None else mean if isinstance(center, str) else center
            square = float(np.nansum(summary.variance) + np.nansum((summary.mean - offset) ** 2))
            scale = math.sqrt(len(row) / square) if square > 0 else 1.0
        return wide if scale is None else wide * scale
