"""Statistics of a layer's rows."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.layers import Layer

_DEVIATIONS: weakref.WeakValueDictionary[int, NDArray[np.float64]] = weakref.WeakValueDictionary()
"""Arrays that :attr:`Stats.std` returned, by id. ``scale=`` refuses them: it multiplies, and users mean to divide."""


def is_deviation(value: object) -> bool:
    """Whether ``value`` is an array object that :attr:`Stats.std` returned. Arrays computed from one are not."""
    return _DEVIATIONS.get(id(value)) is value and value is not None


@dataclass(frozen=True, eq=False, repr=False)
class Stats:
    """Statistics of a layer's rows; arrays have shape ``(d_model,)``.

    NaN and infinite values are counted, and excluded from all other statistics.

    Attributes:
        rows: number of rows.
        mean, variance: float64; population variance (divided by n). NaN for columns without finite values.
        min, max: float64, of finite values; +inf and -inf for columns without finite values.
        nan, inf: int64 counts.
        std, inverse_std: float64, computed from the variance.
        mean_norm: mean L2 norm of the rows whose values are all finite; NaN without such rows.
        layer: the layer's name, by which ``stream(normalize=)`` refuses statistics of another layer. None: not known.
    """

    rows: int
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]
    nan: NDArray[np.int64]
    inf: NDArray[np.int64]
    mean_norm: float
    layer: Layer | None = None

    @property
    def std(self) -> NDArray[np.float64]:
        """Square root of the variance, float64.

        ``stream(scale=)`` multiplies and refuses this array: pass :attr:`inverse_std` to standardize rows.
        """
        made: NDArray[np.float64] = np.sqrt(self.variance)
        _DEVIATIONS[id(made)] = made
        return made

    @property
    def inverse_std(self) -> NDArray[np.float64]:
        """``1 / std``, float64; 1 for a column without variance.

        ``store.stream(..., center=stats.mean, scale=stats.inverse_std)`` yields columns with mean 0 and variance 1.
        """
        std = np.sqrt(self.variance)
        made: NDArray[np.float64] = 1 / np.where(std > 0, std, 1.0)
        return made

    def __repr__(self) -> str:
        bad = int(self.nan.sum()), int(self.inf.sum())
        return (
            f"<actshard.Stats of {self.rows} rows of {len(self.mean)}: mean norm {self.mean_norm:.6g}, "
            f"{bad[0]} NaN and {bad[1]} infinite values>"
        )

    @classmethod
    def of(cls, sums: dict[str, Any], layer: Layer | None = None) -> Stats:
        """Builds the statistics of a layer from the sums that the Rust core returns."""
        finite = sums["finite"]
        some = finite > 0
        n = np.where(some, finite, 1)
        total, count = sums["norms"]
        return cls(
            rows=sums["rows"],
            mean=np.where(some, sums["mean"], np.nan),
            variance=np.where(some, sums["squares"] / n, np.nan),
            min=sums["min"],
            max=sums["max"],
            nan=sums["nan"],
            inf=sums["infinite"],
            mean_norm=total / count if count else float("nan"),
            layer=layer,
        )
