"""Checks of inference captures; see docs/formats/hallulens.md."""

from __future__ import annotations

import numpy as np

from actshard.base._json import read_json
from actshard.base.location import Location
from actshard.formats.format import Tell
from actshard.formats.hallulens.files import SampleArray
from actshard.formats.hallulens.read import Capture, Sample
from actshard.formats.report import Report

_SHOWN = 20


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks sizes of arrays, lines of meta.jsonl, and that both contain the same lengths."""
    capture = report.faults.parse(root, lambda: Capture(root, report.faults))
    if capture is None:
        return
    arrays, samples = capture.arrays, capture.samples
    report.count("samples", len(samples))
    rows: dict[str, int] = {}
    for number, (name, array) in enumerate(arrays.items()):
        tell("arrays", number, len(arrays))
        report.count("files")
        with report.noting(array.path):
            report.count("bytes", array.size())
            rows[name] = array.rows(capture.config.allocated)
    fewest = min(rows.values(), default=None)
    beyond = [] if fewest is None else [sample for sample in samples if sample.row >= fewest]
    for sample in beyond[:_SHOWN]:
        short = next(name for name, n in rows.items() if sample.row >= n)
        report.add(
            "address-out-of-range",
            root / "meta.jsonl",
            sample.row,
            f"a row of {short}.npy, 0 to {rows[short] - 1}",
            f"line {sample.number}, field 'sample_index'",
        )
    stored_samples = [sample for sample in samples if fewest is None or sample.row < fewest]
    for name in ("prompt_len", "response_len"):
        if name in rows:
            _check_lengths(root, arrays[name], stored_samples, report)
    _check_results(root, len(samples), report)


def _check_lengths(root: Location, array: SampleArray, samples: list[Sample], report: Report) -> None:
    """Checks that an array of lengths equals the lengths in meta.jsonl."""
    with report.noting(array.path):
        stored_lengths = array.read(np.array([sample.row for sample in samples], np.int64)).tolist()
        listed_lengths = [getattr(sample, array.name) for sample in samples]
        differ = [i for i, (a, b) in enumerate(zip(stored_lengths, listed_lengths, strict=True)) if a != b]
        for i in differ[:_SHOWN]:
            report.add(
                "count-claim",
                root / "meta.jsonl",
                listed_lengths[i],
                f"{stored_lengths[i]} as in {array.path.name}",
                f"line {samples[i].number}, field '{array.name}'",
            )


def _check_results(root: Location, n: int, report: Report) -> None:
    """Checks that lists in eval_results.json have one entry per sample."""
    path = root / "eval_results.json"
    if not path.exists():
        return
    with report.noting(path, "metadata"):
        value: object = read_json(path)
        for name, entries in value.items() if isinstance(value, dict) else ():
            if isinstance(entries, list) and len(entries) != n:
                report.add("claim", path, f"{len(entries)} entries", f"{n}, one per sample", f"field '{name}'")
