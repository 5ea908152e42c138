"""``actshard push``."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from actshard.base._arguments import many
from actshard.cli._format import console, size
from actshard.cli._progress import progress
from actshard.writing.pushing import Pushed, push


def run(folder: str, url: str, *, quiet: bool, **options: Any) -> Pushed:
    """Uploads a dataset and shows progress."""
    with progress("uploading", quiet=quiet, unit="bytes") as watch:
        return push(folder, url, progress=watch.counts, **options)


def show(upload: Pushed) -> None:
    """Prints the result."""
    out = console()
    rate = f", {size(int(upload.sent_bytes / upload.seconds))}/s" if upload.seconds and upload.sent_bytes else ""
    out.print(
        f"{escape(upload.url)}: {upload.format}, {many(upload.files, 'file')}, {size(upload.bytes)}; "
        f"sent {many(upload.sent_files, 'file')}, {size(upload.sent_bytes)}{rate}",
        soft_wrap=True,
    )
    if upload.left_out:
        shown = ", ".join(upload.left_out[:8]) + (
            f" and {len(upload.left_out) - 8} more" if len(upload.left_out) > 8 else ""
        )
        out.print(f"[yellow]left out[/] {escape(shown)}: hidden files are not uploaded", soft_wrap=True)
    for note in upload.notes:
        out.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
