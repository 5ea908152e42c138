"""``actshard info`` and ``actshard head`` of token caches."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.markup import escape

from actshard._arguments import many
from actshard.cli._format import console, one_line, show_facts, size
from actshard.cli._tables import TableColumn, show_table
from actshard.errors import ActshardError, MissingExtraError
from actshard.finding import of_tokens
from actshard.location import Location
from actshard.tokens.cache import TokenCache
from actshard.tokens.tokenizer import Tokenizer, load_tokenizer

_SHOWN = 12
"""Number of values of a row to print."""


def about(cache: TokenCache) -> dict[str, Any]:
    """Returns a cache's properties as plain values."""
    lengths = np.diff(cache.view(cache.token_field).offsets) if len(cache) else np.zeros(0, np.int64)
    root = Location.at(cache.path)
    root.list_below()
    files = root.files(sizes=True) if root.lists else iter(())
    return {
        "format": of_tokens(),
        "path": str(cache.path),
        "layout": cache.ledger.layout,
        "rows": len(cache),
        "tokens": cache.num_tokens,
        "tokens_per_row": [int(lengths.min()), int(lengths.max())] if len(lengths) else [0, 0],
        "fields": {name: str(cache.dtype(name)) for name in cache.fields},
        "shards": len(cache.ledger.finished_shards),
        "bytes": sum(entry.size or 0 for _, entry in files),  # 0 on a web server, which cannot list them
        "io": cache.io,
        "made_by": cache.ledger.preprocessor,
        "skipped": _skipped(cache),
        "warnings": [str(w) for w in cache.warnings],
        "warning_codes": [w.code for w in cache.warnings],
    }


def _skipped(cache: TokenCache) -> int:
    own = cache.ledger.extra.get("actshard")
    counts = own.get("skipped") if isinstance(own, dict) else None
    return sum(counts.values()) if isinstance(counts, dict) else 0


def show_info(cache: TokenCache) -> None:
    """Prints a cache's properties."""
    found = about(cache)
    low, high = found["tokens_per_row"]
    lines: list[tuple[str, Any]] = [
        ("format", f"{found['format']} token cache, {found['layout']}"),
        ("path", escape(found["path"])),
        ("rows", f"{found['rows']:,}"),
        (
            "tokens",
            f"{found['tokens']:,} ({low:,} each)" if low == high else f"{found['tokens']:,} ({low:,} to {high:,} each)",
        ),
        ("fields", ", ".join(f"{escape(name)} {dtype}" for name, dtype in found["fields"].items())),
        ("shards", f"{found['shards']:,}"),
        ("bytes", size(found["bytes"])),
        ("read by", found["io"]),
        *([("skipped", many(found["skipped"], "record"))] if found["skipped"] else []),
        *((key, escape(one_line(value, 100))) for key, value in found["made_by"].items() if value is not None),
    ]
    show_facts(lines, cache.warnings)


def tokenizer_of(cache: TokenCache, given: str) -> Tokenizer | None:
    """Returns the tokenizer to decode with: the given one, or the ledger's if it exists on this machine."""
    if given:
        return load_tokenizer(given)
    recorded = cache.ledger.preprocessor.get("tokenizer")
    if not isinstance(recorded, str) or not Location.at(recorded).exists():
        return None
    try:
        return load_tokenizer(recorded)
    except (ActshardError, MissingExtraError):
        return None


def rows(cache: TokenCache, n: int, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Returns the first rows: text, if there is a tokenizer, and the first values of each field."""
    made = []
    for i, row in enumerate(cache.rows(range(min(n, len(cache))))):
        shown: dict[str, Any] = {"row": i, "tokens": int(row[cache.token_field].size) if row else 0}
        if tokenizer is not None:
            shown["text"] = tokenizer.decode(row[cache.token_field].reshape(-1).tolist())
        masks = row.get("assistant_masks")
        if masks is not None:
            shown["assistant_tokens"] = int(np.count_nonzero(masks))
        shown |= {name: values.reshape(-1)[:_SHOWN].tolist() for name, values in row.items()}
        made.append(shown)
    return made


def show_rows(cache: TokenCache, n: int, tokenizer: Tokenizer | None) -> None:
    """Prints the first rows."""
    texts = [TableColumn("text", least=20, left=True)] if tokenizer is not None else []
    columns = [
        TableColumn("row"),
        TableColumn("tokens"),
        *texts,
        *(TableColumn(name, least=24, left=True) for name in cache.fields),
    ]
    found = rows(cache, n, tokenizer)
    cells = []
    for row in found:
        shown = [str(row["row"]), f"{row['tokens']:,}"]
        if tokenizer is not None:
            shown.append(one_line(row["text"], 80))
        shown += [
            " ".join(f"{x:g}" for x in row[name]) + (" …" if row["tokens"] > _SHOWN else "") for name in cache.fields
        ]
        cells.append(shown)
    out = console()
    show_table(out, columns, cells)
    hint = "" if tokenizer is not None else "; --tokenizer DIR prints them as text"
    out.print(f"[dim]{len(found):,} of {many(len(cache), 'row')}{hint}[/]")
