"""``actshard stage``, ``push`` and ``cache``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from actshard.base._arguments import many
from actshard.base.layers import Layer
from actshard.cli._format import console, show_facts, size
from actshard.cli._options import has_range, of_store, options_named, place, several
from actshard.cli._progress import progress
from actshard.reading.caching import CacheInfo
from actshard.reading.opening import open_quietly
from actshard.writing.pushing import Pushed, push
from actshard.writing.staging import Staged, stage


def layers_of(source: str, words: str, options: Sequence[str] | None) -> list[Layer] | None:
    """Parses ``--layers``: names, or ranges of stored layers; None for an empty text."""
    if not words or not has_range(words):
        return several(words, "--layers") if words else None
    location = place(source, options)
    return of_store(words, open_quietly(location, None, "auto").layers, "--layers")


def run_stage(
    source: str, folder: str, layers: str, options: Sequence[str] | None, *, check: bool, quiet: bool
) -> Staged:
    """Stages a dataset and shows progress."""
    names = layers_of(source, layers, options)
    with progress("staging", quiet=quiet) as watch:
        return stage(
            source, folder, names, storage_options=options_named(options) or None, check=check, progress=watch.stage
        )


def show_copy(copy: Staged) -> None:
    """Prints the result."""
    out = console()
    fetched = f"{size(copy.fetched)} read" if copy.fetched else "the copy was complete"
    out.print(f"{escape(str(copy.path))}: {many(copy.files, 'file')}, {size(copy.bytes)}; {fetched}", soft_wrap=True)
    for loss in copy.losses:
        out.print(f"[yellow]lost[/] {escape(loss)}", soft_wrap=True)


def run_push(folder: str, url: str, *, quiet: bool, **options: Any) -> Pushed:
    """Uploads a dataset and shows progress."""
    with progress("uploading", quiet=quiet, unit="bytes") as watch:
        return push(folder, url, progress=watch.counts, **options)


def show_upload(upload: Pushed) -> None:
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


def show_usage(usage: CacheInfo) -> None:
    """Prints the state of a cache."""
    show_facts(
        [
            ("folder", escape(str(usage.folder))),
            ("bytes", size(usage.bytes)),
            ("limit", size(usage.limit) if usage.limit is not None else "[dim]unknown[/]"),
            ("objects", f"{usage.objects:,}"),
        ],
        (),
    )


def show_cleared(usage: CacheInfo, freed: int) -> None:
    """Prints the bytes that clearing removed, and the objects that are still in use."""
    rest = f"; {size(usage.bytes)} of {many(usage.objects, 'object', 'is', 'are')} in use" if usage.objects else ""
    console().print(f"{escape(str(usage.folder))}: {size(freed)} removed{rest}", soft_wrap=True)
