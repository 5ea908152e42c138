"""Formats numbers and text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

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


# Tables that fit the terminal: if a line has no room for all columns, the others follow in further tables. No number is cut.


_GAP = 2
"""Spaces between two columns."""


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    Attributes:
        name: its header.
        least: the least width of a column of texts, which are folded to further lines; None: the column is never narrower than
            its cells.
        left: whether cells are aligned to the left.
    """

    name: str
    least: int | None = None
    left: bool = False


def show_table(
    out: Console,
    columns: Sequence[TableColumn],
    rows: Sequence[Sequence[str | Text]],
    *,
    keys: int = 1,
    blank: bool = True,
) -> None:
    """Prints a table, or several tables that each begin with the first ``keys`` columns. Texts are not parsed as markup.

    ``blank``: whether an empty line separates several tables.
    """
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    widths = [
        max([cell_len(column.name), *(cell.cell_len for cell in line)])
        for column, line in zip(columns, zip(*cells, strict=True) if cells else [()] * len(columns), strict=True)
    ]
    for number, chosen in enumerate(_groups(columns, widths, out.width, keys)):
        if number and blank:
            out.print()
        grid = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for i, width in chosen:
            grid.add_column(
                Text(columns[i].name), justify="left" if columns[i].left else "right", width=width, overflow="fold"
            )
        for row in cells:
            grid.add_row(*(row[i] for i, _ in chosen))
        out.print(grid)


def _groups(
    columns: Sequence[TableColumn], widths: Sequence[int], room: int, keys: int
) -> Iterator[list[tuple[int, int]]]:
    """Yields the columns of each table, with their widths."""
    if sum(widths) + _GAP * (len(widths) - 1) <= room:
        yield list(enumerate(widths))
        return
    least = [width if c.least is None else min(c.least, width) for c, width in zip(columns, widths, strict=True)]
    fixed = _GAP * keys + max(least[keys:], default=0)  # every table has room for at least one more column
    firsts = _shared(list(enumerate(least[:keys])), widths, room - fixed - sum(least[:keys]))
    table_room, spare = room - sum(width for _, width in firsts) - _GAP * (keys - 1), 0
    chosen: list[tuple[int, int]] = []
    for i in range(keys, len(columns)):
        if chosen and _GAP + least[i] > spare:
            yield firsts + _shared(chosen, widths, spare)
            chosen = []
        spare = (spare if chosen else table_room) - _GAP - least[i]
        chosen.append((i, least[i]))
    yield firsts + _shared(chosen, widths, spare)


def _shared(chosen: Sequence[tuple[int, int]], widths: Sequence[int], spare: int) -> list[tuple[int, int]]:
    """Gives the columns the space that is left, in order, up to the width of their cells."""
    shares = []
    for i, width in chosen:
        extra = max(min(widths[i] - width, spare), 0)
        shares.append((i, width + extra))
        spare -= extra
    return shares
