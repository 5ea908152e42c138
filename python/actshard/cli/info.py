"""``actshard info``."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from actshard.cli._format import one_line, show_facts, size
from actshard.store import Store


def show(store: Store) -> None:
    """Prints a dataset's properties."""
    about = store.info()
    if about["tokens"] is None:
        tokens = "[dim]not counted: requires decoding every shard[/]"
    else:
        low, high = about["tokens_per_example"]
        tokens = f"{about['tokens']:,} ({low} each)" if low == high else f"{about['tokens']:,} ({low} to {high} each)"
    dtype = f"{about['dtype']} ({size(store.d_model * store.dtype.itemsize)} per row)"
    shards = f"{about['shards']:,}"
    if about["missing_shards"]:
        shards += f" [yellow]({about['missing_shards']:,} more are missing)[/]"
    lines: list[tuple[str, Any]] = [
        ("format", about["format"]),
        ("path", escape(about["path"])),
        ("model", escape(str(about["model"])) if about["model"] else "[dim]not recorded[/]"),
        ("examples", f"{about['examples']:,}"),
        ("tokens", tokens),
        ("layers", ", ".join(map(str, store.layers)) or "[dim]none: no hidden states[/]"),
        ("d_model", f"{store.d_model:,}"),
        ("dtype", dtype),
        ("shards", shards),
        ("bytes", size(about["bytes"])),
        ("read by", about["io"]),
        *([("also", ", ".join(about["also"]))] if about["also"] else []),
        ("columns", escape(", ".join(about["columns"]))),
    ]
    lines += [(key, escape(one_line(value, 100))) for key, value in about["provenance"].items() if value is not None]
    show_facts(lines, store.warnings)
