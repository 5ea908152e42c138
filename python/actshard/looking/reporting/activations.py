"""The report of an activation dataset."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actshard import plot
from actshard.base._arguments import many, shown_bytes
from actshard.base.errors import ActshardError, ArgumentError, DtypeError, MissingFileError, NotStoredError
from actshard.base.layers import Layer, listing, plain, several
from actshard.base.location import Location
from actshard.looking.examining import Examined, Repeated, examine, massive_rows, repeated_examples, text_of
from actshard.looking.reporting.page import (
    MOST_MASSIVE,
    MOST_ROWS,
    MOST_TOKENS,
    OF_DATA,
    Grid,
    Page,
    ShownExample,
    Word,
    colour_of,
    figure,
    quoted,
    share,
)
from actshard.looking.stats import MASSIVE, OUTLIER, Stats, advice_of
from actshard.looking.stats.summary import Advice, Repeats, cut
from actshard.plot.activations import Measured, kept_of, measured
from actshard.plot.norms import spread
from actshard.plot.sampled import compared, label_of
from actshard.reading.store import Store
from actshard.streaming.selection import Selection
from actshard.tokens.tokenizer import Tokenizer
from actshard.writing.converting.previewing import preview

if TYPE_CHECKING:
    from actshard.formats.format import Tell


# The parts of a report that come from samples of rows: spectrum, similarity of layers, separability of a label.


ROWS = 2_048
"""Rows of the sample of a spectrum, and of similarities: seconds for the widest models."""
EXAMPLES = 1_024
_NOT = (ArgumentError, DtypeError, NotStoredError, MissingFileError, *OF_DATA)
"""Errors of datasets of which there is no such sample: verify names damage."""


def add_samples(page: Page, store: Store, stats_by_layer: Measured, selection: Selection, tell: Tell) -> None:
    """Adds the plots, where single rows can be read without much else."""
    names = [layer for layer, stats in stats_by_layer.items() if stats.rows > 1]
    if not names:
        return
    if store.contents.units is not None or not Location.at(store.path).is_local:
        why = "not computed: single rows of this dataset are slow to read; see store.spectrum and store.similarity"
        page.how_sampled.append(("spectrum, similarity", why))
        return
    _spectra(page, store, names, selection, tell)
    if len(names) > 1:
        _similarity(page, store, names, selection, tell)
    label = label_of(store)
    if label is not None:
        _separability(page, store, label, names, selection, tell)


def _spectra(page: Page, store: Store, names: list[Layer], selection: Selection, tell: Tell) -> None:
    spectra = {}
    for layer in spread(names):
        try:
            spectra[layer] = store.spectrum(
                layer,
                rows=ROWS,
                progress=lambda done, total: tell("spectrum", done, total),
                **selection.as_options(),
            )
        except _NOT:
            continue
    nonzero_spectra = {layer: x for layer, x in spectra.items() if x.rows > 1 and np.nansum(x.explained) > 0}
    if nonzero_spectra:
        spectrum = next(iter(nonzero_spectra.values()))
        page.plot("spectrum", "Spectrum", lambda: plot.spectrum(store, spectra=nonzero_spectra))
        text = f"{spectrum.rows:,} of {spectrum.total:,} rows; effective rank is exp of the entropy of the shares, at most the rows"
        page.how_sampled.append(("spectrum", text))


def _similarity(page: Page, store: Store, names: list[Layer], selection: Selection, tell: Tell) -> None:
    try:
        similarity = store.similarity(
            compared(names),
            rows=ROWS,
            progress=lambda done, total: tell("similarity", done, total),
            **selection.as_options(),
        )
    except _NOT:  # such as layers with other tokens
        return
    if np.isfinite(similarity.cka).any():
        page.plot("similarity", "Similarity of layers", lambda: plot.similarity(store, found=similarity))
        text = (
            f"debiased linear CKA of {similarity.rows:,} of {similarity.total:,} rows: 1 for layers equal up to rotation "
            "and scale"
        )
        page.how_sampled.append(("similarity", text))


def _separability(page: Page, store: Store, label: Any, names: list[Layer], selection: Selection, tell: Tell) -> None:
    try:
        separability = store.separability(
            label,
            names,
            examples=EXAMPLES,
            progress=lambda done, total: tell("separability", done, total),
            **selection.as_options(),
        )
    except _NOT:  # values that are no classes
        return
    if np.isfinite(separability.accuracy).any():
        page.plot(
            "separability",
            "Linear separability of the label",
            lambda: plot.separability(store, found=separability),
            "Bars: standard error from the number of held-out rows, within 0 and 1. One right and one wrong row are added to each "
            "class, so it is not 0 where all are right.",
        )
        fitted, tested = int(separability.train.sum()), int(separability.test.sum())
        if separability.pool == "token":
            rows = f"{fitted:,} tokens, balanced accuracy on {tested:,} tokens of other examples"
        else:
            rows = f"the last tokens of {fitted:,} examples, balanced accuracy on {tested:,} others"
        text = f"ridge classifier on {rows}, {len(separability.classes)} classes; bars are standard errors"
        page.how_sampled.append(("separability", text))


_LARGE = 64 << 20
"""Bytes of a dataset from which the report names its packed size."""
_WORTH = 0.95
"""The largest share of the present size that is worth a conversion."""
ReportedRows = tuple[Selection, int | None]
"""The rows to report on, and how many to sample of each layer; None: all."""


def page_of(
    store: Store,
    layers: Layer | Sequence[Layer] | None,
    selected: ReportedRows,
    count: int,
    decode: Tokenizer | None,
    tell: Tell,
) -> Page:
    """The parts of a report that come from the store."""
    selection, rows = selected
    page = Page(cut(store.path.name or store.path, 80), "activation dataset", list(_facts(store)))
    if not store.layers:
        page.advice.append(Advice("note", "dataset", "contains no hidden states: there is nothing to plot."))
        return page
    names = tuple(store.layers[store.group_of(x)] for x in (store.layers if layers is None else several(layers)))
    saved_stats: dict[Layer, Stats] = {}
    try:
        with page.timed("statistics"):
            stats_by_layer = _readable(page, store, names, selected, saved_stats, tell)
    except DtypeError as error:  # such as float8 without scales
        page.advice.append(Advice("note", "dataset", f"has no statistics: {cut(error.detail)}."))
        return page
    if not stats_by_layer:
        return page
    page.layers = list(stats_by_layer)
    if rows is not None:
        text = f"statistics are of a sample of at most {rows:,} rows of each layer: rare NaN values and large rows may be missing."
        page.advice.append(Advice("note", "dataset", text))
    page.advice += advice_of(stats_by_layer)
    page.advice += [Advice("warning", "dataset", cut(text)) for text in store.warnings]
    with page.timed("plots"):
        _draw(page, store, stats_by_layer)
    with page.timed("samples"):
        add_samples(page, store, stats_by_layer, selection, tell)
    with page.timed("tables and texts"):
        page.grids.append(("Layers", _LAYERS, _table(stats_by_layer)))
        page.grids += _massive(store, stats_by_layer, decode)
        repeated = _repeated(page, store, stats_by_layer, tell)
        page.samples, page.samples_of = _samples(store, stats_by_layer, count, decode, tell)
    which = "all" if rows is None else f"a sample of at most {rows:,} rows of each layer:"
    total = sum(stats.rows for stats in stats_by_layer.values())
    page.how = [
        (
            "statistics",
            f"{which} {many(total, 'row')} of {many(len(stats_by_layer), 'layer')}, tokens {selection.tokens!r}"
            f"{_left_out(selection)}; sums in float64{_kept(saved_stats, stats_by_layer)}",
        ),
        ("gamma", "|mean| / |std| over all columns (arXiv 2605.31518); infinite if no column varies"),
        ("norms", "histogram with 128 bins for each power of two: quantiles are within 1/256 of a row's norm"),
        ("massive dimensions", f"largest magnitude above {MASSIVE} times the median dimension's root mean square"),
        ("outlier dimensions", f"root mean square above {OUTLIER} times the median dimension's"),
        ("massive tokens", f"norm above {MASSIVE} times the layer's median norm"),
        (
            "repeated rows",
            "equal bit by bit: exact up to 1,023 different rows, above that estimated from a hashed sample of 1,024",
        ),
    ]
    page.how += page.how_sampled
    if repeated is not None:
        page.how.append(("repeated examples", repeated.how))
    return page


def _readable(
    page: Page,
    store: Store,
    names: Sequence[Layer],
    selected: ReportedRows,
    saved_stats: dict[Layer, Stats],
    tell: Tell,
) -> dict[Layer, Stats]:
    """The statistics of the layers that can be read. Adds the errors of the others, and saved ones to ``saved_stats``."""
    selection, rows = selected
    stats_by_layer: dict[Layer, Stats] = {}
    errors: dict[str, tuple[ActshardError, list[Layer]]] = {}
    for number, name in enumerate(names):

        def report_progress(what: str, done: int, total: int, before: int = number) -> None:
            tell(what, before * total + done, len(names) * total)

        try:
            layer_stats = kept_of(store, [name], selection) if rows is None else {}
            saved_stats |= layer_stats
            stats_by_layer |= measured(
                store, name, selection=selection, rows=rows, saved_stats=layer_stats, progress=report_progress
            )
        except OF_DATA as error:
            errors.setdefault(str(error), (error, []))[1].append(name)
    for first, layers in errors.values():
        if not stats_by_layer:
            page.damaged("cannot be read", first)
            break
        where = f"{'layer' if len(layers) == 1 else 'layers'} {cut(listing(layers), 80)}"
        page.damaged("cannot be read, the report covers the other layers", first, where)
    return stats_by_layer


def _left_out(selection: Selection) -> str:
    """The arguments that leave out rows of these tokens."""
    masks = ["ignore_labels"] * bool(selection.ignore_labels) + ["keep"] * (selection.keep is not None)
    limits = [f"{name}={getattr(selection, name)!r}" for name in ("max_norm", "min_token") if getattr(selection, name)]
    return "".join(f", {text}" for text in (*masks, *limits))


def _kept(saved_stats: Measured, stats_by_layer: Measured) -> str:
    if not saved_stats:
        return ""
    which = "all" if len(saved_stats) == len(stats_by_layer) else many(len(saved_stats), "layer")
    return f"; {which} read from files that actshard stats --save kept, and the dataset's files are unchanged since"


def _facts(store: Store) -> Iterator[tuple[str, str]]:
    about = store.info()
    yield "format", about["format"]
    if about["model"]:
        yield "model", cut(about["model"], 80)
    yield "examples", f"{about['examples']:,}"
    if about["tokens"] is not None:
        low, high = about["tokens_per_example"]
        yield (
            "tokens",
            f"{about['tokens']:,} ({low:,} each)" if low == high else f"{about['tokens']:,} ({low:,} to {high:,} each)",
        )
    yield "layers", cut(f"{len(store.layers)}: {listing(store.layers)}", 80)
    yield "d_model", f"{store.d_model:,}"
    yield "dtype", about["dtype"]
    if about["bytes"] is not None:
        yield "size", shown_bytes(about["bytes"])
        if about["ratio"] is not None and (packed := _packed_bytes(store, about["bytes"])) is not None:
            saved = 1 - packed / about["bytes"]
            yield (
                "packed",
                f'about {shown_bytes(packed)} without loss, {saved:.0%} less: convert to zarr with pack="lossless"',
            )
    yield "path", cut(about["path"], 200)


def _packed_bytes(store: Store, size: int) -> int | None:
    """Bytes of a dataset as packed Zarr, estimated from a sample; None if that saves little, or cannot be estimated."""
    if size < _LARGE or not store.layers:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # losses of columns are those of a conversion, which names them
            packed = preview(store, Path("packed"), "zarr", version=3, pack="lossless")[0]
    except ActshardError:  # damaged rows, which the report has elsewhere
        return None
    return packed.bytes if packed.refused is None and packed.bytes < _WORTH * size else None


def _draw(page: Page, store: Store, stats_by_layer: Measured) -> None:
    chosen = {layer: stats_by_layer[layer] for layer in spread(list(stats_by_layer))}
    if len(stats_by_layer) > 1:
        page.plot("norms", "Norms by layer", lambda: plot.norms(store, stats=stats_by_layer))
    page.plot("histogram", "Histogram of norms", lambda: plot.histogram(store, stats=chosen))
    if any(len(stats.norms_by_position.first) > 1 for stats in chosen.values()):
        page.plot("positions", "Norm by position", lambda: plot.positions(store, stats=chosen))
    if len(stats_by_layer) > 1:
        page.plot("gamma", "Gamma by layer", lambda: plot.gamma(store, stats=stats_by_layer))
    page.plot("ranges", "Range of values by layer", lambda: plot.ranges(store, stats=stats_by_layer))
    for layer, stats in chosen.items():
        page.plot(
            "dimensions",
            f"Dimensions of layer {cut(plain(layer), 60)}",
            lambda layer=layer, stats=stats: plot.dimensions(store, layer, stats=stats),  # type: ignore[misc]  # mypy infers no lambda whose defaults keep the loop's values
        )


_LAYERS = (
    "Norms are L2 norms of rows. Over all dimensions: std is the root of the mean variance, min and max the extremes, zeros the "
    "share of values equal to 0; repeated is the share of rows with finite norms that equal an earlier one. Dims are numbers of "
    "dimensions, NaN and infinite numbers of values."
)


def _table(stats_by_layer: Measured) -> Grid:
    columns = ["layer", "rows", "mean norm", "median", "99.9 %", "gamma", "std", "min", "max", "zeros"]
    columns += ["repeated", "massive rows", "massive dims", "constant dims", "NaN", "infinite"]
    rows = []
    for layer, stats in list(stats_by_layer.items())[:MOST_ROWS]:
        variance = stats.variance[np.isfinite(stats.variance)]
        values = max(stats.rows * len(stats.zeros), 1)
        rows.append(
            [
                cut(plain(layer), 60),
                f"{stats.rows:,}",
                figure(stats.mean_norm),
                figure(stats.norms.median),
                figure(float(stats.norms.quantile(0.999))),
                _gamma(stats),
                figure(float(np.sqrt(variance.mean())) if variance.size else float("nan")),
                figure(float(stats.min.min(initial=np.inf))),
                figure(float(stats.max.max(initial=-np.inf))),
                share(int(stats.zeros.sum()) / values),
                _repeated_share(stats.repeats),
                f"{_massive_rows(stats):,}",
                f"{len(stats.massive_columns):,}",
                f"{int(np.count_nonzero(stats.min == stats.max)):,}",
                f"{int(stats.nan.sum()):,}",
                f"{int(stats.inf.sum()):,}",
            ]
        )
    return Grid(columns, rows, max(len(stats_by_layer) - MOST_ROWS, 0))


def _gamma(stats: Stats) -> str:
    """Gamma in a table: infinite for rows that are equal and not 0."""
    if not np.isnan(stats.gamma):
        return figure(stats.gamma)
    return "infinite" if np.nan_to_num(stats.mean).any() else "-"


def _massive_rows(stats: Stats) -> int:
    """The number of massive rows. All are counted; ``stats.massive_rows`` are at most 16."""
    count = len(stats.massive_rows)
    bound = MASSIVE * stats.norms.median
    return max(count, int(stats.norms.counts[stats.norms.edges[:-1] > bound].sum())) if count else 0


def _massive(store: Store, stats_by_layer: Measured, decode: Tokenizer | None) -> Iterator[tuple[str, str, Grid]]:
    """Tables of massive dimensions and tokens."""
    cells = [
        [
            cut(plain(layer), 60),
            str(entry.column),
            figure(entry.magnitude),
            f"{entry.magnitude / median:,.0f}",
            f"{entry.example:,}",
            f"{entry.token:,}",
        ]
        for layer, stats in stats_by_layer.items()
        for median in [float(np.median(stats.rms)) if stats.rows else 0.0]
        for entry in stats.massive_columns
    ]
    if cells:
        columns = ["layer", "dimension", "largest magnitude", "times the median", "example", "token"]
        text = "Dimensions whose largest magnitude is over 100 times the median dimension's root mean square, and where it is."
        yield "Massive dimensions", text, Grid(columns, cells[:MOST_MASSIVE], max(len(cells) - MOST_MASSIVE, 0))
    massive_stats = dict(
        [(layer, stats) for layer, stats in stats_by_layer.items() if stats.massive_rows][:MOST_MASSIVE]
    )
    try:
        rows = massive_rows(store, massive_stats, tokenizer=decode)
    except OF_DATA:  # columns of texts; verify names the damage
        return
    if rows:
        columns = ["layer", "example", "token", "norm", "times the median", "text of the token", "example begins"]
        cells = [
            [
                cut(plain(x.layer), 60),
                f"{x.example:,}",
                f"{x.token:,}",
                figure(x.norm),
                f"{x.times:,.0f}",
                quoted(x.text) if x.text is not None else f"id {x.id}" if x.id is not None else "-",
                cut(x.context, 40) if x.context is not None else "-",
            ]
            for x in rows
        ]
        text = (
            "Rows whose norm is over 100 times the layer's median norm, such as attention sinks: up to 5 of each layer."
        )
        yield "Massive tokens", text, Grid(columns, cells[:MOST_MASSIVE], max(len(cells) - MOST_MASSIVE, 0), (0, 5, 6))


def _repeated_share(repeats: Repeats) -> str:
    return share(repeats.fraction) if repeats.exact else f"{repeats.fraction:.0%} ± {max(repeats.error, 0.01):.0%}"


def _repeated(page: Page, store: Store, stats_by_layer: Measured, tell: Tell) -> Repeated | None:
    """Adds repeated examples."""
    try:
        repeated = repeated_examples(
            store, stats_by_layer, progress=lambda done, total: tell("repeated examples", done, total)
        )
        texts = [text_of(store, earlier) for _, earlier in repeated.pairs] if repeated is not None else []
    except OF_DATA:  # verify names the damage
        return None
    if repeated is not None and repeated.repeated:
        page.advice += repeated.advice()
        rows = [
            [f"{later:,}", f"{earlier:,}", "-" if text is None else cut(text, 40)]
            for (later, earlier), text in zip(repeated.pairs, texts, strict=True)
        ]
        columns = ["example", "equals example", "text begins"]
        page.grids.append(("Repeated examples", "", Grid(columns, rows, repeated.repeated - len(rows), (2,))))
    return repeated


def _samples(
    store: Store, stats_by_layer: Measured, count: int, decode: Tokenizer | None, tell: Tell
) -> tuple[list[ShownExample], str]:
    """Evenly spaced examples in the last of the layers, and a description of the unit of their norms."""
    n = min(count, store.num_examples)
    layer, stats = list(stats_by_layer.items())[-1]
    inspections: list[Examined] = []
    for i in range(n):
        tell("texts", i, n)
        try:
            inspections.append(examine(store, i * store.num_examples // n, layer, tokenizer=decode, largest=1))
        except (NotStoredError, *OF_DATA):  # examples may lack a layer; verify names the damage
            continue
    pooled = all(len(inspection) <= 1 for inspection in inspections)
    divisor = "the layer's mean norm" if pooled else "the example's median"
    samples = [_sample(inspection, stats.mean_norm if pooled else inspection.median) for inspection in inspections]
    return samples, f"layer {cut(plain(layer), 60)}; norm of a token divided by {divisor}"


def _sample(inspection: Examined, divisor: float) -> ShownExample:
    words = []
    for i in range(min(len(inspection), MOST_TOKENS)):
        if inspection.pieces is not None:
            text = cut(inspection.pieces[i], 40)
        elif len(inspection) == 1 and inspection.text is not None:
            text = cut(inspection.text)
        else:
            text = str(i if inspection.ids is None else inspection.ids[i])
        norm = float(inspection.norms[i])
        largest = (
            f", dimension {inspection.dimensions[i, 0]}: {inspection.values[i, 0]:.3g}"
            if inspection.values.shape[1]
            else ""
        )
        title = f"token {i}: norm {norm:.4g}{largest}"
        words.append(Word(text, colour_of(norm, divisor), title))
    shown = cut(inspection.text or "") if inspection.pieces is None and len(inspection) != 1 else ""
    what = "norm" if len(inspection) == 1 else "median norm"
    median = f", {what} {inspection.median:.4g}" if np.isfinite(inspection.median) else ""
    tokens = many(len(inspection), "token")
    return ShownExample(f"example {inspection.example:,}: {tokens}{median}", shown, words, len(inspection) - len(words))
