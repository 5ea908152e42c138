"""Statistics of a layer's rows.

``summary``: norms, positions, the largest, repeated rows, and findings in words.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._arguments import many
from actshard.base.layers import Layer, listing, plain
from actshard.looking.stats.summary import (
    Advice,
    LargestColumn,
    LargestRow,
    Norms,
    NormsByPosition,
    Repeats,
    Summary,
    cut,
)

MASSIVE = 100
"""Times the median from which a row or a column counts as massive."""
CENTRE = 1.0
"""The gamma from which centring is advised."""
OUTLIER = 20
"""Times the median dimension's root mean square from which a dimension is an outlier."""
SINK = 10
"""Times the median norm from which the mean norm of first tokens is a finding."""
_REPEATED = 0.01
"""The fraction of repeated rows from which it is a finding."""
NEARLY = 1e-6
"""Columns with a standard deviation below this share of the median column's are nearly constant."""
_SHOWN = 3
_STANDARDIZE = ("Standardize dimensions, or leave these out.", "center=stats.mean, scale=stats.inverse_std")
"""What to do about large dimensions."""
_EQUAL_ROWS = (
    "Leave the layer out. Embeddings of one token are equal (layer 0 of last tokens); otherwise check the hook."
)
"""What to do about a layer of equal rows."""
FLOATS = ("mean", "variance", "min", "max")
"""Names of the float64 arrays of statistics."""
COUNTS = ("nan", "inf", "zeros")
"""Names of the int64 arrays of statistics."""

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
        mean_norm: mean L2 norm of the rows whose norms are finite in float64; NaN without such rows.
        zeros: int64 counts of values equal to 0.
        summary: what the properties below are made of.
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
    zeros: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    summary: Summary = field(default_factory=Summary)

    @property
    def std(self) -> NDArray[np.float64]:
        """Square root of the variance, float64.

        ``stream(scale=)`` multiplies and refuses this array: pass :attr:`inverse_std` to standardize rows.
        """
        deviation: NDArray[np.float64] = np.sqrt(self.variance)
        _DEVIATIONS[id(deviation)] = deviation
        return deviation

    @property
    def inverse_std(self) -> NDArray[np.float64]:
        """``1 / std``, float64; 1 for a column without variance.

        ``store.stream(..., center=stats.mean, scale=stats.inverse_std)`` yields columns with mean 0 and variance 1.
        """
        std = np.sqrt(self.variance)
        factors: NDArray[np.float64] = 1 / np.where(std > 0, std, 1.0)
        return factors

    @property
    def norms(self) -> Norms:
        """The histogram of the rows' L2 norms, and their quantiles."""
        return Norms.of(self.summary.norm_bins)

    @property
    def norms_by_position(self) -> NormsByPosition:
        """Mean and quantiles of norms by the token's position in the example."""
        return NormsByPosition.of(self.summary.positions, self.summary.bands)

    @property
    def largest_rows(self) -> tuple[LargestRow, ...]:
        """The 16 rows of the largest finite norms, the largest first; of equal ones the first in the dataset."""
        return tuple(LargestRow(*record) for record in self.summary.largest_rows)

    @property
    def largest_columns(self) -> tuple[LargestColumn, ...]:
        """The 16 columns of the largest finite magnitudes, the largest first."""
        return tuple(LargestColumn(*record) for record in self.summary.largest_columns)

    @property
    def massive_rows(self) -> tuple[LargestRow, ...]:
        """Those of :attr:`largest_rows` whose norm is over 100 times the median norm, such as attention sinks."""
        bound = MASSIVE * self.norms.median
        return tuple(row for row in self.largest_rows if row.norm > bound > 0)

    @property
    def massive_columns(self) -> tuple[LargestColumn, ...]:
        """Those of :attr:`largest_columns` whose magnitude is over 100 times the median column's root mean square.

        Source: Sun et al., "Massive Activations in Large Language Models", 2024, who use the median magnitude.
        """
        size = self.rms
        bound = MASSIVE * float(np.median(size)) if len(size) else np.nan
        return tuple(column for column in self.largest_columns if column.magnitude > bound > 0)

    @property
    def repeats(self) -> Repeats:
        """Rows that equal another one."""
        return self.summary.repeats

    @property
    def rms(self) -> NDArray[np.float64]:
        """The root mean square of each column's finite values, float64; 0 without any."""
        return np.asarray(np.sqrt(np.nan_to_num(self.mean) ** 2 + np.nan_to_num(self.variance)))

    @property
    def gamma(self) -> float:
        """The norm of the mean row relative to the norm of the standard deviations: ``|mean| / |std|``. NaN if no column varies.

        Above 1, most of a row is the same in all rows: an SAE trained on such rows has dead features unless they are centred first
        (arXiv 2605.31518). ``store.stream(..., center=stats.mean)`` does.
        """
        spread = float(np.sqrt(np.nansum(self.variance)))
        return float(np.linalg.norm(np.nan_to_num(self.mean))) / spread if spread > 0 else float("nan")

    def findings(self) -> list[str]:
        """What a person should know before training on these rows, with what to do. Empty if nothing is odd."""
        return [str(advice) for advice in self.advice()]

    def advice(self) -> list[Advice]:
        """The :meth:`findings` in parts: severity, text, what to do."""
        return list(_advice(self))

    def __repr__(self) -> str:
        bad = int(self.nan.sum()), int(self.inf.sum())
        return (
            f"<actshard.Stats of {many(self.rows, 'row')} of {len(self.mean)}: mean norm {self.mean_norm:.6g}, "
            f"{bad[0]} NaN and {many(bad[1], 'infinite value')}>"
        )

    def as_plain(self) -> dict[str, object]:
        """JSON values, from which :meth:`of_plain` makes equal statistics; infinite and NaN values are texts."""
        counts = {name: getattr(self, name).tolist() for name in COUNTS}
        return {**self.as_scalars(), **counts, **{name: _texts(getattr(self, name)) for name in FLOATS}}

    def as_scalars(self) -> dict[str, Any]:
        """:meth:`as_plain` without the arrays named in :data:`FLOATS` and :data:`COUNTS`."""
        norm = _texts(np.float64(self.mean_norm))
        return {"layer": self.layer, "rows": self.rows, "mean_norm": norm, **self.summary.as_plain()}

    @classmethod
    def of_plain(cls, fields: dict[str, Any]) -> Stats:
        """The statistics of :meth:`as_plain`.

        Raises:
            LookupError, TypeError, ValueError: the values are no statistics.
        """
        stats = cls(
            rows=int(fields["rows"]),
            mean=np.array(fields["mean"], np.float64),
            variance=np.array(fields["variance"], np.float64),
            min=np.array(fields["min"], np.float64),
            max=np.array(fields["max"], np.float64),
            nan=np.array(fields["nan"], np.int64),
            inf=np.array(fields["inf"], np.int64),
            mean_norm=float(fields["mean_norm"]),
            layer=fields["layer"],
            zeros=np.array(fields["zeros"], np.int64),
            summary=Summary.of_plain(fields),
        )
        shapes = {
            x.shape for x in (stats.mean, stats.variance, stats.min, stats.max, stats.nan, stats.inf, stats.zeros)
        }
        if len(shapes) > 1 or stats.mean.ndim != 1:
            raise ValueError(f"expected one value per column, found {shapes}")
        if not 0 <= stats.rows < 1 << 43 or any(column.column >= len(stats.mean) for column in stats.largest_columns):
            raise ValueError(f"expected a number of rows and columns below {len(stats.mean)}")
        return stats

    @classmethod
    def of(cls, sums: dict[str, Any], layer: Layer | None = None) -> Stats:
        """Builds the statistics of a layer from the sums that the Rust core returns."""
        finite = sums["finite"]
        has_values = finite > 0
        n = np.where(has_values, finite, 1)
        total, count = sums["norms"]
        return cls(
            rows=sums["rows"],
            mean=np.where(has_values, sums["mean"], np.nan),
            variance=np.where(has_values, sums["squares"] / n, np.nan),
            min=sums["min"],
            max=sums["max"],
            nan=sums["nan"],
            inf=sums["infinite"],
            mean_norm=total / count if count else float("nan"),
            layer=layer,
            zeros=sums["zeros"],
            summary=Summary.of(sums),
        )


def _advice(stats: Stats) -> Iterator[Advice]:
    if not stats.rows:
        yield Advice("note", "", "has no rows.", kind="empty")
        return
    for what, counts in (("NaN", stats.nan), ("infinite", stats.inf)):
        if n := int(counts.sum()):
            wide = int(np.count_nonzero(counts))
            text = f"{many(n, f'{what} value')} in {wide:,} of {many(len(counts), 'dimension')}. One makes a batch's loss NaN."
            do = "actshard verify --deep names the rows. Extract them again, or leave them out."
            yield Advice("error", "", text, do, 'max_norm=float("inf")', what, n)
    if (gamma := stats.gamma) > CENTRE:
        text = (
            f"gamma is {gamma:.2g}: the mean of rows is longer than their spread. Features of a sparse autoencoder die."
        )
        yield Advice("warning", "", text, "Centre before training.", "center=stats.mean", "gamma", gamma)
    yield from _constant(stats)
    yield from _nearly_constant(stats)
    if columns := stats.massive_columns:
        median = float(np.median(stats.rms))
        descriptions = (
            f"{c.column} ({c.magnitude:.4g} at example {c.example}, token {c.token})" for c in columns[:_SHOWN]
        )
        shown = ", ".join(descriptions)
        times = columns[0].magnitude / median
        text = (
            f"{many(len(columns), 'massive dimension')}: {shown}{_more(len(columns))}. The largest value is {times:,.0f} times the "
            "median dimension's root mean square. It dominates norms and losses."
        )
        begin = _first_token(stats)
        first = len(columns) > 1 and all(c.token == begin for c in columns)
        do, code = ("All are in first tokens: leave these out.", f"min_token={begin + 1}") if first else _STANDARDIZE
        yield Advice("warning", "", text, do, code, "massive dimensions", times)
    yield from _outliers(stats)
    yield from _massive_rows(stats)
    yield from _repeated(stats)


def _outliers(stats: Stats) -> Iterator[Advice]:
    """Dimensions of a large root mean square that are not massive."""
    rms = stats.rms
    median = float(np.median(rms)) if len(rms) else 0.0
    massive = {column.column for column in stats.massive_columns}
    outliers = [
        int(k) for k in np.argsort(-rms, kind="stable")[: np.count_nonzero(rms > OUTLIER * median)] if k not in massive
    ]
    if not outliers or not median > 0:
        return
    times = float(rms[outliers[0]]) / median
    shown = ", ".join(map(str, outliers[:_SHOWN])) + _more(len(outliers))
    text = (
        f"{many(len(outliers), 'outlier dimension')}: {shown}. {'It' if len(outliers) == 1 else 'The largest'} has {times:,.0f} "
        "times the median dimension's root mean square. It dominates norms and losses."
    )
    yield Advice("warning", "", text, *_STANDARDIZE, "outlier dimensions", times)


def _constant(stats: Stats) -> Iterator[Advice]:
    """Columns that are always 0, and other columns with one value."""
    same, bad = stats.min == stats.max, stats.nan + stats.inf
    if same.all() and stats.rows > 1 and not bad.any():
        text = f"all {stats.rows:,} rows are equal, and contain no information."
        yield Advice("warning", "", text, _EQUAL_ROWS, kind="equal rows")
        return
    several = stats.rows - bad > 1
    for what, columns in (("always 0", same & (stats.min == 0)), ("constant", same & several & (stats.min != 0))):
        indices = np.flatnonzero(columns)
        if not len(indices):
            continue
        but = ", apart from NaN and infinite values" if bad[indices].any() else ""
        shown = ", ".join(map(str, indices[:_SHOWN].tolist()))
        are = "is" if len(indices) == 1 else "are"
        text = f"{len(indices):,} of {many(len(columns), 'dimension')} {are} {what}{but}: {shown}{_more(len(indices))}."
        yield Advice("warning", "", text, "Check the hook that recorded the activations.", kind=what, size=len(indices))


def _nearly_constant(stats: Stats) -> Iterator[Advice]:
    """Columns whose small variance would become as large as that of the others."""
    std = np.sqrt(np.nan_to_num(stats.variance))
    varied = std > 0
    if not varied.any():
        return
    median = float(np.median(std[varied]))
    indices = np.flatnonzero(varied & (std < NEARLY * median))
    if not len(indices):
        return
    shown = ", ".join(f"{k} ({std[k]:.2g})" for k in indices[:_SHOWN].tolist())
    are = "is" if len(indices) == 1 else "are"
    text = (
        f"{len(indices):,} of {many(len(std), 'dimension')} {are} nearly constant: {shown}{_more(len(indices))}. The median "
        f"dimension's standard deviation is {median:.2g}. Standardizing makes their noise as large as the others."
    )
    code = f"divide=np.fmax(stats.std, {NEARLY * median:.2g})"
    yield Advice("warning", "", text, "Limit the factor, or leave these out.", code, "nearly constant", len(indices))


def _first_token(stats: Stats) -> int:
    """The first token that rows have: 1 after a special token at 0. -1: one position only, or a range of several at first."""
    positions = stats.norms_by_position
    return int(positions.first[0]) if len(positions.first) > 1 and positions.end[0] == positions.first[0] + 1 else -1


def _massive_rows(stats: Stats) -> Iterator[Advice]:
    """Massive rows, or first tokens of large norms: attention sinks."""
    median, rows, positions = stats.norms.median, stats.massive_rows, stats.norms_by_position
    begin = _first_token(stats)
    leave_out = f"min_token={begin + 1}"
    if rows:
        shown = ", ".join(f"example {r.example} token {r.token} (norm {r.norm:.4g})" for r in rows[:_SHOWN])
        first = len(rows) > 1 and all(row.token == begin for row in rows)
        # Rows of whole bins above the bound: 16 rows are kept, but all are counted.
        n = max(len(rows), int(stats.norms.counts[stats.norms.edges[:-1] > MASSIVE * median].sum()))
        sinks = " All are first tokens: attention sinks." if first else ""
        text = f"{many(n, 'massive row')}, over {MASSIVE} times the median norm: {shown}{_more(n)}.{sinks}"
        option = leave_out if first else 'max_norm="10x median"'
        yield Advice("warning", "", text, f"Leave {'it' if n == 1 else 'them'} out.", option, "massive rows", n)
        if first:
            return
    if begin < 0 or not median > 0:
        return
    # Without massive rows: a single one would raise the mean enough.
    massive = [row.norm for row in rows if row.token == begin]
    other_count = int(positions.rows[0]) - len(massive)
    times = (float(positions.mean[0] * positions.rows[0]) - sum(massive)) / max(other_count, 1) / median
    if times > SINK:
        text = f"first tokens have {times:,.0f} times the median norm on average: attention sinks. They dominate norms and losses."
        yield Advice("warning", "", text, "Leave them out.", leave_out, "sinks", times)


def _repeated(stats: Stats) -> Iterator[Advice]:
    repeats, positions = stats.repeats, stats.norms_by_position
    if not repeats.repeated or repeats.least < _REPEATED or (stats.min == stats.max).all():
        return
    rows = "rows" if stats.norms.rows == stats.rows else "rows with finite norms"
    share = (
        f"{repeats.fraction:.2%}"
        if repeats.exact
        else f"about {repeats.fraction:.0%} (± {max(repeats.error, 0.01):.0%})"
    )
    text = f"{share} of the {rows} equal an earlier row. Common prefixes and token embeddings often do."
    # As many as there are first tokens, such as BOS, which are equal in all examples.
    firsts = int(positions.rows[0]) if len(positions.first) > 1 and positions.first[0] == 0 else 0
    natural = stats.layer == 0 or repeats.least <= firsts / stats.norms.rows + _REPEATED
    severity = "note" if natural else "warning"
    size = repeats.fraction if repeats.exact else 0.0  # no layer is the worst within the error
    yield Advice(severity, "", text, "Look for repeated texts and padding.", kind="repeats", size=size)


def _more(n: int) -> str:
    return " and others" if n > _SHOWN else ""


def _texts(values: NDArray[np.float64] | np.float64) -> object:
    """Numbers as JSON values."""
    numbers = np.atleast_1d(values).tolist()
    plain = [x if np.isfinite(x) else str(x) for x in numbers]
    return plain if np.ndim(values) else plain[0]


# Findings about several layers: those of each, joined, and those of layers compared with each other.


_NORMS = 10.0
"""Layers whose median norms differ by more than this factor need scaling when they are trained on together."""
_JOINED = 3
"""From this many layers on, findings of one kind are one finding."""


def advice_of(stats_by_layer: Mapping[Layer, Stats]) -> list[Advice]:
    """The findings of some layers, with the layer in ``where``."""
    layer_advice = [(layer, advice) for layer, stats in stats_by_layer.items() for advice in stats.advice()]
    return [*together(layer_advice), *_between(stats_by_layer)]


def together(layer_advice: Sequence[tuple[Layer, Advice]]) -> list[Advice]:
    """Joins advice of one kind about several layers: it names all of them, and describes the worst."""
    kinds: dict[tuple[str, str], list[tuple[Layer, Advice]]] = {}
    for layer, advice in layer_advice:
        kinds.setdefault((advice.kind, advice.severity), []).append((layer, advice))
    advice_list = []
    for group in kinds.values():
        if len(group) < _JOINED:
            advice_list += [replace(advice, where=f"layer {cut(plain(layer), 60)}") for layer, advice in group]
            continue
        layer, worst = max(group, key=lambda pair: pair[1].size)
        names = cut(listing([name for name, _ in group]), 80)
        text = f"worst in layer {cut(plain(layer), 40)}: {worst.text}" if worst.size else worst.text
        advice_list.append(replace(worst, where=f"{len(group)} layers ({names})", text=text))
    return advice_list


def _between(stats_by_layer: Mapping[Layer, Stats]) -> Iterator[Advice]:
    norms = {layer: x.norms.median for layer, x in stats_by_layer.items()}
    norms = {layer: norm for layer, norm in norms.items() if np.isfinite(norm) and norm > 0}
    if len(norms) < 2:
        return
    low, high = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
    if norms[high] > _NORMS * norms[low]:
        yield Advice(
            "warning",
            "layers",
            f"median norms differ by a factor of {norms[high] / norms[low]:,.0f}: {norms[low]:.3g} in layer {cut(plain(low), 40)}, "
            f"{norms[high]:.3g} in layer {cut(plain(high), 40)}. A model of several layers mostly fits the large ones.",
            "Scale each layer when training on several.",
            "normalize=[store.stats(x) for x in layers]",
            "norms",
        )


# Sums over ranges of rows, which tasks of a plan make and its commit joins.


_FLOATS = ("mean", "squares", "min", "max")
_COUNTS = ("finite", "nan", "infinite", "zeros")
SUMMED = np.dtype([(name, "<f8") for name in _FLOATS] + [(name, "<i8") for name in _COUNTS])
"""Sums of a column."""


class Sums:
    """Sums over a range of a layer's rows, which add up to the same bits however the rows were divided into ranges.

    Rows are divided into leaves of a fixed size. A range of leaves is kept as the largest nodes of a binary tree that lie in it:
    few arrays, whatever its length. See the core's ``stream/stats/tree.rs``.
    """

    def __init__(self, width: int, nodes: Sequence[dict[str, Any]] = ()) -> None:
        self.width = width
        self.nodes = list(nodes)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(int(node["rows"]) for node in self.nodes)

    @property
    def leaves(self) -> tuple[int, int]:
        """First leaf and end of the range."""
        if not self.nodes:
            return 0, 0
        last = self.nodes[-1]
        return int(self.nodes[0]["first"]), int(last["first"]) + (1 << int(last["level"]))

    def join(self, following: Sums) -> Sums:
        """The sums of this range and of the one that follows.

        Raises:
            ArgumentError: another range follows, or one of another width.
        """
        return Sums(self.width, _native.joined_sums([*self.nodes, *following.nodes]))

    def stats(self, layer: Layer | None = None) -> Stats:
        """The statistics, if these are the sums of all rows."""
        total = _native.total_sums(self.nodes)
        if total is None:
            start = {"min": np.inf, "max": -np.inf}
            total = {name: np.full(self.width, start.get(name, 0.0)) for name in _FLOATS}
            total |= {name: np.zeros(self.width, np.int64) for name in _COUNTS}
            total |= {"rows": 0, "norms": (0.0, 0), **Summary().as_sums()}
        return Stats.of(total, layer)

    def as_plain(self) -> tuple[list[list[Any]], NDArray[np.generic], list[dict[str, object]]]:
        """JSON values of each node, an array ``(nodes, width)`` of its columns, and JSON of its summary; see :meth:`of_plain`."""
        columns = np.empty((len(self.nodes), self.width), SUMMED)
        for node, row in zip(self.nodes, columns, strict=True):
            for name in (*_FLOATS, *_COUNTS):
                row[name] = node[name]
        records = [[n["first"], n["level"], n["rows"], float(n["norms"][0]).hex(), n["norms"][1]] for n in self.nodes]
        return records, columns, [Summary.of(node).as_plain() for node in self.nodes]

    @classmethod
    def of_plain(
        cls,
        records: Sequence[Sequence[Any]],
        columns: NDArray[np.generic],
        summaries: Sequence[Mapping[str, object]],
        width: int,
    ) -> Sums:
        """The sums of :meth:`as_plain`.

        Raises:
            ValueError, TypeError: the values are not those of sums of this width.
        """
        if columns.dtype != SUMMED or columns.shape != (len(records), width):
            raise ValueError(f"expected {len(records)} sums of {width} columns, found {columns.dtype} {columns.shape}")
        nodes: list[dict[str, object]] = []
        for (first, level, rows, norms, count), row, summary in zip(records, columns, summaries, strict=True):
            for number in (first, level, rows, count):
                if type(number) is not int or number < 0:
                    raise ValueError(f"expected a count, found {number!r:.80}")
            node: dict[str, object] = {"first": first, "level": level, "rows": rows}
            node["norms"] = (float.fromhex(norms), count)
            node |= Summary.of_plain(summary).as_sums()
            node |= {name: np.ascontiguousarray(row[name]) for name in (*_FLOATS, *_COUNTS)}
            nodes.append(node)
        return cls(width, nodes)
