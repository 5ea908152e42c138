"""``actshard.verify``: reports all problems of a dataset, each with a code, a location and a remedy.

- ``formats.report``: findings and their codes
- ``check`` of each format: checks all of its rules, also after one fails
- ``deep``: checks every value
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from actshard import formats
from actshard.base import _arguments
from actshard.base.codes import findings
from actshard.base.errors import ActshardError, ActshardWarning, ArgumentError, UnknownFormatError
from actshard.base.location import Location, has_options
from actshard.base.walking import find_cache, is_cache_itself
from actshard.formats.contents import Contents
from actshard.formats.format import names_layers
from actshard.formats.report import Finding, Report
from actshard.reading.finding import check_finished, existing_anywhere, find, find_any, latents_at, remaining
from actshard.reading.opening import check_supported, open_quietly
from actshard.reading.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

Values = Callable[[Store, Report, Callable[[str, int, int], object]], None]
"""Checks every value of a store."""

__all__ = ["CODES", "Finding", "Report", "verify"]


_LATENTS = "latents"
"""Sparse latents, which are no format: a store of their own kind."""


class _Codes(Mapping[str, tuple[str, str, str]]):
    """Looks codes up lazily, because that loads the formats of other packages."""

    def __getitem__(self, code: str) -> tuple[str, str, str]:
        entry = findings()[code]
        return (entry.severity, entry.meaning, entry.remedy)

    def __iter__(self) -> Iterator[str]:
        return iter(findings())

    def __len__(self) -> int:
        return len(findings())


CODES: Mapping[str, tuple[str, str, str]] = _Codes()
"""Maps each code to (severity, meaning, remedy). Codes are added, never renamed."""


@_arguments.check_names
def verify(
    path: str | os.PathLike[str] | Store,
    *,
    format: str | None = None,
    deep: bool = False,
    progress: Callable[[str, int, int], object] | None = None,
    storage_options: Mapping[str, object] | None = None,
    cache: int | str | os.PathLike[str] | Literal[False] | None = None,
    layout: str | os.PathLike[str] | Mapping[str, object] | None = None,
    incomplete: Literal["error", "skip"] = "error",
) -> Report:
    """Checks a dataset against all rules of its format, and with ``deep`` also every value. Columns of the first examples are read.

    Changes no file and executes no pickle. Reports all findings, not only the first. Findings for a URL equal those for a local
    copy, except on a web server: it cannot list files, so files that the metadata do not list are not checked.

    Args:
        path: path or URL of the dataset, as for :func:`actshard.open`, or a store. For a filtered store, checks the files of the
            whole dataset, and with ``deep`` the values of the chosen examples, numbered as in the dataset. For a joined store
            (:func:`actshard.concat`), checks each part, with the part's paths and numbers.
        format: name of the format, as for :func:`actshard.open`; None detects it.
        deep: read every row and report NaN and infinite values, constant rows and columns, and duplicate examples. Also reads
            all columns.
        progress: called with (what, done, total) from time to time.
        storage_options: as for :func:`actshard.open`.
        cache: as for :func:`actshard.open`.
        layout: as for :func:`actshard.open`. A store that was opened with one keeps it.
        incomplete: ``"skip"``: files that are missing or not whole are notes, as :func:`actshard.open` leaves their examples out.

    Returns:
        A :class:`~actshard.reading.verifying.Report`: ``report.ok``, ``report.findings``, ``report.status``.

    Raises:
        MissingFileError: the path does not exist.
        ArgumentError: ``format`` is not a known format, or does not use ``layout``.
        ClosedError: ``deep`` is True, and the store, or the store that it was filtered from, was closed.
        NoMemoryError, InterruptedReadError: the check was not finished; the other files were not checked.
    """
    _arguments.check_progress(progress)
    deep, store = _arguments.switch(deep, "deep"), path if isinstance(path, Store) else None
    if store is not None:
        has_cache = cache is not None and cache is not False
        if has_options(storage_options) or has_cache or layout is not None or format not in (None, store.format):
            raise ArgumentError(
                "storage_options, cache, format, layout: expected none of them with an open store, which has its own"
            )
        if (
            deep and store.layers
        ):  # before long work; without deep only the files are checked, which needs no open store
            store.check_open()
            if store.contents.whole is not None:
                from actshard.reading.choosing import check_whole_open

                check_whole_open(store.contents.whole)
        if (store.contents.whole or store.contents).parts:
            return _of_parts(store, bool(deep), progress)
        path, format = store.path, store.format
        layout = (store.contents.whole or store.contents).layout
    if not _arguments.is_one_of(incomplete, ("error", "skip")):
        raise ArgumentError(f"incomplete: expected 'error' or 'skip', found {incomplete!r:.80}")
    return of_path(
        path,  # type: ignore[arg-type]  # a store's path, or the caller's
        format,
        deep=bool(deep),
        layout=layout,
        progress=progress,
        store=store,
        remote=(storage_options, cache),
        incomplete=incomplete,
    )


def of_path(
    path: str | os.PathLike[str],
    format: str | None,
    *,
    deep: bool,
    layout: object | None = None,
    progress: Callable[[str, int, int], object] | None = None,
    store: Store | None = None,
    remote: tuple[Mapping[str, object] | None, str | os.PathLike[str] | int | bool | None] = (None, None),
    values: Values | None = None,
    incomplete: str = "error",
) -> Report:
    """:func:`verify` of a path. ``values`` replaces the check of every value, and is called if that check is due. Internal."""
    root = existing_anywhere(path, *remote)
    check_format(format)
    if layout is not None:
        format_name = format_for_layout(root, format, layout)
        format = format if names_layers(layout) else format_name
        if format_name is not None:
            try:
                layout = formats.get(format_name).read_layout(layout)
            except ArgumentError:
                raise
            except ActshardError:
                pass  # the check reports it
    if incomplete == "skip":
        with contextlib.suppress(UnknownFormatError):  # the check reports it
            check_supported(formats.get(format or find(root)[1]), None, incomplete, root)
    report = Report(root.place, format, deep, layout=layout, incomplete=incomplete)
    with report.noting(root):
        _check(root, format, report, progress or (lambda what, done, total: None), store, values)
    return report


def check_format(format: str | None) -> None:
    """Raises ArgumentError for a ``format=`` argument that is not a format's name. Internal."""
    if format is not None:
        _arguments.one_of(format, (*formats.names(), *formats.of_tokens()), "format")


def format_for_layout(root: Location, format: str | None, layout: object) -> str | None:
    """Returns the format that takes a ``layout=`` argument; None if it cannot be detected. Internal.

    Raises:
        ArgumentError: the format does not take it.
    """
    if format is None and not names_layers(layout):
        format = formats.described()
    format_name = format
    if format_name is None:
        with contextlib.suppress(ActshardError):  # the check reports it
            format_name = find(root)[1]
    if format_name is not None and not formats.get(format_name).takes(layout):
        raise ArgumentError(f"layout: {format_name} datasets describe themselves; leave it out")
    return format_name


def _describes(layout: object) -> bool:
    return layout is not None and not names_layers(layout)


def _of_parts(store: Store, deep: bool, progress: Callable[[str, int, int], object] | None) -> Report:
    """One report about all parts of a joined store or a pair, each with its own paths and numbering."""
    report = Report(store.path, store.format, deep)
    for part in (store.contents.whole or store.contents).parts:
        part_report = verify(part, deep=deep, progress=progress)
        for finding in part_report.findings:
            report.add(finding.code, finding.path, finding.found, finding.expected, finding.place)
        for what, n in part_report.checked.items():
            report.count(what, n)
    return report


def _check(
    root: Location,
    format: str | None,
    report: Report,
    tell: Callable[[str, int, int], object],
    store: Store | None = None,
    values: Values | None = None,
) -> None:
    if not root.lists:
        report.add("not-listed", root, "a folder on a web server")
    dataset = report.faults.parse(root, lambda: _dataset_at(root, format, described=_describes(report.layout)))
    if dataset is None:
        return
    root, format = dataset
    if format == _LATENTS:
        from actshard.latents.checking import check_latents

        check_latents(root, report, tell)
        return
    report.path, report.format = root.place, format
    root.list_below()
    dataset_format = formats.get(format)
    if report.layout is not None and not dataset_format.takes(report.layout):
        raise ArgumentError(f"layout: {format} datasets describe themselves; leave it out", path=root)
    if dataset_format.holds == "tokens":
        dataset_format.check(root.place, report, tell)
        return
    with report.noting(root):
        report.layout = None if report.layout is None else dataset_format.read_layout(report.layout)
        dataset_format.check(root.place, report, tell)
    try:
        store = store or open_quietly(
            root, format, "auto", cache=False, layout=report.layout, incomplete=report.incomplete
        )
    except ActshardError as error:
        report.faults.refused(error)
        return
    report.excuse(set(store.contents.absence.files))
    for warning in store.warnings:
        if warning.code != "examples-left-out":  # the notes name the files
            report.add(warning.code, root, warning)
    report.count("examples", store.num_examples)
    with report.noting(root), warnings.catch_warnings():
        warnings.simplefilter("ignore", ActshardWarning)  # the format's check reports lines that are missing
        contents = store.contents.whole or store.contents
        if contents.unextended is not None:  # which no format checks
            contents.columns(contents.column_names[-1:])
        if report.deep or not dataset_format.checks_columns:
            spans = _read_columns(contents, all_rows=report.deep)
            if report.deep and store.layers:
                _report_padded(store, contents, spans, report)
    if report.deep and store.layers:
        from actshard.reading.verifying.deep import check_values

        (values or check_values)(store, report, tell)


def _read_columns(contents: Contents, *, all_rows: bool) -> dict[str, tuple[int, int]]:
    """Reads the columns of all examples, or of the first where a format can: its own check may not read them.

    Returns the least and the largest number of values of an example, by name, of lists that all examples have.

    Raises:
        FormatError, MissingFileError, ...: a column cannot be read.
    """
    names = list(contents.column_names)
    if all_rows:
        batches = contents.column_batches or (lambda names: iter([contents.columns(names)]))
        return _spans(batches(names))
    elif contents.head_columns is not None:
        contents.head_columns(names, 1)
    elif contents.column_batches is not None:
        next(iter(contents.column_batches(names)), None)
    return {}


def _spans(batches: Iterable[pa.Table]) -> dict[str, tuple[int, int]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    spans: dict[str, tuple[int, int]] = {}
    for table in batches:
        for field in table.schema:
            kind = field.type
            is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
            if is_list and len(table) and not table[field.name].null_count:
                ends = pc.min_max(pc.list_value_length(table[field.name])).as_py()
                low, high = spans.get(field.name, (ends["min"], ends["max"]))
                spans[field.name] = min(low, ends["min"]), max(high, ends["max"])
    return spans


_OF_TOKENS = ("input_ids", "token_ids", "tokens", "attention_mask", "loss_mask")
"""Columns with a value per token."""


def _report_padded(store: Store, contents: Contents, spans: Mapping[str, tuple[int, int]], report: Report) -> None:
    """Reports columns whose lists are as long as the longest example in all examples: those of a padded batch."""
    counts = store.token_counts if contents.whole is None and store.contents.whole is None else contents.token_counts()
    counts = counts[counts > 0]
    if not len(counts) or counts.min() == counts.max():
        return
    for name, (low, high) in spans.items():
        if low == high and (high == counts.max() or (name in _OF_TOKENS and high > counts.max())):
            text = f"{high:,} values in every example, which have {counts.min():,} to {counts.max():,} tokens"
            report.add("padded-column", contents.path, text, "a value for each token", f"column {name}")


def _dataset_at(root: Location, format: str | None, *, described: bool) -> tuple[Location, str]:
    """The dataset's location and format.

    Raises:
        UnfinishedError, UnknownFormatError: there is no finished dataset, or its format is unknown.
    """
    if format is None:
        return _find(root)
    if format in formats.of_tokens():
        return find_cache(root), format
    if not is_cache_itself(root):
        check_finished(root, format, described=described)
    return root, format


def _find(root: Location) -> tuple[Location, str]:
    try:
        return find_any(root)
    except UnknownFormatError as error:
        if error.candidates or error.ambiguous:
            raise
        if latents_at(root) is not None:
            return root, _LATENTS
        # A broken dataset may only be recognised by its remaining files.
        guessed = _guess(root)
        if guessed is None:
            raise
        return guessed


def _guess(root: Location) -> tuple[Location, str] | None:
    if root.kind() != "folder" or not root.lists:
        return None
    format_names = remaining({entry.name for entry in root.entries()})
    return (root, format_names[0]) if format_names else None
