"""Plots of activation datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.layers import Layer, several
from actshard.looking import saved
from actshard.looking.stats import Stats
from actshard.plot.style import Plotted, PlottedCache, axes, below, label, labels, log, look_of, store_of, style, whole
from actshard.reading.store import Store
from actshard.streaming.quality import distances
from actshard.streaming.selection import CONTENT, Selection

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import pyarrow as pa
    from matplotlib.axes import Axes

    from actshard.streaming.selection import Tokens


Measured = Mapping[Layer, Stats]
_TICKS = 24
"""Most layers that are named on an axis."""
_LINEAR = 30
"""Values that differ by a larger factor have a logarithmic axis."""
_MARKS = 4
"""Most powers of ten that are marked above 0, and below."""
_POINTS = 1500
"""Most points of a line: of more dimensions the extremes of neighbours are drawn."""
_DECADES = 1e6
"""Smaller values than the largest divided by this are below the plot."""
_OUTLIERS = 3
"""Dimensions that are named in a plot."""
_APART = 0.06
"""Part of the axis between two of them, of which the larger one is named."""


def measured(
    store: Store,
    layers: Layer | Sequence[Layer] | None = None,
    *,
    selection: Selection = CONTENT,
    rows: int | None = None,
    saved_stats: Measured | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> dict[Layer, Stats]:
    """The statistics of layers: those that ``store.stats(save=True)`` kept, if they are still true; otherwise they are computed.

    Args:
        store: a store.
        layers: names; None: all.
        selection: their rows.
        rows: number of rows of each layer to sample, as for :meth:`actshard.Store.stats`; None: all.
        saved_stats: the kept statistics, if they were read before.
        progress: called with ("rows", rows done, total rows) of all layers that are read.
    """
    _arguments.check_progress(progress)
    names = [store.layers[store.group_of(x)] for x in (store.layers if layers is None else several(layers))]
    computed_stats: dict[Layer, Stats] = {}
    stats_by_layer = kept_of(store, names, selection) if saved_stats is None else saved_stats
    missing = [name for name in names if name not in stats_by_layer]
    for number, name in enumerate(missing):

        def tell(done: int, total: int, before: int = number) -> None:
            if progress is not None:
                progress("rows", before * total + done, len(missing) * total)

        computed_stats[name] = store.stats(name, rows=rows, progress=tell, **selection.as_options())
    return {name: stats_by_layer[name] if name in stats_by_layer else computed_stats[name] for name in names}


def kept_of(store: Store, names: Sequence[Layer], selection: Selection) -> dict[Layer, Stats]:
    """The statistics of layers that ``store.stats(save=True)`` kept and that are still true."""
    stats_by_layer = {name: saved.kept(store, name, selection) for name in names}
    return {name: stats for name, stats in stats_by_layer.items() if stats is not None}


def known(store: Store, layers: Layer | Sequence[Layer] | None, stats: Measured | None, tokens: Tokens) -> Measured:
    """The given statistics, or if there are none those of some layers."""
    return measured(store, layers, selection=Selection(tokens)) if stats is None else stats


def table_of(**columns: Any) -> pa.Table:
    """An Arrow table; layers are texts if some are."""
    import pyarrow as pa

    if "layer" in columns and len({type(x) for x in columns["layer"]}) > 1:
        columns["layer"] = [str(x) for x in columns["layer"]]
    return pa.table(columns)


def name_layers(ax: Axes, names: Sequence[Layer], *, horizontal: bool = True) -> None:
    """Names the layers at positions 0, 1, ... of an axis, some of them if they are many."""
    step = -(-len(names) // _TICKS)
    ticks = list(range(0, len(names), step))
    texts, what = labels(names)
    texts = [texts[i] for i in ticks]
    turned = any(len(text) > 4 for text in texts) and len(texts) > 3
    if horizontal:
        ax.set_xticks(ticks, texts, rotation=40 if turned else 0, ha="right" if turned else "center")
        margin = 0.04 * len(names) + 0.1
        ax.set_xlim(-margin, len(names) - 1 + margin)  # all layers, whether or not they have values
        ax.set_xlabel(what)
    else:
        ax.set_yticks(ticks, texts)
        ax.set_ylabel(what)


def scaled(ax: Axes, values: NDArray[np.float64]) -> None:
    """Gives the y axis a logarithmic scale if the values differ by a large factor; otherwise it begins at 0."""
    finite = values[np.isfinite(values)]
    finite = finite[finite > 0]
    if finite.size and finite.max() / finite.min() > _LINEAR:
        log(ax, "y")
    else:
        ax.set_ylim(bottom=0)


def gamma(
    store: Plotted,
    layers: Layer | Sequence[Layer] | None = None,
    *,
    stats: Measured | None = None,
    tokens: Tokens = "content",
    ax: Axes | None = None,
    table: bool = False,
) -> Any:
    """Gamma of each layer: ``|mean| / |std|``. Above 1 the mean row is longer than the spread of rows around it.

    Args:
        store: an open store, or the path or URL of a dataset.
        layers: names; None: all.
        stats: statistics of the layers, if they are known: they are not computed again.
        tokens: as for :meth:`actshard.Store.stats`.
        ax: axes to draw into.
        table: return a table with columns ``layer`` and ``gamma``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    store = store_of(store)
    stats_by_layer = known(store, layers, stats, tokens)
    values = np.array([x.gamma for x in stats_by_layer.values()])
    if table:
        return table_of(layer=list(stats_by_layer), gamma=values)
    with style_unless(ax):
        ax = axes(ax)
        ax.plot(np.arange(len(values)), values, marker="o", markersize=3.5, color="C0")
        ax.axhline(1, color="C1", linewidth=1, linestyle="--")
        name_layers(ax, list(stats_by_layer))
        ax.set_ylabel("gamma = |mean| / |std|")
        ax.set_title("Gamma by layer")
        ax.set_ylim(bottom=0)
        if np.nanmax(values, initial=0) > _LINEAR:
            log(ax, "y", "symlog", linthresh=1)
        return ax


def ranges(
    store: Plotted,
    layers: Layer | Sequence[Layer] | None = None,
    *,
    stats: Measured | None = None,
    tokens: Tokens = "content",
    ax: Axes | None = None,
    table: bool = False,
) -> Any:
    """Smallest, largest and typical values of each layer: the extremes of all columns, and the mean deviation of a column.

    Args:
        store: an open store, or the path or URL of a dataset.
        layers: as for :func:`gamma`.
        stats: as for :func:`gamma`.
        tokens: as for :func:`gamma`.
        ax: axes to draw into.
        table: return a table with columns ``layer``, ``min``, ``max`` and ``std``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    store = store_of(store)
    stats_by_layer = known(store, layers, stats, tokens)
    with np.errstate(all="ignore"):
        low = np.array([x.min.min(initial=np.inf) for x in stats_by_layer.values()])
        high = np.array([x.max.max(initial=-np.inf) for x in stats_by_layer.values()])
        std = np.array([_root_mean(x.variance) for x in stats_by_layer.values()])
    if table:
        return table_of(layer=list(stats_by_layer), min=low, max=high, std=std)
    with style_unless(ax):
        ax = axes(ax)
        positions = np.arange(len(stats_by_layer))
        fine = np.isfinite(low) & np.isfinite(high)
        ax.vlines(positions[fine], low[fine], high[fine], color="C0", linewidth=2, label="smallest to largest value")
        ax.vlines(positions[fine], -std[fine], std[fine], color="C1", linewidth=5, label="± std of a column")
        name_layers(ax, list(stats_by_layer))
        ax.set_ylabel("value")
        _decades(ax, float(np.nanmax(std, initial=0)), float(np.abs([low[fine], high[fine]]).max(initial=0)))
        ax.set_title("Range of values by layer")
        below(ax, ncols=2)
        return ax


def _decades(ax: Axes, linear: float, most: float) -> None:
    """Gives the y axis a scale that is linear up to a size and logarithmic from there, with marks at powers of ten."""
    low = np.floor(np.log10(max(linear, 1e-12)))
    log(ax, "y", "symlog", linthresh=10**low)
    high = max(np.floor(np.log10(max(most, 1e-12))), low)
    step = -(-(high - low + 1) // _MARKS)
    marks = 10 ** np.arange(low, high + 1, step)
    ax.set_yticks([*-marks[::-1], 0, *marks])


def _root_mean(variance: NDArray[np.float64]) -> float:
    finite = variance[np.isfinite(variance)]
    return float(np.sqrt(finite.mean())) if finite.size else float("nan")


def dimensions(
    store: Plotted,
    layer: Layer | None = None,
    *,
    stats: Stats | None = None,
    tokens: Tokens = "content",
    ax: Axes | None = None,
    table: bool = False,
) -> Any:
    """Mean, deviation and largest absolute value of each dimension of a layer; the largest dimensions are named.

    Args:
        store: an open store, or the path or URL of a dataset.
        layer: a name; None: the last.
        stats: the layer's statistics, if they are known.
        tokens: as for :meth:`actshard.Store.stats`.
        ax: axes to draw into.
        table: return a table with columns ``dimension``, ``mean``, ``std``, ``min``, ``max``, ``nan`` and ``infinite``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    store = store_of(store)
    name = store.layers[-1] if layer is None else store.layers[store.group_of(layer)]
    layer_stats = measured(store, name, selection=Selection(tokens))[name] if stats is None else stats
    if table:
        return table_of(
            dimension=np.arange(len(layer_stats.mean)),
            mean=layer_stats.mean,
            std=np.sqrt(layer_stats.variance),
            min=layer_stats.min,
            max=layer_stats.max,
            nan=layer_stats.nan,
            infinite=layer_stats.inf,
        )
    with style_unless(ax):
        ax = axes(ax)
        with np.errstate(all="ignore"):
            largest = np.maximum(np.abs(layer_stats.min), np.abs(layer_stats.max))
            lines = {
                "largest |value|": largest,
                "std": np.sqrt(layer_stats.variance),
                "|mean|": np.abs(layer_stats.mean),
            }
        for i, (what, values) in enumerate(lines.items()):
            positions, shown = thinned(np.where(np.isfinite(values) & (values > 0), values, np.nan))
            ax.plot(positions, shown, color=f"C{i}", linewidth=0.8, label=what)
        finite = np.where(np.isfinite(largest), largest, -1)
        peaks: list[int] = []
        for d in np.argsort(-finite, kind="stable")[:_OUTLIERS]:
            if finite[d] > 0 and all(abs(d - peak) > _APART * len(finite) for peak in peaks):
                peaks.append(int(d))
                ax.annotate(str(d), (d, finite[d]), xytext=(2, 2), textcoords="offset points", fontsize=7)
        log(ax, "y")
        top = float(finite.max(initial=0))
        if top > 0:
            least = min(float(x[x > 0].min(initial=top)) for x in lines.values())
            ax.set_ylim(max(top / _DECADES, least / 2), top * 2)
        whole(ax)
        ax.set_xlabel("dimension")
        ax.set_ylabel("absolute value")
        ax.set_title(f"Dimensions of layer {label(name)}")
        below(ax, ncols=3)
        return ax


def thinned(values: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Positions and values of a line: of many points the largest of each group of neighbours."""
    step = -(-len(values) // _POINTS)
    if step <= 1:
        return np.arange(len(values)), values
    padded = np.append(values, np.full(-len(values) % step, np.nan)).reshape(-1, step)
    offsets = np.argmax(np.where(np.isnan(padded), -np.inf, padded), axis=1)
    positions = offsets + step * np.arange(len(padded))
    return positions, padded[np.arange(len(padded)), offsets]


def shuffle(
    store: Plotted,
    layer: Layer | None = None,
    *,
    batch_size: int = 16_384,
    batches: int = 32,
    order: Literal["window", "exact"] | None = "window",
    memory: int | str = "1GiB",
    seed: int = 0,
    tokens: Tokens = "content",
    ax: Axes | None = None,
    table: bool = False,
) -> Any:
    """How far apart a stream puts rows that are adjacent in storage, compared with a uniformly random order of the same rows.

    Reads the batches.

    Args:
        store: an open store, or the path or URL of a dataset.
        layer: a name; None: the first.
        batch_size: rows per batch.
        batches: most batches to read.
        order: ``shuffle`` of :meth:`actshard.Store.stream`.
        memory: as for :meth:`actshard.Store.stream`.
        seed: as for :meth:`actshard.Store.stream`.
        tokens: as for :meth:`actshard.Store.stream`.
        ax: axes to draw into.
        table: return a table with columns ``distance`` and ``random``: distances in rows, in storage order, in the stream and in a
            uniformly random order.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    store = store_of(store)
    name = store.layers[0] if layer is None else layer
    stream = store.stream(name, batch_size, shuffle=order, memory=memory, seed=seed, tokens=tokens)
    read: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for batch in stream:
        read.append((batch.examples, batch.tokens))
        if len(read) >= batches:
            break
    stream.close()
    gaps = distances(read)
    n = sum(len(examples) for examples, _ in read)
    rng = np.random.default_rng(seed)
    random = np.abs(rng.integers(0, max(n, 1), len(gaps)) - rng.integers(0, max(n, 1), len(gaps)))
    if table:
        return table_of(distance=gaps, random=random)
    with style_unless(ax):
        ax = axes(ax)
        edges = np.geomspace(1, max(n, 2), 41).tolist()
        ax.hist(np.maximum(gaps, 1), edges, color="C0", alpha=0.85, label=f"stream, shuffle={order!r}")
        ax.hist(np.maximum(random, 1), edges, color="C1", histtype="step", label="uniformly random order")
        log(ax, "x")
        ax.set_xlabel("distance in the stream, in rows")
        ax.set_ylabel("pairs of stored neighbours")
        ax.set_title("Distance of rows adjacent in storage")
        ax.legend(loc="upper left")
        return ax


def style_unless(ax: Axes | None) -> AbstractContextManager[None]:
    """actshard's style for a new figure, unless it is active already; no style for the caller's axes."""
    import contextlib

    from actshard.plot.style import library

    if ax is not None or library().rcParams["svg.hashsalt"] == "actshard":
        return contextlib.nullcontext()
    return style()


# Plots of token caches, of what :func:`actshard.tokens.looking.look` found.


_RANKS = 400
"""Most points of the curve of frequencies."""


def lengths(found: PlottedCache, *, ax: Axes | None = None, table: bool = False) -> Any:
    """Histogram of the lengths of documents, in tokens.

    Args:
        found: an open token cache, or its path or URL; or what :func:`actshard.tokens.looking.look` returned.
        ax: axes to draw into.
        table: return a table with columns ``low``, ``high`` (lengths from low to below high) and ``documents``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    found = look_of(found)
    token_counts = found.lengths
    most = int(token_counts.max(initial=1))
    # Whole numbers; wide bins for long documents.
    edges = np.unique(np.round(np.geomspace(1, most + 1, 41)).astype(np.int64))
    edges = np.append([0], edges)
    counts, _ = np.histogram(token_counts, edges)
    if table:
        return table_of(low=edges[:-1], high=edges[1:], documents=counts)
    with style_unless(ax):
        ax = axes(ax)
        ax.stairs(counts[1:], edges[1:], fill=True, color="C0", alpha=0.85)
        log(ax, "x")
        if token_counts.size:
            middle = float(np.median(token_counts))
            ax.axvline(max(middle, 1), color="C1", linewidth=1, linestyle="--", label=f"median {middle:,.0f}")
            ax.legend()
        empty = f" ({int(counts[0]):,} empty)" if counts[0] else ""
        ax.set_xlabel("tokens in a document")
        ax.set_ylabel("documents")
        ax.set_title(f"Lengths of documents{empty}")
        return ax


def frequency(found: PlottedCache, *, ax: Axes | None = None, table: bool = False) -> Any:
    """Occurrences of token ids, by rank.

    Args:
        found: an open token cache, or its path or URL; or what :func:`actshard.tokens.looking.look` returned.
        ax: axes to draw into.
        table: return a table with columns ``rank`` (1 is the commonest), ``id`` and ``occurrences``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    found = look_of(found)
    order = np.argsort(-found.counts, kind="stable")[: found.distinct]
    if table:
        return table_of(rank=np.arange(1, len(order) + 1), id=order, occurrences=found.counts[order])
    with style_unless(ax):
        ax = axes(ax)
        if len(order):
            ranks = np.unique(np.round(np.geomspace(1, len(order), _RANKS)).astype(np.int64))
            ax.plot(ranks, found.counts[order][ranks - 1], color="C0")
        log(ax, "x")
        log(ax, "y")
        ax.set_xlabel("rank of the token id")
        ax.set_ylabel("occurrences")
        ax.set_title(f"Token frequency ({found.distinct:,} ids)")
        return ax


def packing(found: PlottedCache, *, ax: Axes | None = None, table: bool = False) -> Any:
    """Share of positions that hold tokens when documents are packed into examples of common lengths.

    Args:
        found: an open token cache, or its path or URL; or what :func:`actshard.tokens.looking.look` returned.
        ax: axes to draw into.
        table: return a table with columns ``length``, ``examples``, ``fill`` and ``cut`` (tokens of too long documents).

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    found = look_of(found)
    fills = found.fills
    if table:
        return table_of(
            length=[x.length for x in fills],
            examples=[x.examples for x in fills],
            fill=[x.fill for x in fills],
            cut=[x.cut for x in fills],
        )
    with style_unless(ax):
        ax = axes(ax)
        ticks = np.arange(len(fills))
        shares = np.array([100 * x.fill for x in fills]), np.array([100 * x.cut / max(found.tokens, 1) for x in fills])
        for i, (what, values) in enumerate(zip(("positions with tokens", "tokens cut off"), shares, strict=True)):
            bars = ax.bar(ticks + 0.4 * i - 0.2, np.nan_to_num(values), width=0.38, color=f"C{i}", label=what)
            ax.bar_label(bars, [f"{x:.0f}" if np.isfinite(x) else "" for x in values], fontsize=7)
        ax.set_xticks(ticks, [f"{x.length:,}" for x in fills])
        ax.set_ylim(0, 112)
        ax.set_xlabel("tokens per example")
        ax.set_ylabel("percent")
        ax.set_title("Packing of whole documents")
        below(ax, ncols=2)
        return ax
