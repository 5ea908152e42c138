"""What all rows of a layer have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Stats:
    """Statistics of a layer's rows; arrays are ``(d_model,)``.

    Values that are no finite numbers are counted and left out of everything else.

    Attributes:
        rows: how many rows.
        mean, variance: float64; the variance is that of the population (divided by n). NaN where no value is finite.
        min, max: float64, of finite values; infinite where there are none.
        nan, inf: int64 counts.
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
        """The square root of the variance."""
        return np.sqrt(self.variance)

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
