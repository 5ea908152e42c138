"""Plans of deep checks: tasks scan ranges of examples, and the commit combines their scans to one report.

.. code-block:: text

    WORK/tasks/00017/columns.npy    (layers, 3, d_model) uint64: magnitudes, differences, bits of the first row
    WORK/tasks/00017/hashes.npy     (examples,) uint64: a hash of each example's rows in all layers

Task 0 also checks the files, as without ``deep``. For a dataset that cannot be opened or has no values, there is only task 0.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actshard import formats
from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base._json import show
from actshard.base._schema import OMITTED, Amount, AnyText, json_values
from actshard.base.errors import ActshardError, ArgumentError, FormatError, as_plain, from_plain
from actshard.base.layers import Layer, plain
from actshard.base.location import Location
from actshard.base.request import DigestTexts, digests_of
from actshard.formats.report import NOT_OF_DATA, Report
from actshard.plan import process
from actshard.plan.data import Planned, Predicted, identity
from actshard.plan.needs import needs
from actshard.plan.plan import Plan
from actshard.plan.reading import (
    NO_LISTING,
    broken,
    described,
    keep,
    kept,
    notes,
    place,
    save,
    saved,
    wide_groups,
    work_folder,
)
from actshard.plan.verb import (
    Beat,
    ExamplesTask,
    LayoutValue,
    OpenArguments,
    PlaceText,
    Result,
    Span,
    Verb,
    check_spans,
    shortened,
)
from actshard.reading.finding import existing_anywhere, find_any
from actshard.reading.inputs import LOOKED_AT, Input, inputs_of
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.reading.verifying import check_format, format_for_layout, of_path
from actshard.reading.verifying.deep import ODD, PLACES, add_findings, first_row, joined, scan, together
from actshard.writing.converting.blocks import balanced

# Checks of the results of a deep check's tasks, compared with the dataset's own counts, before a commit combines them.
#
# Rows are not read again, so that possible but wrong numbers of NaN values, hashes, or columns are not found.


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
        for row in value.places:
            if not examples.first <= row.example < examples.end:
                limits = f"examples from {examples.first:,} to {examples.end - 1:,}"
                raise self._wrong(result, name, limits, row)
            tokens = rows if self.ends is None else int(self.ends[row.example + 1] - self.ends[row.example])
            if row.token >= tokens:
                raise self._wrong(result, name, f"tokens below {tokens:,} in example {row.example:,}", row)
        if any(a >= b for a, b in itertools.pairwise(value.places)):
            raise self._wrong(result, name, "ascending places", value.places)

    def _wrong(self, result: Result, where: str, expected: str, found: object) -> FormatError:
        return result.wrong(f"layer {plain(self.layer)}: {where}", expected, found)


COLUMNS, HASHES = "columns.npy", "hashes.npy"
_CHECKED = 1000
"""Memory of the check of files is measured by running it, for datasets with at most this number of files."""
_EXAMPLE_WEIGHT = 64
"""Bytes added to the size of each example, so that ranges of empty examples are divided, too."""


def verify(
    path: str | os.PathLike[str],
    *,
    tasks: int = 64,
    deep: bool = True,
    format: str | None = None,
    layout: str | Mapping[str, object] | None | None = None,
    work: str | os.PathLike[str] | None = None,
) -> Plan:
    """Plans the check of a dataset. For any number of tasks, the report equals that of :func:`actshard.verify`.

    Reads metadata and token counts, and writes nothing. ``plan.commit()`` returns the report and also writes it next to the
    working folder, as ``WORK.json``: a second ``commit()`` returns it again.

    Args:
        path: a path or a URL that all machines can read. Credentials come from each machine's environment.
        tasks: maximum number of tasks. There are fewer if there are fewer examples; see ``plan.notes``.
        deep: whether to read every row. If False, one task checks the files.
        format: as for :func:`actshard.verify`.
        layout: as for :func:`actshard.verify`.
        work: working folder, outside of the dataset, which all machines must share; None: ``.actshard-verify-XXXXXXXX`` in the
            current folder.

    Raises:
        Errors of :func:`actshard.verify`.
    """
    tasks, deep = _arguments.whole(tasks, "tasks", 1), bool(_arguments.switch(deep, "deep"))
    where, files = place(path), described(layout, format)
    root = existing_anywhere(where, None, None)
    check_format(format)
    if files is not None:
        format_for_layout(root, format, files)  # raises if nothing takes it
    opened = _opened(where, format, files) if deep else None
    store, weights, wide = opened or (None, np.zeros(0, np.int64), [])
    arguments = VerifyArguments(where, format, files, deep, None if store is None else len(weights), tuple(wide))
    firsts = balanced(weights + _EXAMPLE_WEIGHT, np.arange(len(weights)), tasks) if len(weights) else [0]
    bounds = [*firsts, len(weights)]
    plan_tasks = [ExamplesTask(Span(a, b), int(weights[a:b].sum())) for a, b in itertools.pairwise(bounds)]
    inputs = _files(root) if store is None else inputs_of(store)
    if inputs is None:
        raise ArgumentError(NO_LISTING)
    folder = work_folder("verify", identity("verify", arguments, inputs, plan_tasks), where, work)
    why = "only the files can be checked" if store is None else f"the dataset has {many(len(weights), 'example')}"
    predicted = _predict(store, (where, format, files), [task.examples for task in plan_tasks], wide, inputs)
    noted = notes(len(plan_tasks), tasks, why, folder)
    return Plan("verify", json_values(arguments), inputs, tuple(json_values(plan_tasks)), predicted, folder, noted)


def _predict(
    store: Store | None,
    open_arguments: OpenArguments,
    spans: Sequence[Span],
    wide: Sequence[int],
    inputs: Sequence[Input],
) -> Predicted:
    """Predicts bytes to read, memory and disk space."""
    if store is None:
        return Predicted(0, 0, 0, process.checking(open_arguments, inputs if len(inputs) <= _CHECKED else (), __name__))
    row = store.d_model * store.dtype.itemsize
    ends = [np.concatenate([[0], np.cumsum(np.maximum(store.tokens_in(layer), 0))]) * row for layer in store.layers]
    ranges = [[(g, a, b, int(layer_ends[b] - layer_ends[a])) for g, layer_ends in enumerate(ends)] for a, b in spans]

    def planned(g: int, a: int, b: int, size: int) -> tuple[int | None, int]:
        try:
            return store.rows.scan_needs(g, (a, b), g in wide, size)
        except NOT_OF_DATA:
            raise
        except ActshardError:  # a damaged file: its task will report it
            return int(ends[g][b] - ends[g][a]), 0

    predicted_needs = needs(
        store,
        ranges,
        planned,
        inputs,
        lambda g, a, b: (a, b),
    )
    columns = 8 * 3 * len(store.layers) * store.d_model
    task_memory = columns + 8 * max(b - a for a, b in spans)
    checks = len(inputs) <= _CHECKED
    reads_columns = bool((store.contents.whole or store.contents).column_names)
    tables = ["pyarrow"] if reads_columns or not checks else []
    memory = process.opening(store, open_arguments, inputs, __name__, *tables, check=checks)
    memory += max(predicted_needs.memory, predicted_needs.loading) + task_memory
    return Predicted(
        0,
        0,
        predicted_needs.read + _of_records(store, inputs),
        memory,
        scratch=8 * store.num_examples + columns * len(spans),
    )


def _of_records(store: Store, inputs: Sequence[Input]) -> int:
    """Bytes of files whose records have checksums: task 0 reads them whole."""
    endings = formats.get(store.format).records_summed
    if not endings:
        return 0
    row_files = {str(Location.at(file)) for file in store.contents.files()}
    sizes = {input_file.path: input_file.size or 0 for input_file in inputs if input_file.path in row_files}
    summed = [size for path, size in sizes.items() if path.endswith(endings)]
    return sum(summed) * len(row_files) // max(len(sizes), 1)


def _opened(
    where: str, format: str | None, layout: str | Mapping[str, object] | None
) -> tuple[Store, NDArray[np.int64], list[int]] | None:
    """Returns the store, its bytes per example, and its layers with several stored types; None if there are no values to check."""
    try:
        store = _store(where, format, layout)
        weights = np.zeros(store.num_examples, np.int64)
        for layer in store.layers:
            weights += np.maximum(store.tokens_in(layer), 0)
        wide = wide_groups(store, list(range(len(store.layers))))
    except NOT_OF_DATA:
        raise
    except ActshardError:
        return None
    if not store.layers or not store.num_examples:
        return None
    return store, weights * (store.d_model * store.dtype.itemsize), wide


def _store(where: str, format: str | None, layout: str | Mapping[str, object] | None) -> Store:
    """The store that :func:`actshard.verify` reads."""
    root = existing_anywhere(where, None, None)
    if format is None:
        root, format = find_any(root)
    return open_quietly(root, format, "pread", cache=False, layout=layout)


def _files(root: Location) -> tuple[Input, ...] | None:
    """The files below a path; if there are more than :data:`LOOKED_AT`, evenly spaced ones."""
    if root.kind() == "file":
        return (Input.at(root),)
    if not root.lists:
        return None
    root.list_below()
    paths = [file for file, _ in root.files()]
    return tuple(map(Input.at, paths[:: max(1, -(-len(paths) // LOOKED_AT))]))


class Verifying(Verb[Store]):
    """Runs the tasks of a check."""

    name = "verify"

    def open(self, plan: Planned) -> Store:
        """The dataset."""
        arguments = plan.arguments_as(VerifyArguments)
        return _store(arguments.path, arguments.format, arguments.layout)

    def check_plan(self, plan: Planned, path: Path) -> None:
        """Raises FormatError for arguments or tasks that :func:`verify` does not make."""
        examples = plan.arguments_as(VerifyArguments, path).examples
        spans = [task.examples for task in plan.tasks_as(ExamplesTask, path)]
        check_spans(spans, "examples", examples or 0, path)

    def run(self, plan: Planned, task: int, folder: Path, tell: Beat) -> VerifyResult:
        """Scans the task's examples; task 0 also checks the files."""
        arguments, part = plan.arguments_as(VerifyArguments), plan.tasks_as(ExamplesTask)[task]
        value = VerifyResult(part.examples, part.bytes)
        store = None if arguments.examples is None else self.opened(plan)
        if task == 0:
            reached: list[bool] = []
            report = of_path(
                arguments.path,
                arguments.format,
                deep=arguments.deep,
                layout=arguments.layout,
                store=store,
                values=None if store is None else lambda store, report, tell: reached.append(True),
            )
            value = replace(value, report=report.as_dict(), values=bool(reached))
        if store is None:
            return value
        every, columns = None, np.zeros((len(store.layers), 3, store.d_model), np.uint64)
        layers: list[LayerScan | FailedScan] = []
        for group, layer in enumerate(store.layers):
            tell(group, len(store.layers))
            layer_scan = scan(store, layer, lambda *_: None, part.examples, group in arguments.wide)
            if isinstance(layer_scan, ActshardError):
                if isinstance(layer_scan, NOT_OF_DATA):
                    raise layer_scan
                layers.append(FailedScan(ErrorRecord(**as_plain(layer_scan))))
                continue
            values = {field.name: layer_scan[field.name] for field in fields(LayerScan)}
            layers.append(LayerScan(**values | {"digests": tuple(map(str, layer_scan["digests"]))}))
            columns[group] = layer_scan["magnitudes"], layer_scan["differences"], first_row(layer_scan)
            every = together(every, layer_scan["hashes"])
        save(folder / COLUMNS, columns)
        save(folder / HASHES, np.zeros(0, np.uint64) if every is None else every)
        return replace(value, layers=tuple(layers), units=len(layers))

    undivided = "the plan only checks files, which is not measured"

    def part(self, plan: Planned, limit: int) -> Mapping[str, object] | None:
        """The first examples of the last task. The check of the files is not measured."""
        return (
            None
            if plan.arguments_as(VerifyArguments).examples is None
            else shortened(plan.tasks[-1], "examples", limit)
        )

    def check(self, plan: Planned, results: Sequence[Result]) -> None:
        """Raises FormatError if a result has other examples than its task, or impossible scans."""
        check_values(plan, results)
        if plan.arguments_as(VerifyArguments).examples is not None:
            check_scans(plan, self.opened(plan), results)

    def commit(self, plan: Planned, results: Sequence[Result]) -> Report:
        """Combines the report about the files with the scans."""
        if (over := self.committed(plan)) is not None:
            return over
        try:
            report = Report.of_dict(results[0].value["report"])
            report.layout = plan.arguments_as(VerifyArguments).layout
            if results[0].value["values"]:
                self._add_values(plan, results, report)
        except (LookupError, TypeError, ValueError) as error:
            raise FormatError(f"expected the results of a check: {error!r:.200}", path=plan.work) from error
        keep(plan, report.as_dict())
        return report

    def _add_values(self, plan: Planned, results: Sequence[Result], report: Report) -> None:
        """Combines the scans task by task, so that only one task's columns are in memory in addition to the combined ones."""
        store = self.opened(plan)
        scans: list[dict[str, object] | None] = [None] * len(store.layers)
        errors: dict[int, ActshardError] = {}
        every, filled = np.zeros(store.num_examples, np.uint64), 0
        for result in results:
            columns = saved(result.folder / COLUMNS, np.uint64, 3)
            if columns.shape != (len(store.layers), 3, store.d_model):
                raise FormatError(f"expected columns of all layers, found {columns.shape}", path=result.folder)
            value = result.read(VerifyResult)
            for group, part in enumerate(value.layers):
                if isinstance(part, FailedScan):
                    errors.setdefault(group, from_plain(vars(part.error)))
                    continue
                arrays = dict(zip(("magnitudes", "differences", "first"), columns[group], strict=True))
                scans[group] = joined(scans[group], vars(part) | arrays | {"digests": digests_of(part.digests)})
            hashes = saved(result.folder / HASHES, np.uint64, 1)
            count = value.examples.end - value.examples.first
            if len(hashes) != count and not all(isinstance(part, FailedScan) for part in value.layers):
                raise result.wrong(HASHES, f"{count:,} hashes", len(hashes))
            every[filled : filled + len(hashes)] = hashes[: max(len(every) - filled, 0)]
            filled += len(hashes)
        if not errors and filled != store.num_examples:
            raise FormatError(f"expected hashes of {store.num_examples:,} examples, found {filled:,}", path=plan.work)
        outcomes = [errors.get(group) or layer_scan for group, layer_scan in enumerate(scans)]
        if None in outcomes:
            raise FormatError("expected scans of all layers", path=plan.work)
        add_findings(store, [layer_scan for layer_scan in outcomes if layer_scan is not None], report, every)

    def committed(self, plan: Planned) -> Report | None:
        """The report of an earlier commit, from the file next to the working folder."""
        record = kept(plan)
        if record is None:
            return None
        try:
            report = Report.of_dict(record)
            report.layout = plan.arguments_as(VerifyArguments).layout
        except (LookupError, TypeError, ValueError) as error:
            raise broken(plan, error) from error
        return report
