"""``actshard top``: one example, token by token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from actshard.base._arguments import many
from actshard.base.errors import ArgumentError
from actshard.base.layers import listing, plain
from actshard.cli._format import console, one_line
from actshard.cli._layers import of_store
from actshard.cli.caches import show_number, tokenizer_of
from actshard.looking.examining import Examined, examine
from actshard.reading.store import Store
from actshard.tokens.cache import TokenCache
from actshard.tokens.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def show(store: Store, inspection: Examined, count: int) -> None:
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
