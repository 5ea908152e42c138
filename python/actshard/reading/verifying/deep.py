"""Checks every value of a dataset of any format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.base._arguments import many, numpy_type
from actshard.base._json import show
from actshard.base.errors import ActshardError
from actshard.base.layers import Layer, plain
from actshard.base.location import Location
from actshard.base.request import RECORD, Digest, Request, checksum, joined_digests
from actshard.base.work import is_below
from actshard.formats.report import Report
from actshard.looking.examining import equal_examples
from actshard.reading.store import Store

if TYPE_CHECKING:
    from actshard.formats.format import Tell

_FEW = 8
PLACES = 16
"""Maximum number of positions that a scan records for each kind of problem."""
ODD = ("nan_rows", "infinite_rows", "zero_rows", "constant_rows")
"""Fields of a scan with (number of rows, positions of the first :data:`PLACES` of them)."""
_NARROWER = {
    "float32": (("bfloat16", 16, ""),),
    "float64": (("float32", 29, ", except those outside the range of float32: a conversion reports them"),),
}
"""Narrower dtypes of each dtype, with the number of trailing bits that are zero in all of its values, and exceptions.
A smaller range does not show in trailing bits; float16 is not listed, because its range is much smaller."""


def check_values(store: Store, report: Report, tell: Tell) -> None:
    """Reads every row once, layer by layer, and adds findings to the report."""
    add_findings(store, (scan(store, layer, tell) for layer in store.layers), report)


def scan(
    store: Store, layer: Layer, tell: Tell, examples: tuple[int, int] | None = None, wide: bool | None = None
) -> dict[str, Any] | ActshardError:
    """Scans a layer, or some of its examples. Returns the scan, or the error. ``wide``: stored types differ; None: check this."""
    group = store.group_of(layer)
    progress = partial(_tell, tell, group, len(store.layers))
    try:
        layer_scan: dict[str, Any] = store.rows.scan(group, progress, examples=examples, wide=wide)
    except ActshardError as error:
        return error
    return {**layer_scan, "digests": (Digest.of(layer_scan["hashes"], 0 if examples is None else examples[0]),)}


def joined(before: dict[str, Any] | None, part: dict[str, Any]) -> dict[str, Any]:
    """Combines the scans of two consecutive ranges of a layer's examples, except hashes. ``before`` is None for the first range.

    Differences of a range are relative to its own first row. OR-ed with the difference of both first rows, they are relative to the
    first row of all: a bit is set if any two rows differ in it. Arrays of ``before`` are modified in place and returned, so that
    any number of ranges needs the memory of two.
    """
    if before is None:
        return {**part, **{key: part[key].copy() for key in ("magnitudes", "differences", "first")}}
    totals = dict(before)
    for key in ("rows", "nan", "infinite"):
        totals[key] += part[key]
    totals["digests"] = joined_digests([before["digests"], part["digests"]])
    for key in ODD:
        (count, places), (part_count, part_places) = before[key], part[key]
        totals[key] = (count + part_count, [*places, *part_places][:PLACES])
    if not part["rows"]:
        return totals
    if not before["rows"]:
        totals["first"] = part["first"].copy()
    totals["magnitudes"] |= part["magnitudes"]
    totals["differences"] |= part["differences"]
    totals["differences"] |= part["first"] ^ totals["first"]
    return totals


def first_row(layer_scan: dict[str, Any]) -> NDArray[np.uint64]:
    """The bits of the first row of a scan, an integer per column; zeros without rows."""
    width = len(layer_scan["magnitudes"])
    if not layer_scan["rows"]:
        return np.zeros(width, np.uint64)
    return np.frombuffer(layer_scan["first"], f"<u{len(layer_scan['first']) // width}").astype(np.uint64)


def together(all_before: NDArray[np.uint64] | None, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Combines each example's hash over the previous layers (None: there are none) with its hash in the next layer."""
    if all_before is None:
        return hashes
    with np.errstate(over="ignore"):
        return (all_before * np.uint64(0x9E3779B97F4A7C15)) ^ hashes


def add_findings(
    store: Store,
    scans: Iterable[dict[str, Any] | ActshardError],
    report: Report,
    hashes: NDArray[np.uint64] | None = None,
) -> None:
    """Adds the findings of the scans of all layers, in order. ``hashes``: over all layers; None: combined from the scans."""
    every = hashes
    readable = True
    digests: list[Digest | None] = []
    for layer, layer_scan in zip(store.layers, scans, strict=True):
        if isinstance(layer_scan, ActshardError):
            report.error(layer_scan, store.path)
            readable = False
            continue
        report.count("rows", layer_scan["rows"])
        digests += layer_scan["digests"] or [None]
        _rows(store, layer, layer_scan, report)
        if layer_scan["rows"]:
            _columns(store, layer, layer_scan, report)
        if hashes is None:
            every = together(every, layer_scan["hashes"])
    if every is not None and readable:
        _duplicates(store, every, report)
        _compare(store, digests, report)


def _compare(store: Store, digests: Sequence[Digest | None], report: Report) -> None:
    """Compares files and rows with those that actshard wrote, by checksums and digests in the record of the dataset's request."""
    location = Location.at(store.path)
    if store.contents.whole is not None:
        return  # other examples than those of the files
    try:
        record = Request.read(location)
    except ActshardError as error:
        report.error(error, store.path)
        return
    if record is None:
        return
    _compare_files(location, record.checksums or {}, report)
    if report.layout is not None or record.digests is None or store.contents.absence:
        return  # other layers than those of the files, or fewer rows
    if len(record.digests) != len(digests):
        report.add("other-rows", location, many(len(digests), "layer"), str(len(record.digests)))
    for layer, written, digest in zip(store.layers, record.digests, digests, strict=False):
        if digest is not None and written != digest:
            what = "the rows of the examples, in another order" if written.total == digest.total else "other rows"
            report.add("other-rows", location, what, "the rows that were written", f"layer {plain(layer)}")


def _compare_files(location: Location, checksums: Mapping[str, str], report: Report) -> None:
    """Compares files of columns, lengths and metadata with those that actshard wrote."""
    for name, expected in checksums.items():
        if not is_below(name):
            where = f"field 'checksums' in {RECORD}"
            report.add(
                "metadata", location, f"the name {show(name)}", "names of files below the dataset's folder", where
            )
            continue
        file = location.joinpath(*name.split("/"))
        with report.noting(file):
            crc = checksum(file) if file.exists() else None
            if crc != expected:
                content = "no file" if crc is None else f"others (CRC-32 {crc})"
                report.add("other-file", file, content, f"the bytes that were written (CRC-32 {expected})")


def _tell(tell: Tell, number: int, total: int, rows: int) -> None:
    tell("layers", number, total)


def _rows(store: Store, layer: Layer, layer_scan: dict[str, Any], report: Report) -> None:
    for key, code, what in (
        ("nan_rows", "nan", many(layer_scan["nan"], "NaN value")),
        ("infinite_rows", "infinite", many(layer_scan["infinite"], "infinite value")),
        ("zero_rows", "zero-row", "only zeros"),
        ("constant_rows", "constant-row", "one repeated value"),
    ):
        count, places = layer_scan[key]
        if not count:
            continue
        shown = ", ".join(f"({_named(store, e)}, {t})" for e, t in places[:_FEW]) + (", ..." if count > _FEW else "")
        report.add(
            code,
            store.path,
            f"{count:,} of {many(layer_scan['rows'], 'row')} with {what}; (example, token): {shown}",
            place=f"layer {plain(layer)}",
        )


def _columns(store: Store, layer: Layer, layer_scan: dict[str, Any], report: Report) -> None:
    magnitudes, differences = layer_scan["magnitudes"], layer_scan["differences"]
    finite = not layer_scan["nan"] and not layer_scan["infinite"]
    if finite and layer_scan["rows"] > 1 and magnitudes.any() and not differences.any():
        report.add(
            "constant-layer", store.path, f"all {layer_scan['rows']:,} rows are equal", place=f"layer {plain(layer)}"
        )
        return
    dead = np.flatnonzero(magnitudes == 0)
    same = (differences == 0) & (magnitudes != 0) & (layer_scan["rows"] > 1)
    constant = np.flatnonzero(same if finite else same & _are_finite(magnitudes, layer_scan["dtype"]))
    for code, columns in (("dead-dimension", dead), ("constant-dimension", constant)):
        if 0 < columns.size < store.d_model or (columns.size and code == "dead-dimension"):
            report.add(
                code,
                store.path,
                f"{columns.size:,} of {many(store.d_model, 'column')}: {_list(columns)}",
                place=f"layer {plain(layer)}",
            )
    every = int(np.bitwise_or.reduce(magnitudes)) if magnitudes.size else 0
    dtype = layer_scan["dtype"]
    for narrower, zeros, exceptions in _NARROWER.get(dtype, ()):
        if every and every & ((1 << zeros) - 1) == 0:
            report.add(
                "wide-dtype",
                store.path,
                f"all {dtype} values are exactly representable in {narrower}{exceptions}",
                place=f"layer {plain(layer)}",
            )


def _are_finite(bits: NDArray[np.uint64], dtype: str) -> NDArray[np.bool_]:
    """Whether values are finite, given their bits without the sign."""
    kind = numpy_type(dtype, "dtype ")
    values: NDArray[np.bool_] = np.isfinite(bits.astype(f"u{kind.itemsize}").view(kind))
    return values


def _list(columns: NDArray[np.int64]) -> str:
    return ", ".join(map(str, columns[:_FEW].tolist())) + (", ..." if columns.size > _FEW else "")


def _duplicates(store: Store, hashes: NDArray[np.uint64], report: Report) -> None:
    """Reports examples with identical rows in all layers, found by hash and compared byte by byte."""
    count, pairs = equal_examples(store, hashes)
    if count:
        shown = ", ".join(f"{_named(store, b)} = {_named(store, a)}" for b, a in pairs[:_FEW])
        report.add(
            "duplicate-example",
            store.path,
            f"{many(count, 'example', 'equals', 'equal')} another one in every layer: {shown}",
        )


def _named(store: Store, example: int) -> int:
    """An example's number in the dataset."""
    chosen = store.contents.chosen
    return example if chosen is None else chosen.at(example)
