"""Plots of rows along the principal directions of their layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError
from actshard.base.layers import Layer
from actshard.looking.sampled.rows import Places, sample
from actshard.looking.sampled.spectrum import Spectrum
from actshard.plot.activations import style_unless, table_of
from actshard.plot.opened import Plotted, store_of
from actshard.plot.sampled import label_of
from actshard.plot.style import axes, below, label, library
from actshard.reading.store import Store
from actshard.streaming.selection import Selection

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes

    from actshard.streaming.selection import Tokens

_CLASSES = 6
"""Most values with a colour of their own: as many as there are colours."""
_OTHER, _MISSING = "other values", "no value"
_GREY = "#9a9a9a"


def pca(
    store: Plotted,
    layer: Layer | None = None,
    *,
    color: str | None = None,
    tokens: Tokens = "last",
    rows: int = 2_000,
    seed: int = 0,
    spectrum: Spectrum | None = None,
    ax: Axes | None = None,
    table: bool = False,
) -> Axes | pa.Table:
    """Rows along the first two principal directions of their layer, coloured by a column: the first look at a dataset.

    Args:
        store: an open store, or the path or URL of a dataset.
        layer: a name; None: the middle one.
        color: a column, with a value per example. Texts and few different numbers are classes; other numbers are a scale. None: the
            column ``label``, ``labels``, ``class`` or ``target``, if there is one.
        tokens: which rows may be drawn: the last token of each example, or as for :meth:`actshard.Store.stats`.
        rows: number of rows that are drawn, from a sample spread over the dataset.
        seed: the seed of the sample.
        spectrum: the layer's spectrum with two directions or more, if it is known. None: that of the rows ``tokens``.
        ax: axes to draw into.
        table: return a table with columns ``example``, ``token``, ``x``, ``y`` and ``color``, if there is one.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.

    Raises:
        NotStoredError: the dataset has no such column, or no hidden states.
        ArgumentError: fewer than two directions have variance.
    """
    store = store_of(store)
    if layer is None and store.layers:
        layer = store.layers[len(store.layers) // 2]
    name = store.layers[store.group_of(0 if layer is None else layer)]
    if spectrum is None:
        spectrum = store.spectrum(name, tokens=tokens, directions=2, seed=seed)
    if len(spectrum.directions) < 2:
        raise ArgumentError(
            f"layer {name}: expected rows that vary in two directions or more, found {len(spectrum.directions)} in "
            f"{_arguments.many(spectrum.rows, 'row')}",
            path=store.path,
        )
    places = sample(Selection(tokens).resolve(store, [name]), _arguments.whole(rows, "rows", 1), seed)
    x, y = spectrum.project(store.gather(name, places.examples, places.tokens, dtype=np.float32))[:, :2].T
    column = _column(store, color, places)
    if table:
        columns: dict[str, object] = {"example": places.examples, "token": places.tokens, "x": x, "y": y}
        return table_of(**columns, **({} if column is None else {"color": column[1]}))
    with style_unless(ax):
        ax = axes(ax)
        if column is None:
            ax.scatter(x, y, s=6, color="C0", linewidths=0)
        else:
            _scatter(ax, x, y, *column)
        share = spectrum.explained * 100
        ax.set_xlabel(f"direction 1 ({share[0]:.1f} % of the variance)")
        ax.set_ylabel(f"direction 2 ({share[1]:.1f} %)")
        coloured = "" if column is None else f", by {label(column[0], 24)}"
        ax.set_title(f"Principal directions of layer {label(str(name), 24)}{coloured}")
        return ax


def _column(store: Store, color: str | None, places: Places) -> tuple[str, list[object]] | None:
    """The name of a column, and its value for each row that is drawn."""
    if color is None:
        usual = label_of(store)
        if not isinstance(usual, str):
            return None
        color = usual
    values = store.read_columns(color)[color]
    return color, values.take(places.examples).to_pylist()


def _scatter(ax: Axes, x: NDArray[np.float64], y: NDArray[np.float64], name: str, values: Sequence[object]) -> None:
    """Draws points in colours of their values: classes with a legend, or a scale with a bar."""
    numeric = all(value is None or isinstance(value, int | float) for value in values)
    texts = [_MISSING if value is None else str(value) for value in values]
    counts = {text: texts.count(text) for text in sorted({*texts} - {_MISSING})}
    if numeric and len(counts) > _CLASSES:
        numbers = np.array([np.nan if value is None else value for value in values], np.float64)
        shown = np.isfinite(numbers)
        ax.scatter(x[~shown], y[~shown], s=6, color=_GREY, linewidths=0)
        points = ax.scatter(
            x[shown], y[shown], s=6, c=numbers[shown], cmap=library().colormaps["viridis"], linewidths=0
        )
        ax.figure.colorbar(points, ax=ax, label=label(name, 24))
        return
    common = sorted(counts, key=lambda text: -counts[text])[: _CLASSES if len(counts) <= _CLASSES else _CLASSES - 1]
    classes = [text if text in common else _MISSING if text == _MISSING else _OTHER for text in texts]
    for kind in (_OTHER, _MISSING, *sorted(common)):
        flags = np.array([text == kind for text in classes], np.bool_)
        if flags.any():
            color = _GREY if kind in (_OTHER, _MISSING) else f"C{sorted(common).index(kind)}"
            ax.scatter(x[flags], y[flags], s=6, color=color, linewidths=0, label=label(kind, 24))
    below(ax, ncols=3)
