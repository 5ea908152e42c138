"""Checks of the results of a deep check's tasks, compared with the dataset's own counts, before a commit combines them.

Rows are not read again, so that possible but wrong numbers of NaN values, hashes, or columns are not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actshard.base._arguments import many
from actshard.base._json import show
from actshard.base._schema import OMITTED, Amount, AnyText
from actshard.base.errors import ActshardError, FormatError
from actshard.base.layers import Layer, plain
from actshard.base.request import DigestTexts
from actshard.formats.report import NOT_OF_DATA, Report
from actshard.plan.checking import ExamplesTask, LayoutValue, PlaceText, Span
from actshard.plan.data import Planned
from actshard.plan.verb import Result
from actshard.reading.store import Store
from actshard.reading.verifying.deep import ODD, PLACES, scan


class RowPlace(NamedTuple):
    """The place of a row."""

    example: Amount
    token: Amount


class OddRows(NamedTuple):
    """A number of rows, and the places of the first ones."""

    rows: Amount
    places: tuple[RowPlace, ...]


@dataclass(frozen=True)
class LayerScan:
    """A scan of a layer, without its arrays; see :func:`actshard.reading.verifying.deep.scan`."""

    dtype: str
    rows: Amount
    nan: Amount
    infinite: Amount
    nan_rows: OddRows
    infinite_rows: OddRows
    zero_rows: OddRows
    constant_rows: OddRows
    digests: DigestTexts
    """The digest of the layer's rows."""


@dataclass(frozen=True)
class ErrorRecord:
    """An error, as :func:`actshard.base.errors.as_plain` writes it."""

    error: str
    detail: AnyText
    path: AnyText | None
    offset: int | None
    reason: AnyText | None
    code: str | None
    errno: int | None
    filename: AnyText | None


@dataclass(frozen=True)
class FailedScan:
    """A layer that could not be scanned."""

    error: ErrorRecord


@dataclass(frozen=True)
class VerifyArguments:
    """The arguments of :func:`actshard.plan.verify`.

    Attributes:
        path, format, layout, deep: as they were passed.
        examples: number of examples; None if only files are checked.
        wide: indices of the layers with several stored types.
    """

    path: PlaceText
    format: str | None
    layout: LayoutValue
    deep: bool
    examples: Amount | None
    wide: tuple[Amount, ...]


@dataclass(frozen=True)
class VerifyResult:
    """The result of a task. Task 0 also has the report about the files, and whether their check reached the values."""

    examples: Span
    bytes: Amount
    report: Mapping[str, Any] | None = field(default=None, metadata=OMITTED)
    values: bool | None = field(default=None, metadata=OMITTED)
    layers: tuple[LayerScan | FailedScan, ...] = ()
    units: Amount = 0


def check_values(plan: Planned, results: Sequence[Result]) -> None:
    """Raises FormatError for results with other examples than their tasks, or with an impossible report."""
    for result in results:
        task, value = plan.tasks_as(ExamplesTask)[result.task], result.read(VerifyResult)
        for name in ("examples", "bytes"):
            if (actual := getattr(value, name)) != (expected := getattr(task, name)):
                raise result.wrong(name, show(expected), actual)
    if results:
        _check_report(plan.arguments_as(VerifyArguments), results[0])


def _check_report(arguments: VerifyArguments, first: Result) -> None:
    """Checks task 0's report about the files: its values cannot be compared with anything else."""
    value = first.read(VerifyResult)
    record, reached = dict(value.report or {}), value.values
    try:
        report = Report.of_dict(record)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise first.wrong("report", "the report of a check", f"{error!r}") from error
    if any(type(n) is not int or n < 0 for n in record["checked"].values()):
        raise first.wrong("report.checked", "numbers of at least 0", record["checked"])
    if record["deep"] is not arguments.deep:
        raise first.wrong("report.deep", show(arguments.deep), record["deep"])
    if reached is None or (arguments.examples is None and reached):
        raise first.wrong("values", "false" if arguments.examples is None else "true or false", reached)
    if arguments.examples is None:
        return
    if not reached and not report.errors:
        raise first.wrong("values", "true, because the report has no error", reached)
    if reached and report.checked.get("examples", 0) < arguments.examples:
        raise first.wrong("report.checked.examples", f"{arguments.examples:,}", report.checked.get("examples"))


def check_scans(plan: Planned, store: Store, results: Sequence[Result]) -> None:
    """Raises FormatError for scans that differ from the dataset: its layers, rows, dtype, examples and tokens."""
    values = [result.read(VerifyResult) for result in results]
    for result, value in zip(results, values, strict=True):
        if len(value.layers) != len(store.layers):
            raise result.wrong("layers", f"the scans of {len(store.layers)} layers", len(value.layers))
        if value.units != len(value.layers):
            raise result.wrong("units", str(len(value.layers)), value.units)
    wide, ends = set(plan.arguments_as(VerifyArguments).wide), None
    for group, layer in enumerate(store.layers):
        if not group or store.contents.layers_differ:
            ends = _ends(store, layer)
        check: _LayerChecks | None = None
        for result, value in zip(results, values, strict=True):
            layer_scan = value.layers[group]
            if isinstance(layer_scan, LayerScan):
                check = check or _LayerChecks(store, layer, group in wide, ends)
                check(result, value.examples, layer_scan)
    size = store.d_model * store.dtype.itemsize
    for result, value in zip(results, values, strict=True) if size else ():
        # The rows of all layers together are compared with the plan, which needs no token counts.
        rows, scans = value.bytes // size, [part for part in value.layers if isinstance(part, LayerScan)]
        total, failed = sum(part.rows for part in scans), len(scans) < len(value.layers)
        if total > rows or (total < rows and not failed):
            raise result.wrong("rows of all layers", f"at most {rows:,}" if failed else f"{rows:,}", total)


def _ends(store: Store, layer: Layer) -> NDArray[np.int64] | None:
    """Number of rows before each example, and of all; None if counting them would read the dataset, or fails."""
    if not store.contents.counts_are_cheap:
        return None
    try:
        return np.concatenate([[0], np.cumsum(np.maximum(store.tokens_in(layer), 0))])
    except NOT_OF_DATA:
        raise
    except ActshardError:  # a file was damaged after the plan was made: the tasks report it
        return None


class _LayerChecks:
    """The checks of the scans of one layer."""

    def __init__(self, store: Store, layer: Layer, wide: bool, ends: NDArray[np.int64] | None) -> None:
        self.layer, self.ends = layer, ends
        nothing = scan(store, layer, lambda *_: None, (0, 0), wide)  # reads no rows
        if isinstance(nothing, ActshardError):
            raise nothing
        self.dtype: str = nothing["dtype"]
        # The parts of complex values are counted.
        self.values = store.d_model * (2 if self.dtype.startswith("complex") else 1)

    def __call__(self, result: Result, examples: Span, part: LayerScan) -> None:
        """Raises FormatError for a scan that is impossible for these examples."""
        if part.dtype != self.dtype:
            raise self._wrong(result, "dtype", self.dtype, part.dtype)
        if part.digests is not None and len(part.digests) != 1:
            raise self._wrong(result, "digests", "the digest of a layer", part.digests)
        rows = part.rows
        if self.ends is not None and rows != (expected := int(self.ends[examples.end] - self.ends[examples.first])):
            raise self._wrong(result, "rows", f"{expected:,}", rows)
        odd: dict[str, OddRows] = {name: getattr(part, name) for name in ODD}
        for name, value in odd.items():
            self._check_odd(result, examples, rows, name, value)
        if part.zero_rows.rows + max(value.rows for name, value in odd.items() if name != "zero_rows") > rows:
            counts = [value.rows for value in odd.values()]
            raise self._wrong(result, "zero_rows", f"at most {rows:,} with the other rows", counts)
        for name, count, least in (
            ("nan", part.nan, part.nan_rows.rows),
            ("infinite", part.infinite, part.infinite_rows.rows),
        ):
            if not least <= count <= least * self.values:
                limits = f"{least:,} to {least * self.values:,} values in {many(least, 'row')}" if least else "0"
                raise self._wrong(result, name, limits, count)
        if part.nan + part.infinite > rows * self.values:
            raise self._wrong(result, "nan + infinite", f"at most {rows * self.values:,}", part.nan + part.infinite)

    def _check_odd(self, result: Result, examples: Span, rows: int, name: str, value: OddRows) -> None:
        """Checks a number of rows and the places of the first ones."""
        if value.rows > rows:
            raise self._wrong(result, name, f"a number of rows from 0 to {rows:,}, and places", value)
        if len(value.places) != min(value.rows, PLACES):
            raise self._wrong(result, name, many(min(value.rows, PLACES), "place"), value.places)
        for place in value.places:
            if not examples.first <= place.example < examples.end:
                limits = f"examples from {examples.first:,} to {examples.end - 1:,}"
                raise self._wrong(result, name, limits, place)
            tokens = rows if self.ends is None else int(self.ends[place.example + 1] - self.ends[place.example])
            if place.token >= tokens:
                raise self._wrong(result, name, f"tokens below {tokens:,} in example {place.example:,}", place)
        if any(a >= b for a, b in itertools.pairwise(value.places)):
            raise self._wrong(result, name, "ascending places", value.places)

    def _wrong(self, result: Result, where: str, expected: str, found: object) -> FormatError:
        return result.wrong(f"layer {plain(self.layer)}: {where}", expected, found)
