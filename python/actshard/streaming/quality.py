"""How well a stream is shuffled, relative to a uniformly random order of the same rows.

- number of distinct examples per batch (rows of one example are correlated);
- entropy of example ids within a batch, divided by that of a uniformly random batch;
- median distance, in rows, between rows that are adjacent in storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LOTS = 20
"""Number of uniformly random batches drawn as the ideal."""


@dataclass(frozen=True)
class Quality:
    """Result of :func:`measure`; each ratio is 1 for a uniformly random order.

    Attributes:
        distinct, ideal_distinct: mean number of distinct examples in a batch.
        entropy: mean entropy of example ids within a batch, divided by that of ideal batches.
        apart, ideal_apart: median distance in the stream, in rows, between rows that are adjacent in storage.
    """

    distinct: float
    ideal_distinct: float
    entropy: float
    apart: float
    ideal_apart: float

    @property
    def distinct_ratio(self) -> float:
        """Distinct examples, measured / ideal."""
        return self.distinct / self.ideal_distinct if self.ideal_distinct else 1.0

    @property
    def apart_ratio(self) -> float:
        """Distance of rows adjacent in storage, measured / ideal."""
        return self.apart / self.ideal_apart if self.ideal_apart else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Returns all values and ratios as a dict."""
        return {**asdict(self), "distinct_ratio": self.distinct_ratio, "apart_ratio": self.apart_ratio}


def entropy(examples: NDArray[np.int64]) -> float:
    """Returns the entropy of example ids within a batch, in nats."""
    _, counts = np.unique(examples, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def distances(batches: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> NDArray[np.int64]:
    """Returns how far apart the batches put rows that are adjacent in storage: in rows, int64, in storage order.

    Adjacent are consecutive tokens of an example; if every example has one row, as in pooled data, consecutive examples.
    """
    if not batches:
        return np.zeros(0, np.int64)
    examples = np.concatenate([b[0] for b in batches])
    tokens = np.concatenate([b[1] for b in batches])
    order = np.lexsort((tokens, examples))
    steps = np.diff(examples[order])
    adjacent = np.flatnonzero(steps == 0)
    if not len(adjacent):
        adjacent = np.flatnonzero(steps == 1)
    gaps: NDArray[np.int64] = np.abs(order[adjacent + 1] - order[adjacent])
    return gaps


def measure(batches: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], *, seed: int = 0) -> Quality:
    """Measures how well batches are shuffled.

    Args:
        batches: (examples, tokens) of each batch, int64 ``(b,)``, in stream order. The ideal is drawn from the same rows, so
            pass an epoch or a large part of one.
        seed: seed of the ideal batches.
    """
    most = max((len(b[0]) for b in batches), default=0)
    full = [b for b in batches if len(b[0]) == most]
    if not full:
        return Quality(0.0, 0.0, 1.0, 0.0, 0.0)
    examples = np.concatenate([b[0] for b in batches])
    rng = np.random.default_rng(seed)
    size = len(full[0][0])
    lots = [examples[rng.choice(len(examples), size, replace=False)] for _ in range(_LOTS)]
    ideal = float(np.mean([entropy(x) for x in lots]))
    mean_entropy = float(np.mean([entropy(e) for e, _ in full]))
    gaps = distances(batches)
    n = len(examples)
    return Quality(
        distinct=float(np.mean([len(np.unique(e)) for e, _ in full])),
        ideal_distinct=float(np.mean([len(np.unique(x)) for x in lots])),
        entropy=mean_entropy / ideal if ideal > 0 else 1.0,
        apart=float(np.median(gaps)) if len(gaps) else 0.0,
        # The median distance between two uniformly random positions among n.
        ideal_apart=n * (1 - 0.5**0.5) if len(gaps) else 0.0,
    )
