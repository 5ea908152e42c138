"""``actshard info`` and ``actshard head`` of token caches."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from rich.markup import escape
from rich.text import Text

from actshard.base._arguments import many
from actshard.base.errors import ESCAPES, ActshardError, MissingExtraError
from actshard.base.location import Location
from actshard.cli._format import console, one_line, show_facts, size
from actshard.cli._tables import TableColumn, show_table
from actshard.reading.finding import of_tokens
from actshard.tokens.cache import TokenCache
from actshard.tokens.decoding import (
    SHOWN_TOKENS,
    DecodedRow,
    decode_rows,
    decoder_of,
    read_beginnings,
    tokenizer_difference,
)
from actshard.tokens.looking import summarize
from actshard.tokens.processing import MASKS
from actshard.tokens.tokenizer import Tokenizer

_SHOWN = 12
"""Number of values of a row to print."""
_MASKED = "cyan"
"""The colour of masked tokens."""
_ESCAPES = {code: text for code, text in ESCAPES.items() if chr(code) not in "\n\t"}
"""Control characters, which a terminal might interpret; texts keep their lines."""


def about(cache: TokenCache) -> dict[str, Any]:
    """Returns a cache's properties as plain values."""
    summary = summarize(cache)
    root = Location.at(cache.path)
    root.list_below()
    files = root.files(sizes=True) if root.lists else iter(())
    return {
        "format": of_tokens(),
        "path": str(cache.path),
        "layout": cache.ledger.layout,
        "rows": len(cache),
        "tokens_per_row": [summary.lengths.min, summary.lengths.max],
        **summary.as_dict(),
        "fields": {name: str(cache.dtype(name)) for name in cache.fields},
        "shards": len(cache.ledger.finished_shards),
        "bytes": sum(entry.size or 0 for _, entry in files),  # 0 on a web server, which cannot list them
        "io": cache.io,
        "made_by": cache.ledger.preprocessor,
        "skipped": sum(cache.ledger.skipped.values()),
        "warnings": [str(w) for w in cache.warnings],
        "warning_codes": [w.code for w in cache.warnings],
    }


def show_info(cache: TokenCache) -> None:
    """Prints a cache's properties."""
    facts = about(cache)
    lengths = facts["lengths"]
    names = {"min": "min", "median": "median", "p95": "95 % up to", "max": "max"}
    size_text = f" ({facts['vocab_size']:,} tokens)" if facts["vocab_size"] is not None else ""
    tokenizer = facts["tokenizer"]
    lines: list[tuple[str, Any]] = [
        ("format", f"{facts['format']} token cache, {facts['layout']}"),
        ("path", escape(facts["path"])),
        ("documents", f"{facts['documents']:,}"),
        ("tokens", f"{facts['tokens']:,}"),
        ("per document", ", ".join(f"{text} {lengths[name]:,}" for name, text in names.items())),
        ("tokenizer", f"{escape(tokenizer)}{size_text}" if tokenizer else "[dim]not recorded[/]"),
        ("fields", ", ".join(f"{escape(name)} {dtype}" for name, dtype in facts["fields"].items())),
        ("shards", f"{facts['shards']:,}"),
        ("bytes", size(facts["bytes"])),
        ("read by", facts["io"]),
        *([("skipped", many(facts["skipped"], "record"))] if facts["skipped"] else []),
        *(
            (key, escape(one_line(value, 100)))
            for key, value in facts["made_by"].items()
            if value is not None and key not in ("tokenizer", "vocab_size")
        ),
        *((f"padding {row['length']:,}", _padding(row)) for row in facts["padding"] if facts["documents"]),
    ]
    show_facts(lines, cache.warnings)


def _padding(row: dict[str, Any]) -> str:
    cut = f"; {many(row['cut'], 'token')} cut" if row["cut"] else ""
    return f"{row['alone']:.1%} with a document per example, {row['packed']:.1%} packed{cut}"


def show_number(value: float) -> str:
    """Prints an element of a field: an integer with all its digits."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def tokenizer_of(cache: TokenCache, name: str) -> Tokenizer | None:
    """Returns the named tokenizer, or the ledger's; None if that cannot be loaded on this machine."""
    try:
        return decoder_of(cache, name)
    except (ActshardError, MissingExtraError):
        if name:
            raise
        return None


def decoded(cache: TokenCache, n: int, name: str) -> list[DecodedRow]:
    """Decodes the first rows; prints a warning if the cache was built with another tokenizer.

    Args:
        cache: an open cache.
        n: number of rows.
        name: the tokenizer; empty: that of the ledger.
    """
    tokenizer = decoder_of(cache, name)
    if (difference := tokenizer_difference(cache, tokenizer)) is not None:
        print(f"warning: {difference}", file=sys.stderr)
    return decode_rows(cache, n, tokenizer)


def show_texts(cache: TokenCache, n: int, name: str) -> None:
    """Prints the first rows as text. Masked tokens are coloured on a terminal with colours, otherwise in double brackets."""
    rows = decoded(cache, n, name)
    out = console()
    colours = out.is_terminal and out.color_system is not None and not out.no_color
    for row in rows:
        masked = sum(span.tokens for span in row.spans if span.masked)
        rest = f", the first {row.decoded_tokens:,} shown" if row.decoded_tokens < row.tokens else ""
        loss = f", {masked:,} of them without loss" if masked else ""
        out.print(f"[bold]row {row.row}[/]: {many(row.tokens, 'token')}{rest}{loss}")
        text = Text()
        for span in row.spans:
            shown = span.text.translate(_ESCAPES)
            marked = span.masked and not colours
            text.append(f"[[{shown}]]" if marked else shown, _MASKED if span.masked and colours else "")
        out.print(text, soft_wrap=True)
        out.print()
    sign = f"[{_MASKED}]this colour[/]" if colours else escape("[[ ]]")
    out.print(f"[dim]{len(rows):,} of {many(len(cache), 'document')}[/]; {sign}: tokens without loss")


def rows(cache: TokenCache, n: int, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Returns the first rows: text of the first tokens, if there is a tokenizer, and the first values of each field."""
    count = min(n, len(cache))
    if count == 0:
        return []
    fields = {name: read_beginnings(cache, name, count, _SHOWN) for name in cache.fields}
    lengths, ids = read_beginnings(cache, cache.token_field, count, SHOWN_TOKENS)
    records = []
    for i in range(count):
        shown: dict[str, object] = {"row": i, "tokens": int(lengths[i])}
        if tokenizer is not None:
            shown["text"] = tokenizer.decode(ids[i].tolist())
        if MASKS in fields:
            shown["assistant_tokens"] = int(np.count_nonzero(cache.view(MASKS)[i]))
        records.append(shown | {name: values[i].tolist() for name, (_, values) in fields.items()})
    return records


def show_rows(cache: TokenCache, n: int, tokenizer: Tokenizer | None) -> None:
    """Prints the first rows."""
    texts = [TableColumn("text", least=20, left=True)] if tokenizer is not None else []
    columns = [
        TableColumn("row"),
        TableColumn("tokens"),
        *texts,
        *(TableColumn(name, least=24, left=True) for name in cache.fields),
    ]
    records = rows(cache, n, tokenizer)
    cells = []
    for row in records:
        shown = [str(row["row"]), f"{row['tokens']:,}"]
        if tokenizer is not None:
            shown.append(one_line(row["text"], 80))
        shown += [
            " ".join(map(show_number, row[name])) + (" …" if row["tokens"] > _SHOWN else "") for name in cache.fields
        ]
        cells.append(shown)
    out = console()
    show_table(out, columns, cells)
    hint = "" if tokenizer is not None else "; --tokenizer DIR prints them as text"
    out.print(f"[dim]{len(records):,} of {many(len(cache), 'row')}{hint}[/]")
