"""Plots of samples of rows: spectra, similarity of layers, and separability of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, NotStoredError
from actshard.base.layers import Layer, several
from actshard.looking.sampled.separability import Separability
from actshard.looking.sampled.similarity import Similarity
from actshard.looking.sampled.spectrum import Places, Spectrum, sample
from actshard.plot.activations import name_layers, style_unless, table_of
from actshard.plot.norms import spread
from actshard.plot.style import Plotted, axes, below, label, labels, library, log, store_of
from actshard.reading.store import Store
from actshard.streaming.selection import Selection

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes

    from actshard.streaming.selection import Tokens


_LINES = 6
"""Most layers in a plot with a line for each: as many as there are colours."""
_WRITTEN = 12
"""Most layers for which a heat map has numbers."""
_COLOURS = 40
"""Colours of a heat map."""
_DARK = 0.55
"""Below this, numbers of a heat map are white."""
_LABELS = ("label", "labels", "class", "target")
"""Names of columns that are taken for a label, if none is named."""


def spectrum(
    store: Plotted,
    layers: Layer | Sequence[Layer] | None = None,
    *,
    spectra: Mapping[Layer, Spectrum] | None = None,
    tokens: Tokens = "content",
    ax: Axes | None = None,
    table: bool = False,
) -> Any:
    """Variance that the first principal directions explain together, with the effective rank of each layer.

    Args:
        store: an open store, or the path or URL of a dataset.
        layers: names; None: the first, the middle and the last. At most 6 are drawn.
        spectra: spectra of the layers, if they are known: they are not computed again.
        tokens: as for :meth:`actshard.Store.spectrum`.
        ax: axes to draw into.
        table: return a table with columns ``layer``, ``direction`` (from 1), ``eigenvalue``, ``explained`` and ``cumulative``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    store = store_of(store)
    if spectra is None:
        names = spread(store.layers) if layers is None else several(layers)
        spectra = {store.layers[store.group_of(name)]: store.spectrum(name, tokens=tokens) for name in names}
    if table:
        layer_spectra = list(spectra.values())
        empty = [np.zeros(0)]
        return table_of(
            layer=[name for name, x in spectra.items() for _ in x.eigenvalues],
            direction=np.concatenate(
                [np.arange(1, len(x.eigenvalues) + 1) for x in layer_spectra] + [np.zeros(0, np.int64)]
            ),
            eigenvalue=np.concatenate([x.eigenvalues for x in layer_spectra] + empty),
            explained=np.concatenate([x.explained for x in layer_spectra] + empty),
            cumulative=np.concatenate([np.cumsum(x.explained) for x in layer_spectra] + empty),
        )
    with style_unless(ax):
        ax = axes(ax)
        most = 2
        shown, _ = labels(list(spectra), 16)
        for i, x in enumerate(list(spectra.values())[:_LINES]):
            reached = np.cumsum(x.explained) * 100
            rank = f"effective rank {x.effective_rank:.3g}" if np.isfinite(x.effective_rank) else "no variance"
            ax.plot(np.arange(1, len(reached) + 1), reached, color=f"C{i}", label=f"layer {shown[i]}: {rank}")
            most = max(most, len(reached))
        log(ax, "x")
        ax.set_xlim(1, most)
        ax.set_ylim(0, 102)
        ax.set_xlabel("principal directions")
        ax.set_ylabel("variance explained (%)")
        ax.set_title("Spectrum")
        if spectra:
            below(ax, ncols=1)
        return ax


def similarity(
    store: Plotted,
    layers: Layer | Sequence[Layer] | None = None,
    *,
    found: Similarity | None = None,
    tokens: Tokens = "content",
    ax: Axes | None = None,
    table: bool = False,
) -> Any:
    """Debiased linear CKA between layers, as a heat map. Layers without variance are blank.

    Args:
        store: an open store, or the path or URL of a dataset.
        layers: names; None: all.
        found: the similarity, if it is known, also of the layers of two stores: it is not computed again.
        tokens: as for :meth:`actshard.Store.similarity`.
        ax: axes to draw into.
        table: return a table with columns ``layer``, ``other_layer``, ``cka``, and ``cosine`` and ``mean_cosine`` unless the layers
            have different ``d_model``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.
    """
    store = store_of(store)
    layer_similarity = store.similarity(layers, tokens=tokens) if found is None else found
    if table:
        return _similar(layer_similarity)
    with style_unless(ax):
        ax = axes(ax)
        values = layer_similarity.cka
        finite = values[np.isfinite(values)]
        # Cells of few colours and not an image, so that a page needs none: matplotlib makes images of longer colour bars.
        image = ax.pcolormesh(
            np.arange(values.shape[1] + 1) - 0.5,
            np.arange(values.shape[0] + 1) - 0.5,
            np.ma.masked_invalid(values),
            vmin=min(0.0, float(finite.min(initial=0))),
            vmax=1,
            cmap=library().colormaps["viridis"].resampled(_COLOURS),
            edgecolors="face",
            linewidth=0.4,  # without edges, lines of the background are seen between cells
        )
        name_layers(ax, list(layer_similarity.other_layers))
        name_layers(ax, list(layer_similarity.layers), horizontal=False)
        # Whole cells at the edges.
        ax.set_xlim(-0.5, len(layer_similarity.other_layers) - 0.5)
        ax.set_ylim(len(layer_similarity.layers) - 0.5, -0.5)
        ax.grid(visible=False)
        if max(values.shape, default=0) <= _WRITTEN:
            for i, j in np.argwhere(np.isfinite(values)).tolist():
                colour = "#ffffff" if values[i, j] < _DARK else "#000000"
                ax.text(
                    j,
                    i,
                    f"{round(float(values[i, j]), 2) + 0.0:.2f}",
                    ha="center",
                    va="center",
                    fontsize=6,
                    color=colour,
                )
        ax.figure.colorbar(image, ax=ax, label="CKA")
        ax.set_title("Similarity of layers: debiased linear CKA")
        return ax


def _similar(layer_similarity: Similarity) -> pa.Table:
    n, m = layer_similarity.cka.shape
    names = [(layer, other_layer) for layer in layer_similarity.layers for other_layer in layer_similarity.other_layers]
    mixed = len({type(x) for pair in names for x in pair}) > 1
    columns: dict[str, object] = {
        "layer": [str(layer) if mixed else layer for layer, _ in names],
        "other_layer": [str(other_layer) if mixed else other_layer for _, other_layer in names],
        "cka": layer_similarity.cka.reshape(n * m),
    }
    values = layer_similarity.as_dict()
    for name in ("cosine", "mean_cosine"):
        if values[name] is not None:
            columns[name] = getattr(layer_similarity, name).reshape(n * m)
    return table_of(**columns)


def separability(
    store: Plotted,
    layers: Layer | Sequence[Layer] | None = None,
    *,
    of: Any = None,
    found: Separability | None = None,
    ax: Axes | None = None,
    table: bool = False,
) -> Any:
    """Balanced accuracy of a linear probe on held-out examples, by layer, with its standard error and the accuracy of chance.

    Bars end at 0 and 1. Their length is :attr:`actshard.Separability.error`: one right and one wrong example are added to each
    class, so a layer where all examples are right has an error too, and layers with equal accuracies have nearly equal errors.

    Args:
        store: an open store, or the path or URL of a dataset.
        layers: names; None: all.
        of: the label, as for :meth:`actshard.Store.separability`; None: the column ``label``, ``labels``, ``class`` or ``target``,
            or the labels of tokens (:attr:`actshard.Store.labels`).
        found: the separability, if it is known: it is not computed again.
        ax: axes to draw into.
        table: return a table with columns ``layer``, ``accuracy``, ``error``, ``chance`` and ``not_finite``.

    Returns:
        Matplotlib axes, or a ``pyarrow.Table``.

    Raises:
        NotStoredError: no label is named, and the dataset has no such column or labels.
    """
    store = store_of(store)
    if found is None:
        found = store.separability(named_label(store) if of is None else of, layers)
    if table:
        return table_of(
            layer=list(found.layers),
            accuracy=found.accuracy,
            error=found.error,
            chance=np.full(len(found.layers), found.chance),
            not_finite=found.not_finite,
        )
    with style_unless(ax):
        ax = axes(ax)
        positions = np.arange(len(found.layers))
        ax.errorbar(
            positions,
            found.accuracy,
            np.minimum([found.error] * 2, [found.accuracy, 1 - found.accuracy]),  # an accuracy is from 0 to 1
            marker="o",
            markersize=3.5,
            capsize=2,
            color="C0",
            label="held out, ± standard error",
        )
        ax.axhline(found.chance, color="C1", linewidth=1, linestyle="--", label=f"chance, {len(found.classes)} classes")
        name_layers(ax, list(found.layers))
        ax.set_ylim(0, 1.05)
        ax.set_ylabel("balanced accuracy")
        what = label(found.label, 24) if found.label else "labels of tokens" if found.pool == "token" else ""
        ax.set_title(f"Linear probe of {what}" if what else "Linear probe")
        below(ax, ncols=2)
        return ax


def compared(names: Sequence[Layer], most: int = 32) -> list[Layer]:
    """All layers, or of more than ``most`` evenly spaced ones."""
    n = min(len(names), most)
    return [names[i * (len(names) - 1) // max(n - 1, 1)] for i in range(n)]


def label_of(store: Store) -> object:
    """A column of a usual name, or the labels of tokens; None if the dataset has neither."""
    names = store.contents.column_names
    return next((name for name in _LABELS if name in names), store.labels)


def named_label(store: Store) -> Any:
    """:func:`label_of`.

    Raises:
        NotStoredError: the dataset has none.
    """
    default_label = label_of(store)
    if default_label is None:
        names = ", ".join(map(repr, store.contents.column_names)) or "none"
        raise NotStoredError(
            f"label: expected labels of tokens, one of the columns {', '.join(_LABELS)}, or the name of another; "
            f"found {names:.300}",
            path=store.path,
        )
    return default_label


# Plots of rows along the principal directions of their layer.


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
