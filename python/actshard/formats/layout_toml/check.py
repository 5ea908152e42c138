"""Checks of described folders; see docs/formats/layout.md."""

from __future__ import annotations

import zipfile

from actshard.containers import read_torch
from actshard.errors import ActshardError
from actshard.formats.format import Tell
from actshard.formats.layout_toml import description
from actshard.formats.layout_toml.files import kind_of, matches, open_files
from actshard.formats.layout_toml.index import build
from actshard.formats.plain_folders import NAME
from actshard.formats.report import Report
from actshard.formats.torch_checks import check_torch
from actshard.location import Location


def check(root: Location, report: Report, tell: Tell) -> None:
    """Checks the description, every file against it, and sizes of torch files; if deep, also checksums of archives."""
    described = report.faults.parse(root / NAME, lambda: description.read(root, report.layout))
    if described is None:
        return
    part = described.activations
    assert part.files is not None
    sound = True
    files = matches(root, part.files)
    for number, (_, path) in enumerate(files):
        tell("files", number, len(files))
        report.count("files")
        with report.noting(path):
            report.count("bytes", path.regular("read").size)
        try:
            _check_file(path, kind_of(path.name, part), report)
            open_files([path], part)
        except ActshardError as error:
            sound = False
            report.error(error, path)
    if not sound:
        return  # the damaged file is reported; building the index would report it again
    with report.noting(root):
        build(root, described, 1 << 30)


def _check_file(path: Location, kind: str, report: Report) -> None:
    if kind == "torch":
        (file,) = read_torch([path])
        check_torch(file, report)
    elif kind == "npz" and report.deep and path.is_local:
        try:
            with zipfile.ZipFile(path.local) as archive:
                damaged = archive.testzip()
        # zipfile raises NotImplementedError for methods of compression that it lacks.
        except (zipfile.BadZipFile, OSError, NotImplementedError, RuntimeError, ValueError) as error:
            report.add("record-checksum", path, str(error) or type(error).__name__)
            return
        if damaged is not None:
            report.add("record-checksum", path, "other bytes", "the content of the CRC-32", f"record {damaged}")
