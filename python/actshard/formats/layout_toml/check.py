"""Checks of described folders; see docs/formats/layout.md."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence

from actshard.base._arguments import many
from actshard.base.containers import read_torch
from actshard.base.errors import ActshardError
from actshard.base.location import Location
from actshard.formats.format import Tell
from actshard.formats.layout_toml import description
from actshard.formats.layout_toml.description import Description, Name
from actshard.formats.layout_toml.files import array_files, is_shard_index, kind_of, matches, open_files, shard_index
from actshard.formats.layout_toml.index import build
from actshard.formats.layout_toml.units import by_capture, key_of
from actshard.formats.numbered import SHOWN
from actshard.formats.plain_folders import NAME
from actshard.formats.report import Report, check_torch


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks the description, every file against it, and sizes of torch files; if deep, also checksums of archives."""
    described = report.faults.parse(root / NAME, lambda: description.read(root, report.layout))
    if described is None:
        return
    part = described.activations
    assert part.files is not None
    sound = True
    files = array_files(root, part.files)
    for number, (_, path) in enumerate(files):
        tell("files", number, len(files))
        report.count("files")
        try:
            report.count("bytes", path.regular("read").size)
            _check_file(path, kind_of(path.name, part), report)
            open_files([path], part)
        except ActshardError as error:
            sound = False
            report.error(error, path)
    for _, path in matches(root, part.files) if is_shard_index(part.files.text) else []:
        for tensor, file in shard_index(path).items():
            with report.noting(path):
                open_files([file], part)[0].find((tensor,))
    if not sound and report.incomplete != "skip":
        return  # the damaged file is reported; building the index would report it again
    with report.noting(root):
        build(root, described, 1 << 30, skips_incomplete=report.incomplete == "skip")
        _check_columns(root, described, [captured for captured, _ in files], report)


def _check_columns(
    root: Location, described: Description, examples: Sequence[Mapping[str, Name]], report: Report
) -> None:
    """Reports files of tokens, lengths and columns without a file of activations: it was lost, or never written."""
    for part in (described.tokens, described.lengths, *described.columns):
        if part is None or part.files is None or not part.files.captures:
            continue
        lone = by_capture(root, part.files)
        for captured in examples:
            lone.pop(key_of(captured, part.files), None)
        if lone:
            shown = ", ".join(path.relative_to(root) for path in list(lone.values())[:SHOWN])
            more = ", ..." if len(lone) > SHOWN else ""
            text = f"{part.table}: {many(len(lone), 'file', 'has', 'have')} no file of activations: {shown}{more}"
            report.add("unlisted-file", root, text)


def _check_file(path: Location, kind: str, report: Report) -> None:
    if kind == "torch":
        (torch_file,) = read_torch([path])
        check_torch(torch_file, report)
    elif kind == "npz" and report.deep and path.is_local:
        try:
            with path.open("read") as stream, zipfile.ZipFile(stream) as archive:
                damaged = archive.testzip()
        # zipfile raises NotImplementedError for methods of compression that it lacks.
        except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, ValueError) as error:
            report.add("record-checksum", path, str(error) or type(error).__name__)
            return
        if damaged is not None:
            report.add("record-checksum", path, "other bytes", "the content of the CRC-32", f"record {damaged}")
