"""``actshard.verify``: everything that is wrong with a dataset, with places, codes and what to do.

- ``report``: findings and their codes
- ``saev``, ``lmprobe``, ``zarr``, ``pickle``, ``levanter``: the rules of each format, checked one by one and not only until one is
  broken
- ``deep``: every value
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from actshard import formats
from actshard.errors import ActshardError, ArgumentError, UnknownFormatError
from actshard.finding import TOKENS, check_finished, existing, find_any, find_cache, is_cache_itself
from actshard.formats.report import CODES, Finding, Report
from actshard.opening import open_quietly

__all__ = ["CODES", "Finding", "Report", "verify"]

_WARNINGS = (
    (r"is not the hash of its metadata", "hash-mismatch"),
    (r"^column '.*' is there twice", "format"),
    (r"not in ascending order", "layer-order"),
    (r"newer than actshard knows|MAJOR version", "version"),
    (r"^labels\.bin: expected", "truncated"),
    (r"which holds no examples, is missing", "layout"),
    (r"shards\.json names shard", "layout"),
    (r"^pooling is", "pooling"),
    (r"^layout ", "layout"),
    (r"tensor type .* is not one actshard reads", "layout"),
    (r"num_prompts is", "claim"),
    (r"^statistics\.|: statistics\.", "claim"),
    (r"attribute '", "claim"),
    (r"^extraction_config\.|: extraction_config\.", "claim"),
    (r"consolidated metadata differ", "consolidated-differs"),
    (r"has no arrays/", "no-lengths"),
    (r"samples were cut when they were written", "length-too-long"),
    (r"have no checksum", "no-checksum"),
    (r"chunks have to be decoded whole", "layout"),
    (r"shards lack layers", "layout"),
    (r"rows are named by no line", "layout"),
    (r"of which the manifest counts", "layout"),
)
"""What readers warn of, as codes."""


def verify(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    deep: bool = False,
    progress: Callable[[str, int, int], object] | None = None,
) -> Report:
    """Checks a dataset against every rule of its format, and with ``deep`` every value of it.

    Nothing is changed, nothing is unpickled. All findings are reported, not the first.

    Args:
        path: as :func:`actshard.open` takes it.
        format: as there; None detects it.
        deep: read every row: numbers that are none, rows and columns that say nothing, examples that are there twice.
        progress: called with (what, done, in all) now and then.

    Returns:
        A :class:`~actshard.verifying.Report`: ``report.ok``, ``report.findings``, ``report.status``.

    Raises:
        MissingFileError: there is nothing at the path.
        ArgumentError: a format that is none.
    """
    root = existing(path)
    names = (*formats.names(), TOKENS)
    if format is not None and format not in names:
        raise ArgumentError(f"format must be one of {', '.join(names)}, not {format!r}")
    report = Report(root, format, bool(deep))
    with report.noting(root):
        _check(root, format, report, progress or (lambda what, done, total: None))
    return report


def _check(root: Path, format: str | None, report: Report, tell: Callable[[str, int, int], object]) -> None:
    if format != TOKENS and not is_cache_itself(root):
        check_finished(root)
    if format is None:
        root, format = _find(root)
    elif format == TOKENS:
        root = find_cache(root)
    report.path, report.format = root, format
    if format == TOKENS:
        from actshard.formats.levanter.check import check

        check(root, report, tell)
        return
    with report.noting(root):
        formats.load(format, "check").check(root, report, tell)
    try:
        store = open_quietly(root, format, "auto")
    except ActshardError as error:
        if not report.errors:
            report.error(error, root)
        return
    for warning in store.warnings:
        code = next((code for pattern, code in _WARNINGS if re.search(pattern, warning)), "reader-warning")
        report.add(code, root, warning)
    report.count("examples", store.num_examples)
    if report.deep and store.layers:
        from actshard.verifying.deep import check_values

        check_values(store, report, tell)


def _find(root: Path) -> tuple[Path, str]:
    try:
        return find_any(root)
    except UnknownFormatError as error:
        if error.candidates or error.ambiguous:
            raise
        # A broken dataset may be recognised by nothing but what it still has.
        guessed = _guess(root)
        if guessed is None:
            raise
        return guessed


def _guess(root: Path) -> tuple[Path, str] | None:
    if not root.is_dir():
        return None
    names = {p.name for p in root.iterdir()}
    if any(re.fullmatch(r"acts\d{6}\.bin", n) for n in names) or "shards.json" in names:
        return root, "saev"
    if any(re.fullmatch(r"shard_\d+\.pkl(\.gz)?", n) for n in names):
        return root, "pickle"
    if {"index", "tensors"} & names:
        return root, "lmprobe"
    if {".zgroup", ".zmetadata", "arrays"} & names:
        return root, "zarr"
    return None
