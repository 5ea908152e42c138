"""The parts of a report that come from samples of rows: spectrum, similarity of layers, separability of a label."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from actshard import plot
from actshard.base.errors import ArgumentError, DtypeError, MissingFileError, NotStoredError
from actshard.base.location import Location
from actshard.looking.reporting.page import OF_DATA, Page
from actshard.plot.activations import Measured
from actshard.plot.norms import spread
from actshard.plot.sampled import compared, label_of
from actshard.reading.store import Store
from actshard.streaming.selection import Selection

if TYPE_CHECKING:
    from actshard.base.layers import Layer
    from actshard.formats.format import Tell

ROWS = 2_048
"""Rows of the sample of a spectrum, and of similarities: seconds for the widest models."""
EXAMPLES = 1_024
_NOT = (ArgumentError, DtypeError, NotStoredError, MissingFileError, *OF_DATA)
"""Errors of datasets of which there is no such sample: verify names damage."""


def add(page: Page, store: Store, stats_by_layer: Measured, selection: Selection, tell: Tell) -> None:
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
