"""Formats numbers and text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def console() -> Console:
    """Returns a console for stdout; plain and 200 columns wide if stdout is not a terminal."""
    made = Console(highlight=False)
    if not made.is_terminal:
        made = Console(highlight=False, width=200)
    return made


def show_facts(lines: Iterable[tuple[str, object]], warnings: Iterable[str]) -> None:
    """Prints names with their values (rich markup), then the warnings."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines:
        grid.add_row(name, str(value))
    out = console()
    out.print(grid)
    for warning in warnings:
        out.print(f"[yellow]warning[/] {escape(warning)}", soft_wrap=True)


def size(count: int) -> str:
    """Formats bytes with a unit: 3.6 GB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def one_line(text: object, width: int) -> str:
    """Removes line breaks and truncates to a width."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
