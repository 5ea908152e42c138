"""What all rows of a layer have in common."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DEVIATIONS: weakref.WeakValueDictionary[int, NDArray[np.float64]] = weakref.WeakValueDictionary()
"""Arrays that :attr:`Stats.std` returned, by id: as ``scale=`` they would do the opposite of what is meant."""


def is_deviation(value: object) -> bool:
    """Whether this is the very array that :attr:`Stats.std` returned; nothing computed from it is."""
    return _DEVIATIONS.get(id(value)) is value and value is not None


@dataclass(frozen=True, eq=False, repr=False)
class Stats:
    """Statistics of a layer's rows; arrays are ``(d_model,)``.

    Values that are no finite numbers are counted and left out of everything else.

    Attributes:
        rows: how many rows.
        mean, variance: float64; the variance is that of the population (divided by n). NaN where no value is finite.
        min, max: float64, of finite values; infinite where there are none.
        nan, inf: int64 counts.
        std, inverse_std: float64, computed from the variance.
        mean_norm: the mean L2 norm of the rows whose values are all finite; NaN where there are none.
    """

    rows: int
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]
    nan: NDArray[np.int64]
    inf: NDArray[np.int64]
    mean_norm: float

    @property
    def std(self) -> NDArray[np.float64]:
        """The square root of the variance, float64.

        ``stream(scale=)`` multiplies: :attr:`inverse_std` standardizes rows, this is refused there.
        """
        made: NDArray[np.float64] = np.sqrt(self.variance)
        _DEVIATIONS[id(made)] = made
        return made

    @property
    def inverse_std(self) -> NDArray[np.float64]:
        """``1 / std``, float64; 1 for a column without variance.

        ``store.stream(..., center=stats.mean, scale=stats.inverse_std)`` gives every column mean 0 and variance 1.
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
    def of(cls, sums: dict[str, Any]) -> Stats:
        """From the native half's sums."""
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
        )
