"""How well a stream is shuffled, relative to a uniformly random order of the same rows.

- distinct examples per batch: rows of one example resemble each other;
- entropy of example ids within a batch, divided by that of a uniformly random batch;
- the median distance, in rows, between rows that are stored side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LOTS = 20
"""Ideal batches drawn."""


@dataclass(frozen=True)
class Quality:
    """What :func:`measure` found; each ratio is 1 for an ideal shuffle.

    Attributes:
        distinct, ideal_distinct: mean number of different examples in a batch.
        entropy: mean entropy of the examples in a batch, divided by that of ideal batches.
        apart, ideal_apart: median number of rows between the appearances of rows that are stored side by side.
    """

    distinct: float
    ideal_distinct: float
    entropy: float
    apart: float
    ideal_apart: float

    @property
    def distinct_ratio(self) -> float:
        """Distinct examples, ours / ideal."""
        return self.distinct / self.ideal_distinct if self.ideal_distinct else 1.0

    @property
    def apart_ratio(self) -> float:
        """Distance of stored neighbours, ours / ideal."""
        return self.apart / self.ideal_apart if self.ideal_apart else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ratios included."""
        return {**asdict(self), "distinct_ratio": self.distinct_ratio, "apart_ratio": self.apart_ratio}


def entropy(examples: NDArray[np.int64]) -> float:
    """Of the shares that examples have in a batch, in nats."""
    _, counts = np.unique(examples, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def measure(batches: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], *, seed: int = 0) -> Quality:
    """Measures batches of one epoch, given as (examples, tokens) in the order in which they came.

    The ideal is drawn from the same rows: they should be an epoch, or much of one.
    """
    most = max((len(b[0]) for b in batches), default=0)
    full = [b for b in batches if len(b[0]) == most]
    if not full:
        return Quality(0.0, 0.0, 1.0, 0.0, 0.0)
    examples = np.concatenate([b[0] for b in batches])
    tokens = np.concatenate([b[1] for b in batches])
    rng = np.random.default_rng(seed)
    size = len(full[0][0])
    lots = [examples[rng.choice(len(examples), size, replace=False)] for _ in range(_LOTS)]
    ideal = float(np.mean([entropy(x) for x in lots]))
    found = float(np.mean([entropy(e) for e, _ in full]))
    # Positions of rows that are stored side by side.
    order = np.lexsort((tokens, examples))
    beside = np.flatnonzero(np.diff(examples[order]) == 0)
    apart = np.abs(order[beside + 1] - order[beside])
    n = len(examples)
    return Quality(
        distinct=float(np.mean([len(np.unique(e)) for e, _ in full])),
        ideal_distinct=float(np.mean([len(np.unique(x)) for x in lots])),
        entropy=found / ideal if ideal > 0 else 1.0,
        apart=float(np.median(apart)) if len(apart) else 0.0,
        # The median distance of two places chosen by lot among n.
        ideal_apart=n * (1 - 0.5**0.5) if len(apart) else 0.0,
    )
