"""Formats numbers and text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actshard.base._arguments import shown_bytes
from actshard.base.errors import ESCAPES
from actshard.cli._messages import spelled

size = shown_bytes


def console() -> Console:
    """Returns a console for stdout; plain and 200 columns wide if stdout is not a terminal."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=200)
    return out


def show_facts(lines: Iterable[tuple[str, object]], warnings: Iterable[str]) -> None:
    """Prints names and values (rich markup), then the warnings."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines:
        grid.add_row(name, str(value))
    out = console()
    out.print(grid)
    for warning in warnings:
        out.print(f"[yellow]warning[/] {escape(spelled(warning))}", soft_wrap=True)


def one_line(text: object, width: int) -> str:
    """Removes line breaks, escapes control characters, which the terminal might interpret, and truncates to a width."""
    flat = " ".join(str(text).split()).translate(ESCAPES)
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def duration(seconds: float) -> str:
    """Formats a time: 40 s, 12 min, 3.5 h."""
    if seconds < 1:
        return "below 1 s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"
