"""``actshard verify``."""

from __future__ import annotations

from typing import Literal

from rich.markup import escape

from actshard.base._arguments import counted, many
from actshard.base.location import Location
from actshard.cli._format import console, size
from actshard.cli._progress import progress
from actshard.reading.verifying import Report, verify

_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}


def run(
    path: Location,
    format: str | None,
    deep: bool,
    layout: str | None = None,
    incomplete: Literal["error", "skip"] = "error",
    *,
    quiet: bool,
) -> Report:
    """Verifies a dataset and shows progress."""
    with progress("verifying", quiet=quiet) as watch:
        return verify(path, format=format, deep=deep, progress=watch.stage, layout=layout, incomplete=incomplete)


def show(report: Report) -> None:
    """Prints all findings and a summary."""
    out = console()
    for finding in sorted(report.findings, key=lambda f: list(_COLOURS).index(f.severity)):
        colour = _COLOURS[finding.severity]
        head, _, rest = str(finding).partition("] ")
        out.print(f"[{colour}]{escape(head + ']')}[/] {escape(rest)}", soft_wrap=True)
    looked = ", ".join(size(n) if what == "bytes" else counted(n, what) for what, n in report.checked.items())
    verdict = (
        "no problems"
        if report.status == 0
        else f"{many(len(report.errors), 'error')}, {many(len(report.warnings), 'warning')}"
    )
    depth = "" if report.deep else "; --deep also checks every value"
    checked = f" in {looked}" if looked else ""
    out.print(f"{escape(str(report.path))} ({report.format or 'unknown'}): {verdict}{checked}{depth}", soft_wrap=True)
