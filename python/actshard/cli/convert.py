"""``actshard convert``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from actshard import formats
from actshard.base._arguments import many, one_of
from actshard.base.errors import ArgumentError
from actshard.base.layers import Layer
from actshard.base.location import Location
from actshard.cli._format import TableColumn, console, show_table, size
from actshard.cli._messages import spelled
from actshard.cli._options import of_store
from actshard.cli._progress import progress
from actshard.reading.opening import open_quietly
from actshard.reading.store import Store
from actshard.writing.converting import Conversion, Preview, convert, preview
from actshard.writing.converting.estimating import Estimate, all_forms, estimate

ESTIMATE_OPTIONS = frozenset(("to", "format", "layout", "storage_option", "cache", "estimate", "quiet", "json"))
"""Options of ``--estimate``."""


def columns_named(words: str) -> list[str] | dict[str, str] | None:
    """Parses ``--columns``: ``text,label=verb``, or JSON for names with commas or equals signs."""
    if not words:
        return None
    if words[0] in "[{":
        try:
            columns: list[str] | dict[str, str] = json.loads(words)
        except ValueError as error:
            raise ArgumentError(f"--columns: expected names of columns, or JSON: {error}") from error
        return columns
    if words == "none":
        return []
    pairs = [word.partition("=") for word in words.split(",")]
    if len({old for old, _, _ in pairs}) < len(pairs):
        raise ArgumentError(f"--columns: expected every name once, found {words!r}")
    return {old: new if equals else old for old, equals, new in pairs}


def examples_named(words: str) -> slice | list[int] | None:
    """Parses ``--examples``: ``:1000`` or ``3,5,8``."""
    if not words:
        return None
    try:
        if ":" in words:
            return slice(*(int(w) if w else None for w in words.split(":")))
        return [int(w) for w in words.split(",")]
    except (ValueError, TypeError):
        raise ArgumentError(f"--examples: expected first:last or integers, found {words!r}") from None


def options_named(words: Sequence[str], owner: str, *, short: bool = True) -> dict[str, Any]:
    """Parses ``--option name=value``; values are JSON if valid, else strings.

    Args:
        words: the values of the option.
        owner: whose options they are, for messages.
        short: whether the command also calls it ``-o``, which is an output file in other commands.
    """
    options: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ArgumentError(
                f"{'-o, ' * short}--option: expected name=value, an option of {owner}, found {word!r:.200}"
            )
        if name == "protocol":
            options[name] = value
            continue
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def source_named(location: Location, format: str | None, layout: str | None) -> Location | Store:
    """Returns the dataset to convert: opened already if a layout describes it."""
    return location if layout is None else open_quietly(location, format, "pread", "160MiB", layout=layout)


def layers_of(source: str | Location | Store, format: str | None, words: str) -> list[Layer]:
    """Parses ``--layer`` with a range, such as ``0-3``: stored layers of the source."""
    store = source if isinstance(source, Store) else open_quietly(source, format, "pread", "160MiB")
    return of_store(words, store.layers, "--layer")


def previews(source: Location | Store, target: str, format: str | None, arguments: Mapping[str, Any]) -> list[Preview]:
    """Returns previews for one format, or for all formats (None)."""
    every = preview(source, target, None, **arguments) if format is None else []
    return every or preview(source, target, format, **arguments)


def show_previews(candidates: Sequence[Preview]) -> None:
    """Prints a line per possible format; then all losses, and why other formats are not possible."""
    out = console()
    possible = [p for p in candidates if not p.refused]
    if possible:
        _compared(out, possible)
    for text, names in _alike((spelled(loss), p.format) for p in possible for loss in p.losses):
        out.print(f"[yellow]lost[/] {escape(text)} ({names})", soft_wrap=True)
    if possible:
        out.print("[dim]bytes are before compression; nothing was written[/]")
    for text, names in _alike((spelled(p.refused), p.format) for p in candidates if p.refused):
        out.print(f"[yellow]{names}: not possible:[/] {escape(text)}", soft_wrap=True)


def estimates(source: Location | Store, format: str, source_format: str | None) -> list[Estimate]:
    """Returns estimates of all forms, or of those of one format."""
    if format:
        one_of(format, formats.written(), "to")
    names = [form.name for form in all_forms() if format in ("", form.format)]
    return estimate(source, names, src_format=source_format)


def show_estimates(candidates: Sequence[Estimate]) -> None:
    """Prints a line per form, the smallest first; then why other forms are not possible."""
    out = console()
    columns = [
        TableColumn("form", left=True),
        *map(TableColumn, ("files", "bytes", "of rows", "error", "cosine", "stream")),
    ]
    cells = [
        [
            e.name,
            f"{e.files:,}",
            size(e.bytes) + (f" ± {size(e.uncertainty)}" if e.uncertainty else ""),
            f"{e.ratio:.3f}",
            "-" if e.relative_error is None else f"{e.relative_error:.2g}" if e.relative_error else "none",
            "-" if e.cosine is None else f"{e.cosine:.6f}" if e.relative_error else "1",
            f"{size(int(e.stream_rate))}/s",
        ]
        for e in candidates
        if e.refused is None
    ]
    show_table(out, columns, cells)
    out.print("[dim]error, cosine, stream: of a sample, in memory; nothing was written[/]")
    for text, names in _alike((spelled(e.refused), e.name) for e in candidates if e.refused):
        out.print(f"[yellow]{names}: not possible:[/] {escape(text)}", soft_wrap=True)


def _compared(out: Console, candidates: Sequence[Preview]) -> None:
    """Prints a table of formats below what they have in common."""
    common: list[str] = []
    columns = [TableColumn("format", left=True)]
    cells = [[p.format] for p in candidates]

    def add(name: str, values: Sequence[str], shared: str = "") -> None:
        if shared and len({*values}) == 1:
            common.append(shared)
            return
        columns.append(TableColumn(name))
        for row, value in zip(cells, values, strict=True):
            row.append(value)

    add("examples", [f"{p.examples:,}" for p in candidates], many(candidates[0].examples, "example"))
    add("rows", [f"{p.rows:,}" for p in candidates], many(candidates[0].rows, "row"))
    add("dtype", [p.dtype or "-" for p in candidates], candidates[0].dtype or "no dtype")
    add("shards", [f"{p.shards:,}" for p in candidates])
    add("files", [f"{p.files:,}" for p in candidates])
    add("bytes", [size(p.bytes) for p in candidates])
    add("losses", [f"{len(p.losses):,}" if p.losses else "none" for p in candidates])
    if common:
        out.print(", ".join(common))
    show_table(out, columns, cells)


def _alike(pairs: Iterable[tuple[str | None, str]]) -> list[tuple[str, str]]:
    """Different texts, each with the names of its formats."""
    names_by_text: dict[str, list[str]] = {}
    for text, name in pairs:
        names_by_text.setdefault(str(text), []).append(name)
    return [(text, ", ".join(names)) for text, names in names_by_text.items()]


def run(source: Location | Store, target: str, format: str, *, quiet: bool, **options: Any) -> Conversion:
    """Converts a dataset and shows progress."""
    one_of(format, formats.written(), "to")  # --format is the source's
    with progress(f"converting to {format}", quiet=quiet, unit="examples") as watch:
        return convert(source, target, format, progress=watch.counts, **options)


def show(conversion: Conversion) -> None:
    """Prints the result of a conversion."""
    out = console()
    resumed = f", {conversion.resumed_at:,} of them by an earlier call" if conversion.resumed_at else ""
    rate = f", {size(int(conversion.bytes / conversion.seconds))}/s" if conversion.seconds and conversion.bytes else ""
    out.print(
        f"{escape(str(conversion.path))}: {many(conversion.examples, 'example')}{resumed}, {size(conversion.bytes)} "
        f"in {conversion.seconds:.1f} s{rate}",
        soft_wrap=True,
    )
    for loss in conversion.losses:
        out.print(f"[yellow]lost[/] {escape(spelled(loss))}", soft_wrap=True)
    if conversion.verified:
        cast = any(x.what == "dtype" for x in conversion.losses)
        over = next((x for x in conversion.losses if x.what == "overflow"), None)
        what = f", as {conversion.dtype}" if cast else ""
        same = "the same" if over is None else f"the same, but [yellow]{escape(over.detail)}[/]"
        out.print(f"every row and column was compared with the source{what}: {same}", soft_wrap=True)
