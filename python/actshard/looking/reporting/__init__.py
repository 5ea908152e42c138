"""``actshard.report``: one HTML file about a dataset or token cache, for people.

The file needs no network and no script. All text of datasets is escaped: by Jinja in the page, by matplotlib in plots. Lists
and texts are cut, so that a page stays below 1.5 MB whatever the dataset.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from actshard import plot
from actshard._native import build_info
from actshard.base import _arguments
from actshard.base._arguments import many
from actshard.base.errors import ActshardError, ArgumentError, MissingExtraError, UnknownFormatError
from actshard.base.layers import Layer
from actshard.base.work.files import write_bytes
from actshard.formats.format import Tell
from actshard.formats.target import environment_time
from actshard.looking.reporting import activations
from actshard.looking.reporting.activations import ReportedRows
from actshard.looking.reporting.page import (
    FEW_COLUMNS,
    MOST_TOKENS,
    OF_DATA,
    Grid,
    Page,
    ShownExample,
    Word,
    quoted,
    share,
    steps,
)
from actshard.looking.stats.summary import Advice, cut
from actshard.plot.style import check_name, library
from actshard.reading.finding import existing_anywhere
from actshard.reading.opening import open_quietly, token_cache_at
from actshard.reading.store import Store
from actshard.reading.verifying import Report, verify
from actshard.streaming.selection import Limit, Mask, Selection, Tokens
from actshard.tokens.cache import TokenCache
from actshard.tokens.looking import CacheLook, decoder_of, look
from actshard.tokens.tokenizer import Tokenizer, load_tokenizer

# The report of a token cache.


_COMMON = 20
"""Commonest tokens in the table."""
_SPECIAL = 50
"""Most special tokens in the table."""
_REPEATED = 0.01
"""Share of repeated documents from which on they are a finding."""
_FILL = 0.9
_CUT = 0.05
"""Share of tokens cut off, up to which a length of examples is recommended."""
_ENDS = 0.5
"""Share of documents that end with one token, from which on the others are a finding."""


def page_of(cache: TokenCache, count: int, tokenizer: Tokenizer | None, tell: Tell) -> Page:
    """The parts of a report that come from the cache."""
    decode = tokenizer or _recorded(cache)
    page = Page(cut(cache.path.name or cache.path, 80), "token cache", [])
    with page.timed("counts of tokens"):
        summary = look(cache, progress=lambda done, total: tell("tokens", done, total))
    page.facts = list(_facts(cache, summary))
    page.advice = [*_advice(summary, decode), *(Advice("warning", "cache", cut(text)) for text in cache.warnings)]
    if summary.tokens:
        with page.timed("plots"):
            page.plot("lengths", "Lengths of documents", lambda: plot.lengths(summary))
            page.plot("frequency", "Token frequency", lambda: plot.frequency(summary))
            page.plot("packing", "Packing of whole documents", lambda: plot.packing(summary))
    with page.timed("tables and texts"):
        page.grids = [(heading, text, grid.full()) for heading, text, grid in _grids(summary, decode)]
        page.samples, page.samples_of = _samples(cache, summary, count, decode), "each token has its own colour"
    extent = (
        f"{summary.read_documents:,} of {many(summary.documents, 'document')}, in evenly spaced runs"
        if summary.is_sample
        else "all documents"
    )
    page.how = [
        ("lengths, packing", "all documents"),
        ("token counts, repeated documents", f"{extent}; {many(summary.read_tokens, 'token')}"),
        ("packing", "whole documents in order, at most 64 per example, as actshard.tokens.PackedTokenDataset does"),
    ]
    return page


def _recorded(cache: TokenCache) -> Tokenizer | None:
    """The tokenizer that the ledger names, if it is on this machine."""
    try:
        return decoder_of(cache)
    except (ActshardError, MissingExtraError):
        return None


def _facts(cache: TokenCache, summary: CacheLook) -> Iterator[tuple[str, str]]:
    yield "layout", cache.ledger.layout
    yield "documents", f"{summary.documents:,}"
    yield "tokens", f"{summary.tokens:,}"
    if summary.documents:
        low, middle, high = int(summary.lengths.min()), float(np.median(summary.lengths)), int(summary.lengths.max())
        yield "tokens per document", f"{low:,} to {high:,}, median {middle:,.0f}"
    yield "distinct ids", f"{summary.distinct:,}"
    yield "fields", cut(", ".join(f"{name} {cache.dtype(name)}" for name in cache.fields), 120)
    tokenizer_name = cache.ledger.preprocessor.get("tokenizer")
    if tokenizer_name is not None:
        yield "tokenizer", cut(tokenizer_name, 120)
    yield "path", cut(cache.path, 200)


def _advice(summary: CacheLook, decode: Tokenizer | None) -> Iterator[Advice]:
    if not summary.tokens:
        yield Advice("warning", "cache", "contains no tokens.")
        return
    empty = int(np.count_nonzero(summary.lengths == 0))
    if empty:
        yield Advice("note", "documents", f"{many(empty, 'empty document')}.")
    repeated = summary.repeated / max(summary.read_documents, 1)
    if repeated >= _REPEATED:
        yield Advice(
            "warning",
            "documents",
            f"{repeated:.1%} of the documents repeat an earlier one ({summary.repeated:,}). A model memorizes repeated texts.",
            "Remove duplicates from the sources.",
        )
    if summary.outside:
        yield Advice(
            "error", "tokens", f"{many(summary.outside, 'token id')} below 0 or from 2^24 on.", "Build the cache again."
        )
    if decode is not None and len(summary.counts) > decode.vocab_size:
        beyond = int(summary.counts[decode.vocab_size :].sum())
        yield Advice(
            "error",
            "tokens",
            f"{many(beyond, 'token id')} from {decode.vocab_size:,} on, the size of the tokenizer's vocabulary.",
            "Use the tokenizer that the cache was built with.",
        )
    yield from _packing(summary)
    full = summary.read_documents - (empty if not summary.is_sample else 0)
    if summary.last and _ENDS <= summary.last[0][1] / max(full, 1) < 1:
        token, times = summary.last[0]
        yield Advice(
            "note",
            "documents",
            f"{full - times:,} of {full:,} documents do not end with {_name(token, decode)}, the commonest last token.",
            "Documents without an end token run into the next one.",
        )


def _packing(summary: CacheLook) -> Iterator[Advice]:
    """The length with the most padding, if that is much, compared with the best length that cuts off few tokens.

    Longer examples than the whole cache are no choice.
    """
    fills = [fill for fill in summary.fills if fill.examples and fill.length <= summary.tokens]
    worst = min(fills, key=lambda x: x.fill, default=None)
    if worst is None or worst.fill >= _FILL:
        return
    lost = {x.length: x.cut / summary.tokens for x in fills}
    fuller = [x for x in fills if x.fill > worst.fill]
    text = (
        f"with {many(worst.length, 'token')} per example, {1 - worst.fill:.0%} of positions are padding and "
        f"{share(lost[worst.length])} of tokens are cut off"
    )
    best = max((x for x in fuller if lost[x.length] <= _CUT), key=lambda x: x.fill, default=None)
    if best is not None:
        text += f"; with {best.length:,}, {1 - best.fill:.0%} and {share(lost[best.length])}"
    elif fuller:
        text += f"; lengths with less padding cut off over {_CUT:.0%} of tokens"
    yield Advice(
        "note",
        "packing",
        f"{text}.",
        "Windows of fixed length have no padding and keep long documents, but split them.",
        f"TokenSeqDataset(cache, {worst.length})",
        "packing",
    )


def _name(token: int, decode: Tokenizer | None) -> str:
    """A token id with its text."""
    if decode is None or not 0 <= token < decode.vocab_size:
        return f"id {token:,}"
    return f"{quoted(decode.decode([token]))} (id {token:,})"


def _text(token: int, decode: Tokenizer | None) -> str:
    return "" if decode is None or not 0 <= token < decode.vocab_size else quoted(decode.decode([token]))


def _grids(summary: CacheLook, decode: Tokenizer | None) -> Iterator[tuple[str, str, Grid]]:
    total = max(summary.read_tokens, 1)
    rows = [
        [str(rank), f"{token:,}", _text(token, decode), f"{times:,}", f"{times / total:.2%}"]
        for rank, (token, times) in enumerate(summary.commonest(_COMMON), 1)
    ]
    yield "Commonest tokens", "", Grid(["rank", "id", "token", "occurrences", "share"], rows, texts=(2,))
    special = _special(decode)
    if special:
        rows = [
            [
                cut(name, 60),
                f"{token:,}",
                f"{_times(summary, token):,}",
                *(f"{dict(x).get(token, 0):,}" for x in (summary.first, summary.last)),
            ]
            for token, name in special[:_SPECIAL]
        ]
        columns = ["token", "id", "occurrences", "documents begin with it", "documents end with it"]
        yield "Special tokens", "", Grid(columns, rows, max(len(special) - _SPECIAL, 0))
    ends = [("first", summary.first), ("last", summary.last)]
    rows = [[where, f"{token:,}", _text(token, decode), f"{n:,}"] for where, tokens in ends for token, n in tokens[:5]]
    yield "First and last tokens of documents", "", Grid(["place", "id", "token", "documents"], rows, texts=(0, 2))
    if summary.repeats:
        rows = [[f"{row:,}", f"{times:,}", f"{int(summary.lengths[row]):,}"] for row, times in summary.repeats]
        yield "Repeated documents", "", Grid(["first document", "occurrences", "tokens"], rows, texts=())
    if summary.tokens:
        rows = [
            [
                f"{x.length:,}",
                f"{x.examples:,}",
                f"{x.fill:.1%}" if x.examples else "-",
                f"{x.cut:,}",
                f"{x.cut / summary.tokens:.1%}",
            ]
            for x in summary.fills
        ]
        yield "Packing", "", Grid(["tokens per example", "examples", "fill", "tokens cut off", "share"], rows, texts=())


def _times(summary: CacheLook, token: int) -> int:
    return int(summary.counts[token]) if 0 <= token < len(summary.counts) else 0


def _special(decode: Tokenizer | None) -> list[tuple[int, str]]:
    """Ids and texts of special tokens."""
    if decode is None or decode.backend is None:
        return []
    added = decode.backend.get_added_tokens_decoder()
    return sorted((int(i), str(token.content)) for i, token in added.items() if token.special)


def _samples(cache: TokenCache, summary: CacheLook, count: int, decode: Tokenizer | None) -> list[ShownExample]:
    """Documents, evenly spaced, that are not empty."""
    full = np.flatnonzero(summary.lengths)
    n = min(count, len(full))
    samples = []
    for i in range(n):
        row = int(full[i * len(full) // n])
        ids = np.asarray(cache.view(cache.token_field)[row]).reshape(-1)[:MOST_TOKENS].tolist()
        words = [
            Word(_shown(token, decode), 3 if position % 2 else 5, f"token {position}: id {token}")
            for position, token in enumerate(ids)
        ]
        length = int(summary.lengths[row])
        samples.append(ShownExample(f"document {row:,}: {many(length, 'token')}", "", words, length - len(words)))
    return samples


def _shown(token: int, decode: Tokenizer | None) -> str:
    if decode is None or not 0 <= token < decode.vocab_size:
        return str(token)
    return cut(decode.decode([token]), 40)


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
        page = page_of(cache, count, decode, tell)
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
