"""Plots of row norms: by layer, as a histogram, and by position in the example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base.layers import Layer
from actshard.looking.stats.summary import MANTISSA_BITS, POSITION_QUANTILES, Norms
from actshard.plot.activations import Measured, known, name_layers, scaled, style_unless, table_of
from actshard.plot.style import Plotted, axes, below, labels, log, store_of, whole
from actshard.reading.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from actshard.streaming.selection import Tokens

QUANTILES = {"p0.1": 0.001, "p1": 0.01, "p25": 0.25, "median": 0.5, "p75": 0.75, "p99": 0.99, "p99.9": 0.999}
"""Columns of the table of norms, and the fractions of rows below them."""
_BANDS = 3
"""Most layers with a band in a plot."""
_BARS = 60
"""Most bars of a histogram."""
_LOW_BITS = 52 - MANTISSA_BITS
"""Bits of a float64 that the number of its bin leaves out."""
_MOST = 1e300
"""Larger norms are drawn here."""
_EXACT = 64
"""Positions that are drawn on a linear axis."""
_MARKED = 32
"""Most points of a line that have marks."""
_LINES = 6
"""Most layers in a plot with a line for each: as many as there are colours."""
_WIDE = 8.0
"""Norms that differ by a larger factor have a logarithmic axis."""


def norms(
    store: Plotted,
    layers: Layer | Sequence[Layer] | None = None,
    *,
    stats: Measured | None = None,
    tokens: Tokens = "content",
    ax: Axes | None = None,
    table: bool = False,
) -> Any:
    """L2 norms of the rows of each layer: the mean, the median, and bands with half and with 98 % of the rows.

    Args:
        store: an open store, or the path or URL of a dataset.
        layers: names; None: all.
        stats: statistics of the layers, if they are known: they are not computed again.
        tokens: as for :meth:`actshard.Store.stats`.
        ax: axes to draw into.
        table: return a table with columns ``layer``, ``rows``, ``mean_norm``, and quantiles ``p0.1``, ``p1``, ``p25``,
            ``median``, ``p75``, ``p99``, ``p99.9``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    store = store_of(store)
    stats_by_layer = known(store, layers, stats, tokens)
    mean = np.array([x.mean_norm for x in stats_by_layer.values()])
    values = np.array([x.norms.quantile(list(QUANTILES.values())) for x in stats_by_layer.values()]).reshape(
        -1, len(QUANTILES)
    )
    quantiles = dict(zip(QUANTILES, values.T, strict=True))
    if table:
        return table_of(
            layer=list(stats_by_layer), rows=[x.rows for x in stats_by_layer.values()], mean_norm=mean, **quantiles
        )
    with style_unless(ax):
        ax = axes(ax)
        ticks = np.arange(len(stats_by_layer))
        if len(stats_by_layer) == 1:  # a band of one layer would have no width
            ax.vlines(ticks, quantiles["p1"], quantiles["p99"], color="C0", alpha=0.3, linewidth=8, label="1 % to 99 %")
            ax.vlines(
                ticks, quantiles["p25"], quantiles["p75"], color="C0", alpha=0.5, linewidth=8, label="25 % to 75 %"
            )
        else:
            ax.fill_between(
                ticks, quantiles["p1"], quantiles["p99"], color="C0", alpha=0.15, linewidth=0, label="1 % to 99 %"
            )
            ax.fill_between(
                ticks, quantiles["p25"], quantiles["p75"], color="C0", alpha=0.3, linewidth=0, label="25 % to 75 %"
            )
        ax.plot(ticks, quantiles["median"], marker="o", markersize=3.5, color="C0", label="median")
        ax.plot(ticks, mean, marker="x", markersize=4, linestyle="--", linewidth=1, color="C1", label="mean")
        name_layers(ax, list(stats_by_layer))
        ax.set_ylabel("L2 norm of a row")
        ax.set_title("Norms by layer")
        scaled(ax, np.concatenate([quantiles["p1"], quantiles["p99"], mean]))
        below(ax, ncols=4)
        return ax


def histogram(
    store: Plotted,
    layers: Layer | Sequence[Layer] | None = None,
    *,
    stats: Measured | None = None,
    tokens: Tokens = "content",
    ax: Axes | None = None,
    table: bool = False,
) -> Any:
    """Histogram of the L2 norms of rows; of one layer with the median and the 99.9 % quantile.

    Draws the density, rows divided by the width of their bar, because bars of larger norms are wider.

    Args:
        store: an open store, or the path or URL of a dataset.
        layers: names; None: the first, the middle and the last. At most 6 are drawn.
        stats: as for :func:`norms`.
        tokens: as for :func:`norms`.
        ax: axes to draw into.
        table: return a table with columns ``layer``, ``low``, ``high`` (norms from low to below high), ``rows`` and ``density``
            (rows divided by high - low). Bins are those of the statistics: 128 for each power of two.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    store = store_of(store)
    stats_by_layer = _some(store, layers, stats, tokens)
    if table:
        norms_by_layer = {layer: x.norms for layer, x in stats_by_layer.items()}
        return table_of(
            layer=[layer for layer, x in norms_by_layer.items() for _ in x.counts],
            low=np.concatenate([x.edges[:-1] for x in norms_by_layer.values()]),
            high=np.concatenate([x.edges[1:] for x in norms_by_layer.values()]),
            rows=np.concatenate([x.counts for x in norms_by_layer.values()]),
            density=np.concatenate([density(x.edges, x.counts) for x in norms_by_layer.values()]),
        )
    with style_unless(ax):
        ax = axes(ax)
        drawn = {layer: stats_by_layer[layer] for layer in list(stats_by_layer)[:_LINES]}
        names, _ = labels(list(drawn), 20)
        shift = least_shift([x.norms for x in drawn.values()])
        least = np.inf
        for i, x in enumerate(drawn.values()):
            edges, rows = bars(x.norms, shift)
            is_single = len(drawn) == 1
            high = density(edges, rows)
            least = min(least, high[high > 0].min(initial=np.inf))
            ax.stairs(
                high, edges, color=f"C{i}", fill=is_single, alpha=0.85 if is_single else 1, label=f"layer {names[i]}"
            )
        if len(drawn) == 1 and next(iter(drawn.values())).norms.rows:
            for i, (name, q) in enumerate((("median", 0.5), ("99.9 %", 0.999)), 1):
                norm = float(next(iter(drawn.values())).norms.quantile(q))
                ax.axvline(norm, color=f"C{i}", linewidth=1, linestyle="--", label=f"{name}: {norm:.3g}")
        low, high = ax.dataLim.intervalx
        if 0 < _WIDE * low < high:
            log(ax, "x")
        log(ax, "y")
        if np.isfinite(least):
            ax.set_ylim(bottom=0.7 * least)  # the lowest bar is seen
        ax.set_xlabel("L2 norm of a row")
        ax.set_ylabel("rows per unit of norm")
        ax.set_title("Histogram of norms")
        below(ax, ncols=3)
        return ax


def least_shift(all_bins: Sequence[Norms]) -> int:
    """How many bits are cut from the numbers of bins, so that few bars are left of all bins together."""
    numbers = np.concatenate([_numbers(x)[0] for x in all_bins])
    shift = 0
    while numbers.size and (numbers.max() >> shift) - (numbers.min() >> shift) >= _BARS:
        shift += 1
    return shift


def _numbers(bins: Norms) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of bins with rows, without that of norm 0, and their rows. Edges of bins are floats with few bits."""
    mask = (bins.counts > 0) & (bins.edges[:-1] > 0)
    return bins.edges[:-1][mask].view(np.int64) >> _LOW_BITS, bins.counts[mask]


def bars(bins: Norms, shift: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Edges and rows of bars, each of ``2**shift`` bins. Rows of norm 0 are left out."""
    numbers, counts = _numbers(bins)
    if not numbers.size:
        return np.array([1.0, 2.0]), np.zeros(1, np.int64)
    wide = numbers >> shift
    rows = np.zeros(int(wide[-1] - wide[0]) + 1, np.int64)
    np.add.at(rows, wide - wide[0], counts)
    edges = (np.arange(wide[0], wide[-1] + 2) << (shift + _LOW_BITS)).view(np.float64)
    return np.minimum(edges, _MOST), rows


def density(edges: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Rows divided by the widths of their bins, at most 1e300."""
    with np.errstate(over="ignore"):
        densities: NDArray[np.float64] = np.minimum(rows / np.diff(edges), _MOST)
    return densities


def positions(
    store: Plotted,
    layers: Layer | Sequence[Layer] | None = None,
    *,
    stats: Measured | None = None,
    tokens: Tokens = "content",
    ax: Axes | None = None,
    table: bool = False,
) -> Any:
    """Mean L2 norm of rows by their token's position in the example, and a band with 90 % of the rows.

    Positions from 64 on are in ranges of an eighth or less.

    Args:
        store: an open store, or the path or URL of a dataset.
        layers: names; None: the first, the middle and the last. At most 6 are drawn, and the bands of at most 3.
        stats: as for :func:`norms`.
        tokens: as for :func:`norms`.
        ax: axes to draw into.
        table: return a table with columns ``layer``, ``first``, ``end`` (positions from first to below end), ``rows``,
            ``mean_norm``, ``p5``, ``median`` and ``p95`` (quantiles within 1/16).

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    store = store_of(store)
    stats_by_layer = _some(store, layers, stats, tokens)
    if table:
        positions_by_layer = {layer: x.norms_by_position for layer, x in stats_by_layer.items()}
        return table_of(
            layer=[layer for layer, x in positions_by_layer.items() for _ in x.first],
            first=np.concatenate([x.first for x in positions_by_layer.values()]),
            end=np.concatenate([x.end for x in positions_by_layer.values()]),
            rows=np.concatenate([x.rows for x in positions_by_layer.values()]),
            mean_norm=np.concatenate([x.mean for x in positions_by_layer.values()]),
            **{
                name: np.concatenate([x.quantile(q) for x in positions_by_layer.values()])
                for name, q in POSITION_QUANTILES.items()
            },
        )
    with style_unless(ax):
        ax = axes(ax)
        drawn, most = [], 0
        names, _ = labels(list(stats_by_layer)[:_LINES], 20)
        for i, x in enumerate(list(stats_by_layer.values())[:_LINES]):
            by = x.norms_by_position
            middle = (by.first + by.end - 1) / 2
            few = len(middle) <= _MARKED
            ax.plot(
                middle,
                by.mean,
                marker="o" if few else None,
                markersize=3,
                color=f"C{i}",
                label=f"layer {names[i]}",
            )
            drawn.append(by.mean)
            if len(stats_by_layer) <= _BANDS:
                low, high = by.quantile((POSITION_QUANTILES["p5"], POSITION_QUANTILES["p95"]))
                name = "5 % to 95 %" if i == 0 else None
                ax.fill_between(middle, low, high, color=f"C{i}", alpha=0.15, linewidth=0, label=name)
                drawn += [low, high]
            most = max(most, int(by.end.max(initial=0)))
        if most > 2 * _EXACT:
            log(ax, "x", "symlog", linthresh=_EXACT, linscale=1.5)
            ax.set_xticks([0, 16, 32, *(4**k for k in range(3, 20) if 4**k < most)])
        else:
            whole(ax)
        scaled(ax, np.concatenate(drawn))
        ax.set_xlabel("position of the token in the example")
        ax.set_ylabel("L2 norm of a row")
        ax.set_title("Norm by position")
        below(ax, ncols=3)
        return ax


def _some(store: Store, layers: Layer | Sequence[Layer] | None, stats: Measured | None, tokens: Tokens) -> Measured:
    """The statistics of some layers: of all those that are known, or of the first, the middle and the last."""
    if stats is None and layers is None:
        layers = spread(store.layers)
    return known(store, layers, stats, tokens)


def spread(names: Sequence[Layer]) -> list[Layer]:
    """The first, the middle and the last of some layers."""
    return [names[i] for i in sorted({0, len(names) // 2, len(names) - 1})] if names else []
