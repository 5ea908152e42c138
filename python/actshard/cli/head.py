"""``actshard head``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from actshard.base._arguments import many
from actshard.base.errors import ArgumentError
from actshard.base.layers import plain
from actshard.cli import latents
from actshard.cli._format import console, one_line
from actshard.cli._tables import TableColumn, show_table
from actshard.latents import LatentStore
from actshard.reading.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

_LAYERS_AT_MOST = 8
_TEXT_WIDTH = 24
"""The least width of a column of texts."""
_TEXTS = ("text", "text_preview", "prompt", "response")
"""Names of text columns in the formats."""
_SHOWN = (*_TEXTS, "label", "hallu_label", "split", "sample_key")


def rows(store: Store | list[LatentStore], n: int) -> list[dict[str, Any]]:
    """Returns the first examples: text, label, number of tokens, and each layer's norm at the last token."""
    if isinstance(store, list):
        return latents.rows(store, n)
    n = min(n, store.num_examples)
    columns = [name for name in _SHOWN if name in store.contents.column_names]
    table = first_rows(store, columns, n).to_pydict() if columns else {}
    counts = store.tokens_of(range(min(n, len(store))))
    records: list[dict[str, Any]] = [
        {"example": i, **{name: table[name][i] for name in columns}, "tokens": int(counts[i])} for i in range(n)
    ]
    stored = np.flatnonzero(counts)
    for layer in store.layers:
        last = store.last_tokens(layer, stored).astype(np.float64)
        norms = dict(zip(stored.tolist(), np.linalg.norm(last, axis=1).tolist(), strict=True))
        for i, row in enumerate(records):
            row.setdefault("norms", {})[str(layer)] = norms.get(i)
    if store.labels is not None:
        for i, row in enumerate(records):
            values, times = np.unique(store.labels[i], return_counts=True)
            row["labels"] = {int(v): int(t) for v, t in zip(values, times, strict=True)}
    return records


def refuse_options_of_caches(store: Store | list[LatentStore], *options: str) -> None:
    """Checks that no option of token caches is used: only their rows are decoded.

    Args:
        store: a dataset of activations.
        options: names of the options that were used.

    Raises:
        ArgumentError: there are some.
    """
    if options:
        raise ArgumentError(
            f"{', '.join(options)}: expected a token cache, found a dataset of activations. Leave it out; `actshard top` decodes "
            "tokens.",
            path=store[0].path if isinstance(store, list) else store.path,
        )


def first_rows(store: Store, columns: list[str], n: int) -> pa.Table:
    """Reads columns of the first examples. Reads only these examples if the format supports it."""
    head = store.contents.head_columns
    return head(columns, n) if head is not None else store.read_columns(columns).slice(0, n)


def show(store: Store | list[LatentStore], n: int) -> None:
    """Prints the first examples."""
    if isinstance(store, list):
        latents.show_rows(store, n)
        return
    records = rows(store, n)
    out = console()
    column_names = [name for name in _SHOWN if records and name in records[0]]
    columns = [TableColumn("example")]
    columns += [TableColumn(name, least=_TEXT_WIDTH if name in _TEXTS else None, left=True) for name in column_names]
    labelled = bool(records) and "labels" in records[0]
    columns += [TableColumn("patch labels", left=True)] * labelled
    layers = list(store.layers)
    shown = (
        layers if len(layers) <= _LAYERS_AT_MOST else layers[: _LAYERS_AT_MOST // 2] + layers[-_LAYERS_AT_MOST // 2 :]
    )
    columns += [TableColumn("tokens"), *(TableColumn(f"|h| {plain(layer)}") for layer in shown)]
    lines = []
    for row in records:
        cells = [str(row["example"])]
        cells += [
            one_line(row[name], 60 if name in _TEXTS else 16) if row[name] is not None else "-" for name in column_names
        ]
        if labelled:
            cells.append(one_line(", ".join(f"{v} x{t}" for v, t in row["labels"].items()), 30))
        norms = [row["norms"][str(layer)] for layer in shown]
        lines.append([*cells, str(row["tokens"]), *("-" if norm is None else f"{norm:.4g}" for norm in norms)])
    show_table(out, columns, lines)
    if len(shown) < len(layers):
        out.print(f"[dim]{len(layers) - len(shown)} more layers; --json prints all[/]")
    out.print(
        f"[dim]{len(records):,} of {many(store.num_examples, 'example')}; |h| is the norm of a layer's last token[/]"
    )
