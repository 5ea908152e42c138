"""``actshard.report``: one HTML file about a dataset or token cache, for people.

The file needs no network and no script. All text of datasets is escaped: by Jinja in the page, by matplotlib in plots. Lists
and texts are cut, so that a page stays below 1.5 MB whatever the dataset.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from actshard._native import build_info
from actshard.base import _arguments
from actshard.base.errors import ArgumentError, MissingExtraError, UnknownFormatError
from actshard.base.layers import Layer
from actshard.base.work.files import write_bytes
from actshard.formats.format import Tell
from actshard.formats.target import environment_time
from actshard.looking.reporting import activations, caches
from actshard.looking.reporting.activations import ReportedRows
from actshard.looking.reporting.page import FEW_COLUMNS, OF_DATA, Page, steps
from actshard.looking.stats.summary import Advice, cut
from actshard.plot.style import check_name, library
from actshard.reading.finding import existing_anywhere
from actshard.reading.opening import open_quietly, token_cache_at
from actshard.reading.store import Store
from actshard.reading.verifying import Report, verify
from actshard.streaming.selection import Limit, Mask, Selection, Tokens
from actshard.tokens.tokenizer import Tokenizer, load_tokenizer

ENDS = (".html", ".htm")
"""What the name of a report ends with."""


def report(
    path: str | os.PathLike[str] | Store,
    out: str | os.PathLike[str] = "report.html",
    *,
    layers: Layer | Sequence[Layer] | None = None,
    tokens: Tokens = "content",
    ignore_labels: Sequence[int] = (),
    keep: Mask = None,
    max_norm: Limit = None,
    min_token: int = 0,
    rows: int | None = None,
    examples: int = 6,
    tokenizer: object | None = None,
    deep: bool = False,
    format: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    cache: int | str | os.PathLike[str] | Literal[False] | None = None,
    layout: str | os.PathLike[str] | Mapping[str, object] | None = None,
    progress: Tell | None = None,
) -> Path:
    """Writes a report: a description, findings with advice, plots, layers, texts coloured by norm, verify's findings.

    One HTML file below 1.5 MB that needs no network. Reads all rows of the layers once, or the statistics that
    ``store.stats(save=True)`` kept, if they are still true. The same dataset gives the same file
    but for the time that it took; with the environment variable ``SOURCE_DATE_EPOCH`` that is left out. The report of a damaged
    dataset covers the layers that can be read, and names the others and the damage.

    Args:
        path: path or URL of a dataset or token cache, as for :func:`actshard.open`; or a store.
        out: the file to write, with a name that ends with ``.html`` or ``.htm``; an existing one is replaced.
        layers: names of the layers to report on; None: all.
        tokens: as for :meth:`actshard.Store.stats`, like the next four. Not for token caches.
        ignore_labels: as for :meth:`actshard.Store.stats`.
        keep: as for :meth:`actshard.Store.stats`.
        max_norm: as for :meth:`actshard.Store.stats`.
        min_token: as for :meth:`actshard.Store.stats`.
        rows: number of rows of each layer to sample, as for :meth:`actshard.Store.stats`; None: all. Not for token caches.
        examples: number of examples whose tokens are shown, evenly spaced.
        tokenizer: decodes tokens, as for :func:`actshard.tokens.load_tokenizer`; None: a token cache's own, if it is here.
        deep: let verify read all values, too.
        format: as for :func:`actshard.open`.
        storage_options: as for :func:`actshard.open`.
        cache: as for :func:`actshard.open`.
        layout: as for :func:`actshard.open`.
        progress: called with (what, done, total) from time to time.

    Returns:
        The file's path.

    Raises:
        MissingExtraError: ``pip install 'actshard[report]'``.
        ArgumentError: ``out`` has another ending; ``layers``, ``rows`` or ``tokens`` with a token cache.
        Errors of :func:`actshard.open` and :meth:`actshard.Store.stats`.
    """
    return written(
        path,
        out,
        layers=layers,
        selection=Selection(tokens, ignore_labels, keep, max_norm, min_token),
        rows=rows,
        examples=examples,
        tokenizer=tokenizer,
        progress=progress,
        deep=deep,
        format=format,
        storage_options=storage_options,
        cache=cache,
        layout=layout,
    ).path


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written.

    Attributes:
        path: the file.
        bytes: its size.
        seconds: the time that it took.
        layers: names of the layers that it covers.
        findings: its findings, worst first.
        check: what :func:`actshard.verify` found in the files.
    """

    path: Path
    bytes: int
    seconds: float
    layers: list[Layer]
    findings: list[Advice]
    check: Report

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        names = ("severity", "where", "kind", "text", "do", "code")
        findings = [{name: getattr(finding, name) for name in names} for finding in self.findings]
        return {
            "path": str(self.path),
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "layers": self.layers,
            "findings": findings,
            "check": self.check.as_dict(),
        }


def written(
    path: str | os.PathLike[str] | Store,
    out: str | os.PathLike[str],
    *,
    layers: Layer | Sequence[Layer] | None,
    selection: Selection,
    rows: int | None,
    examples: int,
    tokenizer: object,
    progress: Tell | None,
    **options: Any,
) -> WrittenReport:
    """See :func:`report`. ``options``: the options of :func:`actshard.open`, and ``deep``."""
    library()
    render = _template()
    file = _arguments.local_path(out, "out")
    check_name(Path(file), ENDS, "out")
    _arguments.check_progress(progress)
    count = _arguments.whole(examples, "examples", 0, 20)
    tell = progress or (lambda what, done, total: None)
    decode = load_tokenizer(tokenizer) if tokenizer is not None else None
    began = time.monotonic()
    if isinstance(path, Store):
        if any(value is not None for name, value in options.items() if name != "deep"):
            raise ArgumentError("format, storage_options, cache, layout: expected none of them with an open store")
        page = activations.page_of(path, layers, (selection, rows), count, decode, tell)
        options = {"deep": options["deep"]}
    else:
        page = _of_path(path, options, layers, (selection, rows), count, decode, tell)
    with page.timed("check of the files"):
        check = verify(path, progress=tell, **options)
        page.verified(check)
    seconds = time.monotonic() - began
    page.took.append(("other", seconds - sum(part for _, part in page.took)))
    html = render(page=page, steps=steps(), few=FEW_COLUMNS, **_made_at(seconds)).encode("utf-8", "replace")
    write_bytes(Path(file), html)
    return WrittenReport(Path(file), len(html), time.monotonic() - began, page.layers, page.sorted_advice(), check)


def _of_path(
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
    layers: Layer | Sequence[Layer] | None,
    selected: ReportedRows,
    count: int,
    decode: Tokenizer | None,
    tell: Tell,
) -> Page:
    began = time.monotonic()
    location = existing_anywhere(path, options["storage_options"], options["cache"])
    try:
        cache = None if options["layout"] is not None else token_cache_at(location, options["format"])
        store = open_quietly(location, options["format"], "auto", layout=options["layout"]) if cache is None else None
    except UnknownFormatError:
        raise
    except OF_DATA as error:
        page = Page(
            cut(location.place.name or location.place, 80), "damaged dataset", [("path", cut(location.place, 200))]
        )
        page.damaged("cannot be opened", error)
        return page
    opening = ("opening", time.monotonic() - began)
    if store is not None:
        page = activations.page_of(store, layers, selected, count, decode, tell)
        page.took.insert(0, opening)
        return page
    assert cache is not None
    if layers is not None:
        raise ArgumentError("layers: a token cache has no layers. Leave layers= out.", path=cache.path)
    if selected[1] is not None:
        raise ArgumentError("rows: a token cache has no rows of layers to sample. Leave rows= out.", path=cache.path)
    if not selected[0].is_default:
        raise ArgumentError("tokens: a report of a token cache covers all tokens. Leave tokens= out.", path=cache.path)
    try:
        page = caches.page_of(cache, count, decode, tell)
    except OF_DATA as error:
        page = Page(cut(cache.path.name or cache.path, 80), "token cache", [("path", cut(cache.path, 200))])
        page.damaged("cannot be read", error)
    page.took.insert(0, opening)
    return page


def _template() -> Callable[..., str]:
    """Renders the page."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError.of("a report", "report") from error
    loader = jinja2.PackageLoader("actshard.looking.reporting")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template: Callable[..., str] = environment.get_template("page.html").render
    return template


def _made_at(seconds: float) -> dict[str, object]:
    """The version, and how long it took, or the date that SOURCE_DATE_EPOCH gives."""
    version = build_info()["version"]
    fixed = environment_time()
    if fixed is not None:
        return {"version": version, "seconds": None, "date": datetime.fromtimestamp(fixed, UTC).strftime("%Y-%m-%d")}
    return {"version": version, "seconds": seconds, "date": None}
