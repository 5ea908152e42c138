"""``actshard push``."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from actshard._arguments import many
from actshard.cli._format import console, size
from actshard.cli._progress import progress
from actshard.pushing import Pushed, push


def run(folder: str, url: str, *, quiet: bool, **options: Any) -> Pushed:
    """Uploads a dataset and shows progress."""
    with progress("uploading", quiet=quiet, unit="bytes") as watch:
        return push(folder, url, progress=watch.counts, **options)


def show(done: Pushed) -> None:
    """Prints the result."""
    out = console()
    rate = f", {size(int(done.sent_bytes / done.seconds))}/s" if done.seconds and done.sent_bytes else ""
    out.print(
        f"{escape(done.url)}: {done.format}, {many(done.files, 'file')}, {size(done.bytes)}; sent {many(done.sent_files, 'file')}, "
        f"{size(done.sent_bytes)}{rate}",
        soft_wrap=True,
    )
    if done.left_out:
        shown = ", ".join(done.left_out[:8]) + (f" and {len(done.left_out) - 8} more" if len(done.left_out) > 8 else "")
        out.print(f"[yellow]left out[/] {escape(shown)}: hidden files are not uploaded", soft_wrap=True)
    for note in done.notes:
        out.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
