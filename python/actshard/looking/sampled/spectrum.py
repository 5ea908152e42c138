"""The covariance of a sample of rows: eigenvalues, effective rank, principal directions.

Rows are centred and divided by a power of two, so that squares of huge values do not overflow. Of n rows with d columns, the
smaller one of the matrices X^T X (d, d) and X X^T (n, n) is decomposed: they have the same eigenvalues other than 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError
from actshard.base.layers import Layer, plain
from actshard.reading.choosing import scrambled
from actshard.streaming.readable import Readable, SelectedRows
from actshard.streaming.selection import Selection

# The sample: which rows, and how they are read.
#
# Rows that may be chosen are counted 0 to N - 1 in stored order, example after example. The sample has one of each of n equal
# ranges of these numbers, at a place that splitmix64 of the seed chooses. So it is spread over the whole dataset, has no row
# twice, is ascending, needs no memory per row of the dataset, and depends on N, n and the seed only.


RowsRead = Callable[[int, int], object]
"""Called with the rows read so far and their total."""
MOST = 1 << 24
"""Most rows of a sample."""
_BLOCK = 32 << 20
"""Bytes that are read at a time."""


@dataclass(frozen=True, eq=False)
class Places:
    """Rows of a sample, in stored order.

    Attributes:
        examples, tokens: ``(n,)`` int64.
        total: rows that the sample was chosen from.
    """

    examples: NDArray[np.int64]
    tokens: NDArray[np.int64]
    total: int

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, part: Any) -> Places:
        return Places(self.examples[part], self.tokens[part], self.total)


def spread(total: int, count: int, seed: int) -> NDArray[np.int64]:
    """``count`` numbers below ``total``, ascending, one of each of ``count`` equal ranges; all if there are fewer."""
    if count >= total:
        return np.arange(total)
    size, rest = divmod(total, count)
    i = np.arange(count + 1, dtype=np.int64)
    edges = i * size + i * rest // count  # i * total // count, without overflow
    fraction = (scrambled(count, seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    wide = np.diff(edges)
    return np.asarray(edges[:-1] + np.minimum((fraction * wide).astype(np.int64), wide - 1), np.int64)


def sample(rows: SelectedRows, count: int, seed: int) -> Places:
    """``count`` of these rows; all, if there are fewer."""
    return Places(*rows.locate(spread(rows.count, count, seed)), rows.count)


def exact(store: Readable) -> np.dtype[np.generic]:
    """The narrowest of float32 and float64 that has all values of the stored dtype.

    Integers and other types that gathers cannot convert are refused by the gather.
    """
    wide = store.contents.types_may_differ or store.dtype.itemsize > 4
    return np.dtype(np.float64 if wide else np.float32)


def blocks(store: Readable, layer: Layer, places: Places) -> Iterator[tuple[int, NDArray[np.generic]]]:
    """The rows of a sample in blocks ``(b, d_model)``, each with the number of its first row."""
    dtype = exact(store)
    step = max(1, _BLOCK // max(1, store.d_model * dtype.itemsize))
    for start in range(0, len(places), step):
        part = places[start : start + step]
        yield start, store.gather(layer, part.examples, part.tokens, dtype=dtype)


def exponent(rows: NDArray[np.generic]) -> int:
    """The power of two that the largest magnitude of finite rows is divided by, so that squares do not overflow."""
    largest = max(float(rows.max(initial=0)), -float(rows.min(initial=0)))
    return int(np.frexp(largest)[1]) if largest > 0 else 0


def count_of(value: object, what: str, least: int = 1) -> int:
    """A checked number of rows, examples or directions."""
    return _arguments.whole(value, what, least, MOST)


def number(value: float) -> float | None:
    """A JSON value: NaN and infinite ones are null."""
    return float(value) if np.isfinite(value) else None


def numbers(values: NDArray[np.generic]) -> list[object]:
    """JSON values of an array of one or two dimensions."""
    plain_values: list[Any] = values.tolist()
    return [[number(x) for x in row] if isinstance(row, list) else number(row) for row in plain_values]


_PART = 4 << 20
"""Values of the sample that are widened to float64 at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum:
    """The spectrum of a layer's covariance, from a sample of its rows; m is the smaller one of ``rows`` and ``d_model``.

    Attributes:
        layer: the layer's name.
        rows: rows that were used: those of the sample without NaN and infinite values.
        left_out: rows of the sample with a NaN or infinite value.
        total: rows in the dataset that the sample was chosen from.
        seed: the seed of the sample.
        d_model: elements per row.
        mean: ``(d_model,)`` float64: the mean row of the sample. NaN without rows.
        eigenvalues: ``(m,)`` float64, descending: variances along the principal directions, divided by ``rows`` as those of
            :class:`~actshard.Stats`. Those within the rounding error of 0 are 0.
        explained: ``(m,)`` float64: each eigenvalue's share of their sum. NaN if no column varies.
        directions: ``(k, d_model)`` float64: the first principal directions, of length 1, the largest element of each positive.
            At most as many as were asked for, and as there are eigenvalues other than 0.
    """

    layer: Layer
    rows: int
    left_out: int
    total: int
    seed: int
    d_model: int
    mean: NDArray[np.float64]
    eigenvalues: NDArray[np.float64]
    explained: NDArray[np.float64]
    directions: NDArray[np.float64]

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of :attr:`explained`: 1 if one direction has all variance, d if d directions have equal ones.

        Roy and Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007, of the covariance matrix,
        whose singular values are the eigenvalues. Authors who take the singular values of the centred rows instead, the square
        roots, get larger numbers. NaN if no column varies.
        """
        p = self.explained[self.explained > 0]
        return float(np.exp(-(p * np.log(p)).sum())) if p.size else float("nan")

    @property
    def participation_ratio(self) -> float:
        """``sum(eigenvalues)**2 / sum(eigenvalues**2)``: at most :attr:`effective_rank`, and less sensitive to small ones.

        Gao et al., "A theory of multineuronal dimensionality, dynamics and measurement", 2017. NaN if no column varies.
        """
        squares = float((self.explained**2).sum())
        return 1 / squares if squares > 0 else float("nan")

    def rank_for(self, share: float) -> int:
        """The number of principal directions that explain a share of the variance, such as 0.9; 0 if no column varies.

        Raises:
            ArgumentError: the share is not between 0 and 1.
        """
        if isinstance(share, bool) or not isinstance(share, int | float | np.number) or not 0 < share <= 1:
            raise ArgumentError(f"share: expected a number above 0, at most 1, found {share!r:.80}")
        if not (self.explained > 0).any():
            return 0
        # Sums of shares may end a rounding error below 1.
        reached = np.cumsum(self.explained) >= share * (1 - 1e-12)
        return int(np.argmax(reached)) + 1

    def project(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Returns coordinates of rows along the principal directions: ``(rows - mean) @ directions.T``.

        Args:
            rows: ``(..., d_model)`` numbers, such as the activations of a batch or the result of :meth:`Store.gather`.

        Returns:
            ``(..., k)`` float64, a copy, one column per direction. NaN and infinite values of a row make its coordinates NaN.

        Raises:
            ArgumentError: the rows have another width than the spectrum.
        """
        values = _arguments.as_array(rows, f"rows: expected (..., {self.d_model}) numbers")
        if not values.ndim or values.shape[-1] != self.d_model:
            raise ArgumentError(f"rows: expected (..., {self.d_model}) numbers, found {values.shape}")
        flat = values.reshape(-1, self.d_model)
        coordinates = np.empty((len(flat), len(self.directions)))
        for part in _parts(*flat.shape):
            with np.errstate(invalid="ignore", over="ignore"):
                coordinates[part] = (flat[part].astype(np.float64) - self.mean) @ self.directions.T
        coordinates[~np.isfinite(coordinates).all(axis=1)] = np.nan
        return coordinates.reshape(*values.shape[:-1], len(self.directions))

    def as_dict(self) -> dict[str, Any]:
        """JSON values: numbers, and lists for arrays. NaN is None."""
        arrays = {name: numbers(getattr(self, name)) for name in ("mean", "eigenvalues", "explained", "directions")}
        return {
            "layer": self.layer,
            "rows": self.rows,
            "left_out": self.left_out,
            "total": self.total,
            "seed": self.seed,
            "d_model": self.d_model,
            "effective_rank": number(self.effective_rank),
            "participation_ratio": number(self.participation_ratio),
            **arrays,
        }

    def __repr__(self) -> str:
        first = f", the first direction explains {self.explained[0]:.1%}" if (self.explained > 0).any() else ""
        bad = f", {self.left_out:,} not finite left out" if self.left_out else ""
        return (
            f"<actshard.Spectrum of layer {plain(self.layer):.80}, {self.rows:,} of "
            f"{_arguments.many(self.total, 'row')}{bad}: effective rank "
            f"{self.effective_rank:.4g} of {self.d_model}, participation ratio {self.participation_ratio:.4g}{first}>"
        )


def spectrum_of(
    store: Readable,
    layer: Layer,
    rows: int,
    directions: int,
    seed: int,
    selection: Selection,
    progress: RowsRead | None,
) -> Spectrum:
    """See :meth:`~actshard.looking.sampled.SampledVerbs.spectrum`."""
    _arguments.check_progress(progress)
    name = store.layers[store.group_of(layer)]
    count, most, seed = count_of(rows, "rows"), count_of(directions, "directions", 0), _arguments.whole(seed, "seed")
    store.check_open()
    places = sample(selection.resolve(store, [name]), count, seed)
    finite_rows = _finite(store, name, places, progress)
    mean, values, vectors, power = decomposed(finite_rows, most)
    top = float(values.sum())
    with np.errstate(over="ignore", under="ignore"):
        variances = np.ldexp(values, 2 * power)
    return Spectrum(
        layer=name,
        rows=len(finite_rows),
        left_out=len(places) - len(finite_rows),
        total=places.total,
        seed=seed,
        d_model=store.d_model,
        mean=mean,
        eigenvalues=variances,
        explained=values / top if top > 0 else np.full(len(values), np.nan),
        directions=vectors,
    )


def _finite(store: Readable, layer: Layer, places: Places, progress: RowsRead | None) -> NDArray[np.generic]:
    """The rows of a sample without NaN and infinite values, ``(n, d_model)``, float32 or float64."""
    finite_rows = np.empty((len(places), store.d_model), exact(store))
    used = 0
    for start, block in blocks(store, layer, places):
        fine = block[np.isfinite(block).all(axis=1)]
        finite_rows[used : used + len(fine)] = fine
        used += len(fine)
        if progress is not None:
            progress(start + len(block), len(places))
    return finite_rows[:used]


def decomposed(
    rows: NDArray[np.generic], most: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], int]:
    """Mean row, eigenvalues, directions and the power of two of finite rows ``(n, d)``.

    Eigenvalues ``(min(n, d),)``, descending, are those of rows divided by two to this power.
    """
    n, d = rows.shape
    if not n:
        return np.full(d, np.nan), np.zeros(0), np.zeros((0, d)), 0
    power = exponent(rows)
    mean = np.zeros(d)
    for part in _parts(n, d):
        mean += np.ldexp(rows[part].astype(np.float64), -power).sum(axis=0)
    mean /= n

    def centred(part: slice) -> NDArray[np.float64]:
        return np.asarray(np.ldexp(rows[part].astype(np.float64), -power) - mean)

    if d <= n:
        square = np.zeros((d, d))
        for part in _parts(n, d):
            x = centred(part)
            square += x.T @ x
    else:  # n rows are few: all of them are widened
        wide = centred(slice(None))
        square = wide @ wide.T
    values, vectors = np.linalg.eigh(square / n)
    values, vectors = values[::-1], vectors[:, ::-1]
    # Below this, an eigenvalue is rounding; constant columns whose mean is rounded have deviations of this size too.
    size = float(np.abs(mean).max(initial=0))
    noise = np.finfo(np.float64).eps * max(n, d) * max(float(values[0]) if len(values) else 0.0, size * size * 1e-13)
    values = np.where(values > noise, values, 0.0)
    leading = vectors[:, : min(most, int(np.count_nonzero(values)))]
    directions = leading.T if d <= n else leading.T @ wide
    directions = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    largest = (
        directions[np.arange(len(directions)), np.abs(directions).argmax(axis=1)]
        if directions.size
        else np.ones(len(directions))
    )
    return np.ldexp(mean, power), values, directions * np.sign(largest)[:, None], power


def _parts(n: int, d: int) -> list[slice]:
    step = max(1, _PART // max(1, d))
    return [slice(start, start + step) for start in range(0, n, step)]
