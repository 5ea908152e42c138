"""Checks of Arrow directories; see docs/formats/hf_arrow.md."""

from __future__ import annotations

from typing import Any

from actshard.base.location import Location
from actshard.formats.contents import Options
from actshard.formats.format import Tell
from actshard.formats.hf_arrow.read import Directory
from actshard.formats.report import Report


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks all headers, the offsets of every batch, all other columns, and the counts in dataset_info.json."""
    directory = report.faults.parse(root, lambda: Directory(root, report.faults, report.layout))
    if directory is None:
        return
    contents = directory.contents(Options.of(root))
    report.count("files", len(directory.files))
    if root.lists:
        listed = {file.path.name for file in directory.files} | {file.name for file in directory.files_left_out}
        for entry in root.entries("data-*.arrow"):
            if entry.name not in listed:
                report.add("unlisted-file", root / entry.name, "an Arrow file that state.json does not list")
    _check_offsets(directory, contents.rows, report, tell)
    for number, name in enumerate(directory.column_names):
        tell("columns", number, len(directory.column_names))
        with report.noting(root):
            for _ in directory.batches([name]):
                pass
    splits = directory.info.get("splits")
    split = directory.state.value.get("_split")
    declared: object = splits.get(split) if isinstance(splits, dict) else None
    n = declared.get("num_examples") if isinstance(declared, dict) else None
    if type(n) is int and n != directory.num_examples:
        field = f"field 'splits.{split}.num_examples'"
        report.add(
            "count-claim", root / "dataset_info.json", n, f"{directory.num_examples}, as in the Arrow files", field
        )


def _check_offsets(directory: Directory, rows: Any, report: Report, tell: Tell) -> None:
    """Reads a row of every batch, which checks all offsets of its lists."""
    counts = directory.counts()
    if rows is None:
        return
    first = 0
    void = set(directory.void().tolist())
    batches = [(file.path, batch.rows) for file in directory.files for batch in file.batches]
    for number, (path, n) in enumerate(batches):
        tell("batches", number, len(batches))
        filled = next((e for e in range(first, first + n) if counts[e] > 0 and e not in void), None)
        for group in range(len(directory.layers)) if filled is not None else ():
            with report.noting(path):
                rows.gather(group, filled, 0, None, None)
        first += n
