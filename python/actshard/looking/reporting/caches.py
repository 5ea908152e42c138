"""The report of a token cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from actshard import plot
from actshard.base._arguments import many
from actshard.base.errors import ActshardError, MissingExtraError
from actshard.looking.reporting.page import MOST_TOKENS, Grid, Page, ShownExample, Word, quoted, share
from actshard.looking.stats.summary import Advice, cut
from actshard.tokens.cache import TokenCache
from actshard.tokens.looking import CacheLook, decoder_of, look
from actshard.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from actshard.formats.format import Tell

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
