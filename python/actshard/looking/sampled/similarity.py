"""How similar layers are, on the same rows: linear CKA and cosines.

**CKA** (Kornblith et al., "Similarity of neural network representations revisited", ICML 2019) of rows X and Y of n tokens is
``HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L))`` with ``K = X X^T`` and ``L = Y Y^T``. It does not change when X is rotated, shifted or
multiplied by a number. The HSIC of that paper is biased: with fewer rows than columns, CKA of independent noise is near 1. Here it
is the unbiased estimator of Song et al. ("Feature selection via dependence maximization", JMLR 2012), the debiased CKA of the
authors' code, around 0 for independent noise, so it may be a little below 0:

    HSIC(K, L) = (1 / (n (n - 3))) sum over i != j of K'_ij L'_ij

K' is the U-centred K: without diagonal, every row and column has the sum 0. As in Nguyen et al. ("Do wide and deep networks learn
the same things?", ICLR 2021) HSIC is the mean over random minibatches of up to 512 rows. So memory does not grow with the number of
rows. With up to 512 rows there is one batch. Batches must be random: every second row of labels that alternate, or every eighth of
examples of eight tokens, would compare rows of one class or one position only.

Rows that have a NaN or infinite value in one of the layers are left out of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError, NotStoredError
from actshard.base.layers import Layer, plain, several, short
from actshard.looking.sampled.spectrum import Places, RowsRead, count_of, exact, exponent, numbers, sample
from actshard.reading.choosing import scrambled
from actshard.streaming.readable import Readable, SelectedRows
from actshard.streaming.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from actshard.streaming.readable import Readable

BATCH = 512
"""Rows whose products are made with each other."""
_LEAST = 4
"""The unbiased estimator needs more than 3 rows."""
_EQUAL = 1e-13
"""Deviations from the mean row that are rounding errors of it, relative to the largest value."""
_ZERO = 1e-24
"""A sum of squared products that is rounding errors; the largest of the rows' deviations is about 1."""
_NONE = -(1 << 14)
"""The power of two of rows that are all equal: less than that of any other."""

_Pair = tuple[Readable, Layer]


@dataclass(frozen=True, eq=False, repr=False)
class Similarity:
    """Similarity of layers on the same sample of rows. Matrices are ``(len(layers), len(other_layers))`` float64.

    Attributes:
        layers: names of the rows of the matrices.
        other_layers: names of the columns: the same layers, or those of ``other``.
        rows: rows that were used: those of the sample that are finite in every layer.
        left_out: rows of the sample with a NaN or infinite value in one layer or more.
        not_finite: ``(len(layers),)`` int64: rows of the sample with such a value, for each of :attr:`layers`.
        total: rows in the dataset that the sample was chosen from.
        seed: the seed of the sample.
        cka: debiased linear CKA: 1 for equal layers, also rotated, shifted and scaled; around 0, also below, for unrelated ones.
            NaN if a layer's rows are all equal, or if there are fewer than 4 rows.
    """

    layers: tuple[Layer, ...]
    other_layers: tuple[Layer, ...]
    rows: int
    left_out: int
    not_finite: NDArray[np.int64]
    total: int
    seed: int
    cka: NDArray[np.float64]
    _cosine: NDArray[np.float64] | None
    _mean_cosine: NDArray[np.float64] | None
    _widths: tuple[int, int]

    @property
    def cosine(self) -> NDArray[np.float64]:
        """The mean cosine of a token's rows in two layers. Rows of norm 0 are left out of it; NaN if none remain.

        Raises:
            NotStoredError: the stores have different ``d_model``.
        """
        return self._of_equal_widths(self._cosine)

    @property
    def mean_cosine(self) -> NDArray[np.float64]:
        """The cosine of two layers' mean rows. NaN if one is 0.

        Raises:
            NotStoredError: the stores have different ``d_model``.
        """
        return self._of_equal_widths(self._mean_cosine)

    def _of_equal_widths(self, matrix: NDArray[np.float64] | None) -> NDArray[np.float64]:
        if matrix is None:
            raise NotStoredError(
                f"cosine: expected rows of equal length, found d_model {self._widths[0]} and {self._widths[1]}. Use cka, which "
                "compares how tokens lie relative to each other."
            )
        return matrix

    def as_dict(self) -> dict[str, Any]:
        """JSON values: numbers, and lists for arrays. NaN is None, and so are cosines if ``d_model`` differs."""
        return {
            "layers": list(self.layers),
            "other_layers": list(self.other_layers),
            "rows": self.rows,
            "left_out": self.left_out,
            "not_finite": self.not_finite.tolist(),
            "total": self.total,
            "seed": self.seed,
            "cka": numbers(self.cka),
            "cosine": None if self._cosine is None else numbers(self._cosine),
            "mean_cosine": None if self._mean_cosine is None else numbers(self._mean_cosine),
        }

    def __repr__(self) -> str:
        names = short(self.layers, 4)
        if self.other_layers != self.layers:
            names += f" and {short(self.other_layers, 4)}"
        bad = f", {self.left_out:,} not finite left out" if self.left_out else ""
        finite = self.cka[np.isfinite(self.cka)]
        span = f"debiased linear CKA {finite.min():.3f} to {finite.max():.3f}" if finite.size else "no CKA"
        return f"<actshard.Similarity of layers {names}, {self.rows:,} of {_arguments.many(self.total, 'row')}{bad}: {span}>"


def similarity_of(
    store: Readable,
    layers: Layer | Sequence[Layer] | None,
    other: Readable | None,
    other_layers: Layer | Sequence[Layer] | None,
    rows: int,
    seed: int,
    selection: Selection,
    progress: RowsRead | None,
) -> Similarity:
    """See :meth:`~actshard.looking.sampled.SampledVerbs.similarity`."""
    _arguments.check_progress(progress)
    count, seed = count_of(rows, "rows"), _arguments.whole(seed, "seed")
    mine = _names(store, layers)
    if other is None and other_layers is not None:
        raise ArgumentError("other_layers: expected other=, the store that has them")
    theirs = mine if other is None else _names(other, other_layers, "other_layers")
    store.check_open()
    selected = selection.resolve(store, mine) if mine else SelectedRows((0, 0), store.num_examples)
    if other is not None and mine and theirs:
        _check_same(store, mine, other, theirs)
    places = sample(selected, count, seed)
    sources: list[_Pair] = [(store, name) for name in mine]
    if other is not None:
        sources += [(other, name) for name in theirs]
    sums = Compared(sources)
    for batch in minibatches(len(places), seed):
        sums.add(places[batch], lambda done: progress is not None and progress(done, len(places) * len(sources)))
    n, first = len(mine), 0 if other is None else len(mine)
    cosine, means = sums.cosines()
    part = slice(0, n), slice(first, first + len(theirs))
    return Similarity(
        layers=mine,
        other_layers=theirs,
        rows=sums.rows,
        left_out=sums.left_out,
        not_finite=sums.not_finite[:n].copy(),
        total=places.total,
        seed=seed,
        cka=np.ascontiguousarray(sums.cka()[part]),
        _cosine=None if cosine is None else np.ascontiguousarray(cosine[part]),
        _mean_cosine=None if means is None else np.ascontiguousarray(means[part]),
        _widths=(store.d_model, store.d_model if other is None else other.d_model),
    )


def minibatches(count: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Random batches of ``count`` rows, of nearly equal sizes up to :data:`BATCH`; each is ascending, as rows are read."""
    order = np.argsort(scrambled(count, f"similarity:{seed}"), kind="stable")
    batches = -(-count // BATCH)
    for number in range(batches):
        yield np.sort(order[number::batches])


def _names(store: Readable, layers: Layer | Sequence[Layer] | None, what: str = "layers") -> tuple[Layer, ...]:
    if not hasattr(store, "group_of"):
        raise ArgumentTypeError(f"other: expected a store, found {type(store).__name__}")
    return tuple(store.layers[store.group_of(x)] for x in (store.layers if layers is None else several(layers, what)))


def _check_same(store: Readable, mine: Sequence[Layer], other: Readable, theirs: Sequence[Layer]) -> None:
    """Refuses stores whose rows are not of the same tokens, as far as their counts show."""
    if store.num_examples != other.num_examples:
        raise ArgumentError(
            f"other: expected the same {_arguments.many(store.num_examples, 'example')}, found {other.num_examples}: {other.path}",
            path=store.path,
        )
    for layer in theirs if other.contents.layers_differ else theirs[:1]:
        first, second = store.tokens_in(mine[0]), other.tokens_in(layer)
        if len(differ := np.flatnonzero(first != second)):
            i = int(differ[0])
            raise NotStoredError(
                f"other: example {i} has {_arguments.many(first[i], 'token')} in layer {plain(mine[0])} and {second[i]} in "
                f"layer {plain(layer)} of "
                f"{other.path} ({_arguments.many(len(differ), 'example', 'differs', 'differ')}). Leave these examples out "
                "with filter().",
                path=store.path,
            )


class Compared:
    """Compared over minibatches from which similarities are made."""

    def __init__(self, sources: Sequence[_Pair]) -> None:
        n = len(sources)
        self._sources = sources
        self.rows = self.left_out = self._read = 0
        self.not_finite = np.zeros(n, np.int64)
        self._hsic: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []
        widths = {store.d_model for store, _ in sources}
        self._same_width = len(widths) <= 1
        self._cosines = np.zeros((n, n))
        self._counted = np.zeros((n, n), np.int64)
        # Of rows divided by a power of two, whose exponent follows.
        self._means: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []

    def add(self, places: Places, tell: Callable[[int], object]) -> None:
        """Adds a minibatch."""
        layer_rows, finite = [], np.ones(len(places), np.bool_)
        for i, (store, layer) in enumerate(self._sources):
            rows = store.gather(layer, places.examples, places.tokens, dtype=exact(store))
            fine = np.isfinite(rows).all(axis=1)
            self.not_finite[i] += len(places) - np.count_nonzero(fine)
            finite &= fine
            layer_rows.append(rows)
            self._read += len(places)
            tell(self._read)
        n = int(np.count_nonzero(finite))
        self.left_out += len(places) - n
        self.rows += n
        if not n:
            return
        exponents, spreads = np.zeros((2, len(layer_rows)), np.int64)
        units, products, sums = [], [], []
        for i, rows in enumerate(layer_rows):
            wide = rows[finite].astype(np.float64)
            exponents[i] = exponent(wide)
            wide = np.ldexp(wide, -int(exponents[i]))
            sums.append(wide.sum(axis=0))
            if self._same_width:
                units.append(_unit(wide).astype(rows.dtype))
            if n >= _LEAST:
                product, power = _products(wide)
                products.append(product)
                spreads[i] = exponents[i] + power
            layer_rows[i] = rows[:0]  # frees the layer
        if self._same_width:
            self._add_cosines(units)
            self._means.append((np.array(sums), exponents))
        if products:
            stacked = np.array(products)
            # Weighted by rows: the last batches have one row less.
            self._hsic.append((stacked @ stacked.T * (2 / (n - 3)), spreads))

    def _add_cosines(self, units: list[NDArray[np.floating]]) -> None:
        nonzero = [np.any(x != 0, axis=1) for x in units]
        for i, unit in enumerate(units):
            for j in range(i, len(units)):
                total = float(np.einsum("nd,nd->", unit, units[j], dtype=np.float64))
                self._cosines[i, j] += total
                self._counted[i, j] += np.count_nonzero(nonzero[i] & nonzero[j])

    def cka(self) -> NDArray[np.float64]:
        """The matrix of all sources."""
        n = len(self._sources)
        if not self._hsic:
            return np.full((n, n), np.nan)
        top = np.max([powers for _, powers in self._hsic], axis=0)
        total = np.zeros((n, n))
        for hsic, powers in self._hsic:
            down = 2 * np.minimum(powers - top, 0)
            total += np.ldexp(hsic, down[:, None] + down[None, :])
        diagonal = np.diag(total).copy()
        diagonal = np.where(diagonal > _ZERO, diagonal, np.nan)
        matrix = total / np.sqrt(diagonal[:, None] * diagonal[None, :])
        matrix = (matrix + matrix.T) / 2
        matrix[np.diag_indices(n)] = np.where(np.isfinite(diagonal), 1.0, np.nan)
        return np.asarray(np.clip(matrix, -1, 1))

    def cosines(self) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
        """Mean cosines of rows, and cosines of mean rows; None for rows of different lengths."""
        if not self._same_width:
            return None, None
        n = len(self._sources)
        with np.errstate(invalid="ignore"):
            rows = self._cosines / np.where(self._counted > 0, self._counted, np.nan)
        rows = np.triu(rows) + np.triu(rows, 1).T
        if not self._means:
            return rows, np.full((n, n), np.nan)
        top = np.max([powers for _, powers in self._means], axis=0)
        mean = sum(np.ldexp(sums, np.minimum(powers - top, 0)[:, None]) for sums, powers in self._means)
        unit = _unit(np.asarray(mean))
        matrix = unit @ unit.T
        zero = ~unit.any(axis=1)
        matrix[zero] = np.nan
        matrix[:, zero] = np.nan
        return np.clip(rows, -1, 1), np.clip(matrix, -1, 1)


def _products(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """The U-centred products of rows with each other, and the power of two that rows were divided by. Changes its argument."""
    rows -= rows.mean(axis=0)  # U-centring would do it; this way little is lost to rounding
    if np.abs(rows).max(initial=0) <= _EQUAL:
        return np.zeros(len(rows) * (len(rows) - 1) // 2), _NONE
    power = exponent(rows)
    rows = np.ldexp(rows, -power)
    return _upper(u_centred(rows @ rows.T)), power


def u_centred(products: NDArray[np.float64]) -> NDArray[np.float64]:
    """A symmetric matrix ``(n, n)``, n above 3, without diagonal, such that its rows have the sum 0. Changes its argument."""
    n = len(products)
    products[np.diag_indices(n)] = 0
    sums = products.sum(axis=1)
    products -= sums[:, None] / (n - 2)
    products -= sums[None, :] / (n - 2)
    products += sums.sum() / ((n - 1) * (n - 2))
    products[np.diag_indices(n)] = 0
    return products


def _upper(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values above the diagonal, flat."""
    n = len(matrix)
    return np.concatenate([matrix[i, i + 1 :] for i in range(n - 1)])


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows of length 1; those of length 0 stay."""
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0)
    rows = rows / np.where(largest > 0, largest, 1)
    size = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(size > 0, size, 1))
