"""``actshard top``, and ``actshard info`` and ``head`` of token caches."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from actshard.base._arguments import many
from actshard.base.errors import ESCAPES, ActshardError, ArgumentError, MissingExtraError
from actshard.base.layers import listing, plain
from actshard.base.location import Location
from actshard.cli._format import TableColumn, console, one_line, show_facts, show_table, size
from actshard.cli._options import of_store
from actshard.looking.examining import Examined, examine
from actshard.reading.finding import of_tokens
from actshard.reading.store import Store
from actshard.tokens.cache import TokenCache
from actshard.tokens.looking import (
    SHOWN_TOKENS,
    DecodedRow,
    decode_rows,
    decoder_of,
    read_beginnings,
    summarize,
    tokenizer_difference,
)
from actshard.tokens.processing import MASKS
from actshard.tokens.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping


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


_BAR = 24
"""Characters of a bar."""
_MEDIANS = 4
"""Length of a bar, in multiples of the median norm."""
_MASSIVE = 100
"""A token is massive if its norm exceeds this multiple of the median norm (arXiv 2402.17762)."""


def look(store: Store, example: int, layer: str, tokenizer: str, largest: int) -> Examined:
    """Reads one example."""
    names = of_store(layer, store.layers, "--layer") if layer else [None]
    if len(names) != 1:
        raise ArgumentError(f"--layer: expected one layer, found {layer!r:.200}")
    return examine(
        store, example, names[0], tokenizer=load_tokenizer(tokenizer) if tokenizer else None, largest=largest
    )


def show_example(store: Store, inspection: Examined, count: int) -> None:
    """Prints a line per token."""
    out = console()
    out.print(
        f"example {inspection.example} of {store.num_examples:,}, layer {escape(plain(inspection.layer))}",
        soft_wrap=True,
    )
    if inspection.text is not None:
        out.print(escape(one_line(inspection.text, 400)), soft_wrap=True)
    grid = Table(box=None, pad_edge=False)
    grid.add_column("token", justify="right")
    if inspection.ids is not None:
        grid.add_column("id", justify="right")
    if inspection.pieces is not None:
        grid.add_column("text", overflow="fold")
    grid.add_column("norm", justify="right")
    grid.add_column(f"0 to {_MEDIANS} medians", no_wrap=True)
    grid.add_column("largest dimensions", overflow="fold")
    for i in range(min(len(inspection), count)):
        norm, (bar, colour) = float(inspection.norms[i]), _bar(float(inspection.norms[i]), inspection.median)
        mark = "" if inspection.special <= i < inspection.content else "[dim]"
        cells = [f"{mark}{i}"]
        if inspection.ids is not None:
            cells.append(f"{inspection.ids[i]}")
        if inspection.pieces is not None:
            cells.append(escape(visible(inspection.pieces[i])))
        largest = zip(inspection.dimensions[i].tolist(), inspection.values[i].tolist(), strict=True)
        shown = "  ".join(f"[dim]{d}[/] {v:+.3g}" for d, v in largest)
        grid.add_row(*cells, f"{norm:.4g}", f"[{colour}]{bar}[/]", shown)
    out.print(grid)
    for line in _notes(store, inspection, count):
        out.print(f"[dim]{line}[/]", soft_wrap=True)


def _bar(norm: float, median: float) -> tuple[str, str]:
    """Returns a bar and its colour."""
    if not math.isfinite(norm):
        return "not finite", "red"
    if not median > 0:
        return "", "dim"
    ratio = norm / median
    colour = "red" if ratio > _MASSIVE else "yellow" if ratio > _MEDIANS else "cyan"
    if ratio > _MEDIANS:
        return "█" * (_BAR - 1) + f"▶ {ratio:,.0f}x", colour
    eighths = round(ratio / _MEDIANS * _BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), colour


def visible(piece: str) -> str:
    """Returns a token's text as one line, with visible symbols for line breaks and for spaces at its ends."""
    shown = piece.replace("\n", "⏎").replace("\r", "⏎").replace("\t", "⇥")
    bare = shown.strip(" ")
    if len(bare) == len(shown):
        return one_line(shown, 40)
    first = len(shown) - len(shown.lstrip(" "))
    return one_line("·" * first + bare + "·" * (len(shown) - len(bare) - first), 40)


def _notes(store: Store, inspection: Examined, count: int) -> list[str]:
    notes = [f"median norm {inspection.median:.4g}; layers: {escape(listing(store.layers))}"]
    if len(inspection) > count:
        notes.append(f"{count:,} of {len(inspection):,} tokens; --tokens prints more")
    if inspection.special:
        notes.append(
            "the first token is special"
            if inspection.special == 1
            else f"the first {inspection.special} tokens are special"
        )
    if inspection.content < len(inspection):
        notes.append(f"tokens from {inspection.content} on are padding")
    if inspection.pieces is None and (inspection.ids is not None or inspection.text is not None):
        notes.append("--tokenizer DIR prints the text of each token, if it yields one token per stored row")
    return notes


def row(
    cache: TokenCache, example: int, of_layers: tuple[str, int | None], tokenizer: str, count: int
) -> dict[str, object]:
    """Returns a row of a token cache: ids, texts if there is a tokenizer, and other fields with one value per token.

    Raises:
        ArgumentError: ``of_layers``, the options ``--layer`` and ``--largest``, has values.
        Errors of reading the row.
    """
    for option, is_given in (("--layer", of_layers[0] != ""), ("--largest", of_layers[1] is not None)):
        if is_given:
            raise ArgumentError(f"{option}: token caches have no layers. Leave it out.", path=cache.path)
    fields, decode = cache[example], tokenizer_of(cache, tokenizer)
    ids = fields[cache.token_field].reshape(-1)
    record: dict[str, Any] = {"row": example, "tokens": len(ids), "ids": ids[:count].tolist()}
    if decode is not None:
        record["text"] = [decode.decode([i]) for i in record["ids"]]
    for name, values in fields.items():
        if name != cache.token_field and np.size(values) == len(ids):
            record[name] = values.reshape(-1)[:count].tolist()
    return record


def show_row(cache: TokenCache, record: Mapping[str, Any]) -> None:
    """Prints a line per token."""
    out = console()
    out.print(f"row {record['row']} of {len(cache):,}, {many(record['tokens'], 'token')}")
    per_token = [name for name, values in record.items() if isinstance(values, list)]
    grid = Table(box=None, pad_edge=False)
    grid.add_column("token", justify="right")
    for name in per_token:
        grid.add_column(escape(name), justify="left" if name == "text" else "right", overflow="fold")
    for i in range(len(record["ids"])):
        cells = [visible(record[name][i]) if name == "text" else show_number(record[name][i]) for name in per_token]
        grid.add_row(str(i), *map(escape, cells))
    out.print(grid)
    if len(record["ids"]) < record["tokens"]:
        out.print(f"[dim]{len(record['ids']):,} of {record['tokens']:,} tokens; --tokens prints more[/]")
    if "text" not in per_token:
        out.print("[dim]--tokenizer DIR prints the text of each token[/]")
