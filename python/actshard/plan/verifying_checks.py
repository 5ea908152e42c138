"""Checks of the results of a deep check's tasks, compared with the dataset's own counts, before a commit combines them.

Rows are not read again, so that possible but wrong numbers of NaN values, hashes, or columns are not found.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actshard._arguments import many
from actshard._json import MAX_INT, show
from actshard.errors import ActshardError, FormatError
from actshard.formats.report import NOT_OF_DATA, Report
from actshard.layers import Layer, plain
from actshard.plan.data import Planned
from actshard.plan.verb import Result
from actshard.store import Store
from actshard.verifying.deep import ODD, PLACES, scan

SMALL = ("dtype", "rows", "nan", "infinite", *ODD)
"""The fields of a scan in ``result.json``."""
_ERROR: Mapping[str, type | tuple[type, ...]] = {
    "error": str,
    "detail": str,
    "path": (str, type(None)),
    "offset": (int, type(None)),
    "reason": (str, type(None)),
    "code": (str, type(None)),
    "errno": (int, type(None)),
    "filename": (str, type(None)),
}
"""The fields of an error, as :func:`actshard.errors.as_plain` writes it."""


def wrong(result: Result, where: str, expected: str, found: Any) -> FormatError:
    """The error for a value that the task cannot have written."""
    said = f"{found:,}" if type(found) is int else show(found)
    return FormatError(
        f"task {result.task}: {where}: expected {expected}, found {said}; remove the folder of task {result.task}, and run it "
        "again",
        path=result.folder,
    )


def check_values(plan: Planned, results: Sequence[Result]) -> None:
    """Raises FormatError for results with other examples than their tasks, or with an impossible report."""
    given = plan.arguments
    for result in results:
        task, value = plan.tasks[result.task], result.value
        for name in ("examples", "bytes"):
            if value.get(name) != task[name] or isinstance(value.get(name), bool):
                raise wrong(result, name, str(task[name]), value.get(name))
    if results:
        _check_report(given, results[0])


def _check_report(given: Mapping[str, Any], first: Result) -> None:
    """Checks task 0's report about the files: its values cannot be compared with anything else."""
    reached = first.value.get("values")
    try:
        report = Report.of_dict(first.value["report"])
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise wrong(first, "report", "the report of a check", f"{error!r}") from error
    if any(type(n) is not int or n < 0 for n in first.value["report"]["checked"].values()):
        raise wrong(first, "report.checked", "numbers of at least 0", first.value["report"]["checked"])
    if report.deep is not given["deep"] or first.value["report"]["deep"] is not given["deep"]:
        raise wrong(first, "report.deep", show(given["deep"]), first.value["report"]["deep"])
    if type(reached) is not bool or (given["examples"] is None and reached):
        raise wrong(first, "values", "false" if given["examples"] is None else "true or false", reached)
    if given["examples"] is None:
        return
    if not reached and not report.errors:
        raise wrong(first, "values", "true, because the report has no error", reached)
    if reached and report.checked.get("examples", 0) < given["examples"]:
        raise wrong(first, "report.checked.examples", f"{given['examples']:,}", report.checked.get("examples"))


def check_scans(plan: Planned, store: Store, results: Sequence[Result]) -> None:
    """Raises FormatError for scans that differ from the dataset: its layers, rows, dtype, examples and tokens."""
    for result in results:
        scans = result.value.get("layers")
        if not isinstance(scans, list) or len(scans) != len(store.layers):
            what = f"{len(scans)} of them" if isinstance(scans, list) else scans
            raise wrong(result, "layers", f"the scans of {len(store.layers)} layers", what)
        if result.value.get("units") != len(scans) or isinstance(result.value["units"], bool):
            raise wrong(result, "units", str(len(scans)), result.value.get("units"))
        for scanned, layer in zip(scans, store.layers, strict=True):
            if "error" in scanned if isinstance(scanned, dict) else True:
                _check_error(result, layer, scanned)
            elif type(scanned.get("rows")) is not int or not 0 <= scanned["rows"] < MAX_INT:
                raise wrong(result, f"layer {plain(layer)}: rows", "a number of at least 0", scanned.get("rows"))
    wide, ends = set(plan.arguments["wide"]), None
    for group, layer in enumerate(store.layers):
        if not group or store.contents.layers_differ:
            ends = _ends(store, layer)
        check: _OfLayer | None = None
        for result in results:
            scanned = result.value["layers"][group]
            if "error" not in scanned:
                check = check or _OfLayer(store, layer, group in wide, ends)
                check(result, plan.tasks[result.task]["examples"], scanned)
    _check_totals(plan, store, results)


def _check_error(result: Result, layer: Layer, scanned: Any) -> None:
    made = scanned.get("error") if isinstance(scanned, dict) else None
    if (
        not isinstance(made, dict)
        or len(scanned) != 1
        or made.keys() != _ERROR.keys()
        or not all(isinstance(made[name], kinds) for name, kinds in _ERROR.items())
    ):
        raise wrong(result, f"layer {plain(layer)}", "the scan of a layer, or an error", scanned)


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


def _check_totals(plan: Planned, store: Store, results: Sequence[Result]) -> None:
    """Compares the rows of all layers together with the plan. This needs no token counts."""
    size = store.d_model * store.dtype.itemsize
    if not size:
        return
    for result in results:
        rows, some = plan.tasks[result.task]["bytes"] // size, [x for x in result.value["layers"] if "error" not in x]
        found, failed = sum(x["rows"] for x in some), len(some) < len(result.value["layers"])
        if found > rows or (found < rows and not failed):
            raise wrong(result, "rows of all layers", f"at most {rows:,}" if failed else f"{rows:,}", found)


class _OfLayer:
    """The checks of the scans of one layer."""

    def __init__(self, store: Store, layer: Layer, wide: bool, ends: NDArray[np.int64] | None) -> None:
        self.layer, self.ends = layer, ends
        nothing = scan(store, layer, lambda *_: None, (0, 0), wide)  # reads no rows
        if isinstance(nothing, ActshardError):
            raise nothing
        self.dtype: str = nothing["dtype"]
        # The parts of complex values are counted.
        self.values = store.d_model * (2 if self.dtype.startswith("complex") else 1)

    def __call__(self, result: Result, examples: Sequence[int], found: Mapping[str, Any]) -> None:
        """Raises FormatError for a scan that is impossible for these examples."""
        if found.keys() != set(SMALL):
            raise self._wrong(result, "fields", ", ".join(SMALL), ", ".join(map(str, found)))
        if found["dtype"] != self.dtype:
            raise self._wrong(result, "dtype", self.dtype, found["dtype"])
        rows = found["rows"]
        if self.ends is not None and rows != (expected := int(self.ends[examples[1]] - self.ends[examples[0]])):
            raise self._wrong(result, "rows", f"{expected:,}", rows)
        for name in ODD:
            self._check_odd(result, examples, found, name)
        if found["zero_rows"][0] + max(found[name][0] for name in ODD if name != "zero_rows") > rows:
            raise self._wrong(
                result, "zero_rows", f"at most {rows:,} with the other rows", [found[name][0] for name in ODD]
            )
        for name in ("nan", "infinite"):
            least, count = found[f"{name}_rows"][0], found[name]
            if type(count) is not int or not least <= count <= least * self.values:
                limits = f"{least:,} to {least * self.values:,} values in {many(least, 'row')}" if least else "0"
                raise self._wrong(result, name, limits, count)
        if found["nan"] + found["infinite"] > rows * self.values:
            raise self._wrong(
                result, "nan + infinite", f"at most {rows * self.values:,}", found["nan"] + found["infinite"]
            )

    def _check_odd(self, result: Result, examples: Sequence[int], found: Mapping[str, Any], name: str) -> None:
        """Checks a number of rows and the places of the first ones."""
        value, rows = found[name], found["rows"]
        if value == [0, []] and type(value[0]) is int:
            return
        if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not int or not 0 <= value[0] <= rows:
            raise self._wrong(result, name, f"a number of rows from 0 to {rows:,}, and places", value)
        count, places = value
        if not isinstance(places, list) or len(places) != min(count, PLACES):
            raise self._wrong(result, name, many(min(count, PLACES), "place"), places)
        for place in places:
            if not isinstance(place, list) or len(place) != 2 or any(type(n) is not int or n < 0 for n in place):
                raise self._wrong(result, name, "places (example, token)", place)
            example, token = place
            if not examples[0] <= example < examples[1]:
                raise self._wrong(result, name, f"examples from {examples[0]:,} to {examples[1] - 1:,}", place)
            tokens = rows if self.ends is None else int(self.ends[example + 1] - self.ends[example])
            if token >= tokens:
                raise self._wrong(result, name, f"tokens below {tokens:,} in example {example:,}", place)
        if any(a >= b for a, b in itertools.pairwise(places)):
            raise self._wrong(result, name, "ascending places", places)

    def _wrong(self, result: Result, where: str, expected: str, found: Any) -> FormatError:
        return wrong(result, f"layer {plain(self.layer)}: {where}", expected, found)
