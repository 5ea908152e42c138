"""How well a linear probe separates labels in each layer, on held-out examples.

The probe is a ridge classifier: regression of -1 and +1 for each class, on columns standardized by the training examples. Training
examples of each class have the same total weight. The penalty is the one of nine whose generalized cross-validation error on the
training examples is least (Golub, Heath and Wahba, 1979); one decomposition of the products of rows serves all nine. So there is
nothing to set and nothing random but the split, which a seed fixes.

Balanced accuracy is the mean over classes of the share of their held-out examples that are named right: chance is 1 / classes,
whatever the sizes of the classes.

Labels of tokens, such as saev's patch labels, are one value per content token: the sample has tokens, and those of an example are
all held out, or all used to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, ArgumentTypeError
from actshard.base.layers import Layer, plain, several
from actshard.looking.sampled.spectrum import Places, RowsRead, blocks, count_of, exact, exponent, numbers, sample
from actshard.reading.choosing import scrambled
from actshard.streaming.readable import Readable, SelectedRows
from actshard.streaming.selection import Selection, stored_tokens

CLASSES = 100
"""Most classes of a label."""
_PENALTIES = 10.0 ** np.arange(-4, 5)
"""Relative to the mean eigenvalue."""
_STEP = 1 << 16
"""Rows of whole examples that are listed at a time."""


@dataclass(frozen=True, eq=False, repr=False)
class Separability:
    """Balanced accuracy of a linear probe for each layer, on held-out examples. Arrays are ``(len(layers),)``.

    Attributes:
        layers: names of the layers.
        label: the name of the column; empty if values were given.
        classes: the values of the label, in the order of their texts.
        train, test: ``(classes,)`` int64: examples of each class that the probe is fitted to, and that it is measured on.
        accuracy: float64: balanced accuracy, 0 to 1. NaN if NaN and infinite values leave a class without examples.
        error: float64: the standard error of the accuracy from the number of held-out examples, with one right and one wrong
            example added to each class: so it is not 0 where all are right.
        not_finite: int64: examples left out because their row has a NaN or infinite value in this layer.
        unlabelled: examples of the sample that were left out: their label is null or NaN, or its class has one example only, or
            they have no tokens.
        examples: examples that were used: those in ``train`` and ``test``.
        total: examples in the dataset.
        pool: ``"last"``, ``"mean"``, or ``"token"`` for labels of tokens. Then examples are counted as tokens everywhere above,
            and ``error`` is too small where tokens of one example resemble each other.
        seed: the seed of the sample and of the split.
    """

    layers: tuple[Layer, ...]
    label: str
    classes: tuple[Any, ...]
    train: NDArray[np.int64]
    test: NDArray[np.int64]
    accuracy: NDArray[np.float64]
    error: NDArray[np.float64]
    not_finite: NDArray[np.int64]
    unlabelled: int
    examples: int
    total: int
    pool: str
    seed: int

    @property
    def chance(self) -> float:
        """The balanced accuracy of guessing: 1 / classes."""
        return 1 / len(self.classes)

    @property
    def best(self) -> Layer | None:
        """The layer of the highest accuracy, the first of equal ones; None if no layer has one."""
        if not np.isfinite(self.accuracy).any():
            return None
        return self.layers[int(np.nanargmax(self.accuracy))]

    def as_dict(self) -> dict[str, Any]:
        """JSON values: numbers, and lists for arrays. NaN is None. Classes that JSON does not have are texts."""
        plain_classes = [x if isinstance(x, str | int | float | bool) else str(x) for x in self.classes]
        return {
            "layers": list(self.layers),
            "label": self.label,
            "classes": plain_classes,
            "train": self.train.tolist(),
            "test": self.test.tolist(),
            "accuracy": numbers(self.accuracy),
            "error": numbers(self.error),
            "chance": self.chance,
            "not_finite": self.not_finite.tolist(),
            "unlabelled": self.unlabelled,
            "examples": self.examples,
            "total": self.total,
            "pool": self.pool,
            "seed": self.seed,
        }

    def __repr__(self) -> str:
        what = f"{self.label:.40}, " if self.label else ""
        best = "no layer has an accuracy"
        if self.best is not None:
            i = int(np.nanargmax(self.accuracy))
            best = f"best in layer {plain(self.best):.80}: {self.accuracy[i]:.3f} ± {self.error[i]:.3f}"
        return (
            f"<actshard.Separability of {what}{len(self.classes)} classes, {self.examples:,} of "
            f"{_arguments.many(self.total, 'example')}, "
            f"{_arguments.many(len(self.layers), 'layer')}: {best} (balanced accuracy, chance {self.chance:.3f})>"
        )


def separability_of(
    store: Readable,
    label: object,
    layers: object,
    pool: object,
    examples: int,
    test: float,
    seed: int,
    selection: Selection,
    progress: RowsRead | None,
) -> Separability:
    """See :meth:`~actshard.looking.sampled.SampledVerbs.separability`."""
    _arguments.check_progress(progress)
    count, seed = count_of(examples, "examples", 4), _arguments.whole(seed, "seed")
    if not _arguments.is_one_of(pool, ("last", "mean")):
        raise ArgumentError(f'pool: expected "last" or "mean", found {pool!r:.80}')
    if isinstance(test, bool) or not isinstance(test, int | float | np.number) or not 0 < test < 1:
        raise ArgumentError(f"test: expected a share between 0 and 1, found {test!r:.80}")
    names = tuple(store.layers[store.group_of(x)] for x in (store.layers if layers is None else several(layers)))
    store.check_open()
    table = _of_tokens(store, names, label)
    if table is not None and pool != "last":
        raise ArgumentError(f"pool: labels of tokens are not pooled, found {pool!r:.80}. Leave pool= out.")
    rows = selection.resolve(store, names) if names else SelectedRows((0, 0), store.num_examples)
    what = label if isinstance(label, str) else ""
    if table is None:
        places = sample(rows.last(), count, seed)
        values = values_of(store, label, places.examples)
    else:
        places, pool = sample(rows, count, seed), "token"
        if (places.tokens < store.special_tokens).any():
            raise ArgumentError(f"tokens: special tokens have no labels, found {selection.tokens!r}")
        values = _plain(table[places.examples, places.tokens - store.special_tokens].tolist())
    sampled = min(count, store.num_examples if table is None else places.total)
    classes, codes = _classes(store, values, what, "tokens" if pool == "token" else "examples")
    split = (
        _split(codes, float(test), seed)
        if table is None
        else _split_examples(codes, places.examples, float(test), seed)
    )
    classes, codes, split = _with_both(classes, codes, split)
    used = np.flatnonzero(split >= 0)
    places, codes, held_out = places[used], codes[used], split[used] == 1
    scores = np.full((2, len(names)), np.nan)
    bad = np.zeros(len(names), np.int64)
    for i, name in enumerate(names):
        features = _features(store, name, places, pool, rows)
        fine = np.isfinite(features).all(axis=1)
        bad[i] = len(fine) - np.count_nonzero(fine)
        scores[:, i] = _score(features[fine], codes[fine], held_out[fine], len(classes))
        if progress is not None:
            progress((i + 1) * len(places), len(places) * len(names))
    return Separability(
        layers=names,
        label=what,
        classes=classes,
        train=np.bincount(codes[~held_out], minlength=len(classes)),
        test=np.bincount(codes[held_out], minlength=len(classes)),
        accuracy=scores[0],
        error=scores[1],
        not_finite=bad,
        unlabelled=sampled - len(places),
        examples=len(places),
        total=store.num_examples if table is None else places.total,
        pool=pool,
        seed=seed,
    )


def values_of(store: Readable, label: Any, examples: NDArray[np.int64]) -> list[object]:
    """The values of a label for some examples, as Python values; null and NaN are None."""
    if isinstance(label, str):
        column = store.read_columns([label], examples).column(0).to_pylist()
    else:
        if not hasattr(label, "__len__"):
            raise ArgumentTypeError(f"label: expected a column's name or one value per example, found {label!r:.80}")
        if len(label) != store.num_examples:
            raise ArgumentError(f"label: expected {store.num_examples} values, one per example, found {len(label)}")
        labels = label.to_pylist() if hasattr(label, "to_pylist") else list(label)
        column = [labels[i] for i in examples.tolist()]
    return _plain(column)


def _plain(values: list[object]) -> list[object]:
    """numpy's scalars as Python's, and NaN as None."""
    values = [x.item() if isinstance(x, np.generic) else x for x in values]
    return [None if isinstance(x, float) and math.isnan(x) else x for x in values]


def _of_tokens(store: Readable, layers: Sequence[Layer], label: object) -> NDArray[np.generic] | None:
    """Labels with a row per example and a column per content token; None for other labels."""
    if isinstance(label, str) or getattr(label, "ndim", 1) != 2:
        return None
    table = np.asarray(label)
    stored = stored_tokens(store, layers) if layers else np.zeros(0, np.int64)
    counts = stored - np.minimum(stored, store.special_tokens)
    least, most = int(counts.min(initial=1 << 62)), int(counts.max(initial=0))
    # Of examples of different lengths, a table has columns beyond a row's tokens.
    fits = table.shape[1] == most if least == most else table.shape[1] >= most
    if len(table) != store.num_examples or not (fits or not len(counts)):
        raise ArgumentError(
            f"label: expected labels of {_arguments.many(store.num_examples, 'example')} and "
            f"{_arguments.many(most, 'content token')}, found shape {table.shape}"
        )
    return table


def _classes(
    store: Readable, values: list[object], label: str, what: str
) -> tuple[tuple[object, ...], NDArray[np.int64]]:
    """The classes with two members or more, and the class of each value; -1 without."""
    name = f" {label!r:.60}" if label else ""
    sizes: dict[object, int] = {}
    for value in values:
        if isinstance(value, list | dict | np.ndarray):
            raise ArgumentTypeError(f"label{name}: expected one value per example, found a {type(value).__name__}")
        if value is not None:
            sizes[value] = sizes.get(value, 0) + 1
    classes = sorted((value for value, n in sizes.items() if n >= 2), key=lambda x: (str(type(x)), x))
    if len(classes) < 2:
        raise ArgumentError(
            f"label{name}: expected at least two classes of two {what}, found {len(classes)} such classes among "
            f"{len(sizes)} different values in {len(values)} {what}",
            path=store.path,
        )
    if len(classes) > CLASSES:
        raise ArgumentError(
            f"label{name}: expected at most {CLASSES} classes, found {len(sizes)} different values in {len(values)} {what}",
            path=store.path,
        )
    number = {value: i for i, value in enumerate(classes)}
    return tuple(classes), np.array([-1 if x is None else number.get(x, -1) for x in values], np.int64)


def _split(codes: NDArray[np.int64], test: float, seed: int) -> NDArray[np.int8]:
    """1 for held-out examples, 0 for those to fit, -1 for those without class: the share of each class, at least one of each."""
    sides = np.full(len(codes), -1, np.int8)
    order = np.argsort(scrambled(len(codes), f"separability:{seed}"), kind="stable")
    for code in range(int(codes.max(initial=-1)) + 1):
        members = order[codes[order] == code]
        n = min(max(round(test * len(members)), 1), len(members) - 1)
        sides[members[:n]] = 1
        sides[members[n:]] = 0
    return sides


def _split_examples(codes: NDArray[np.int64], examples: NDArray[np.int64], test: float, seed: int) -> NDArray[np.int8]:
    """As :func:`_split`, for tokens: all of an example's tokens are held out, or none."""
    names = np.unique(examples[codes >= 0])
    owner = np.minimum(np.searchsorted(names, examples), len(names) - 1)
    order = np.argsort(scrambled(len(names), f"separability:{seed}"), kind="stable")
    held_out = np.zeros(len(names), np.int8)
    held_out[order[: min(max(round(test * len(names)), 1), len(names) - 1)]] = 1
    return np.where(codes >= 0, held_out[owner], np.int8(-1)).astype(np.int8)


def _with_both(
    classes: tuple[object, ...], codes: NDArray[np.int64], split: NDArray[np.int8]
) -> tuple[tuple[object, ...], NDArray[np.int64], NDArray[np.int8]]:
    """Leaves out classes without members to fit, or without held-out ones."""
    n = len(classes)
    counts = [np.bincount(codes[split == side], minlength=n) for side in (0, 1)]
    common_classes = np.flatnonzero((counts[0] > 0) & (counts[1] > 0))
    if len(common_classes) < 2:
        raise ArgumentError(
            "label: expected two classes with both training and held-out examples, found "
            f"{len(common_classes)}. Classes of tokens must occur in several examples."
        )
    number = np.full(n + 1, -1, np.int64)  # the last entry is that of code -1
    number[common_classes] = np.arange(len(common_classes))
    codes = number[codes]
    return tuple(classes[i] for i in common_classes), codes, np.where(codes >= 0, split, np.int8(-1)).astype(np.int8)


def _features(store: Readable, layer: Layer, places: Places, pool: str, rows: SelectedRows) -> NDArray[np.generic]:
    """A row per place, ``(n, d_model)``: the token's own, or the mean of the example's selected rows."""
    features = np.empty((len(places), store.d_model), np.float64 if pool == "mean" else exact(store))
    if pool != "mean":
        for start, block in blocks(store, layer, places):
            features[start : start + len(block)] = block
        return features
    firsts, ends = rows.before[places.examples], rows.before[places.examples + 1]
    for part in _whole_examples(ends - firsts):
        counts = (ends - firsts)[part]
        offsets = np.cumsum(counts) - counts
        row_numbers = np.arange(int(counts.sum())) - np.repeat(offsets - firsts[part], counts)
        sums = np.zeros((len(counts), store.d_model))
        owner = np.repeat(np.arange(len(counts)), counts)
        every = Places(*rows.locate(row_numbers), 0)
        with np.errstate(over="ignore", invalid="ignore"):
            for start, block in blocks(store, layer, every):
                theirs = owner[start : start + len(block)]
                cuts = np.flatnonzero(np.diff(theirs, prepend=-1))
                sums[theirs[cuts]] += np.add.reduceat(block, cuts, axis=0, dtype=np.float64)
            features[part] = sums / counts[:, None]
    return features


def _whole_examples(counts: NDArray[np.int64]) -> Iterator[slice]:
    """Ranges of examples with about 65,536 tokens or fewer together."""
    start, ends = 0, np.cumsum(counts)
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _STEP, side="right")))
        yield slice(start, stop)
        start = stop


def _score(
    rows: NDArray[np.generic], codes: NDArray[np.int64], held_out: NDArray[np.bool_], classes: int
) -> tuple[float, float]:
    """Balanced accuracy on the held-out rows, and its standard error."""
    fitted, tested = np.bincount(codes[~held_out], minlength=classes), np.bincount(codes[held_out], minlength=classes)
    if not (fitted.all() and tested.all()):
        return float("nan"), float("nan")
    wide = np.ldexp(rows.astype(np.float64), -exponent(rows))
    predictions = predicted(wide[~held_out], codes[~held_out], wide[held_out], classes)
    right = np.bincount(codes[held_out][predictions == codes[held_out]], minlength=classes)
    share = (right + 1) / (tested + 2)
    return float((right / tested).mean()), float(np.sqrt((share * (1 - share) / tested).sum()) / classes)


def predicted(
    train: NDArray[np.float64], codes: NDArray[np.int64], test: NDArray[np.float64], classes: int
) -> NDArray[np.int64]:
    """The class that the probe names for each row of ``test``; of equal scores the first."""
    weights = 1 / np.bincount(codes, minlength=classes)[codes] / classes  # their sum is 1
    mean = weights @ train
    centred = train - mean
    deviation = np.sqrt(weights @ centred**2)
    # A column that is constant up to rounding has no information, and its deviation would amplify rounding errors.
    varying = deviation > 1e-12 * (np.abs(mean) + deviation.max(initial=0))
    if not varying.any():
        return np.zeros(len(test), np.int64)
    x, z = centred[:, varying] / deviation[varying], (test[:, varying] - mean[varying]) / deviation[varying]
    targets = np.where(codes[:, None] == np.arange(classes), 1.0, -1.0)
    middle = weights @ targets
    root = np.sqrt(weights)[:, None]
    x, y = x * root, (targets - middle) * root
    n, d = x.shape
    if d <= n:
        values, v = np.linalg.eigh(x.T @ x)
        values = np.maximum(values, 0)
        u_y = v.T @ (x.T @ y)  # sqrt(values) times the targets in the basis of left singular vectors

        def solve(penalty: float) -> NDArray[np.float64]:
            return np.asarray(v @ (u_y / (values + penalty)[:, None]))
    else:
        values, u = np.linalg.eigh(x @ x.T)
        values = np.maximum(values, 0)
        turned = u.T @ y

        def solve(penalty: float) -> NDArray[np.float64]:
            return np.asarray(x.T @ (u @ (turned / (values + penalty)[:, None])))

    size = float(values.sum()) / max(len(values), 1)
    best, least = _PENALTIES[-1] * size, np.inf
    for penalty in _PENALTIES * size:
        residual_share = 1 - (float((values / (values + penalty)).sum()) + 1) / n  # one more for the mean
        error = float(((y - x @ solve(penalty)) ** 2).sum()) / residual_share**2 if residual_share > 0 else np.inf
        if error < least:
            best, least = penalty, error
    return np.asarray(np.argmax(z @ solve(best) + middle, axis=1))
