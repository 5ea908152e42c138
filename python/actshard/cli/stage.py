"""``actshard stage``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from actshard.base._arguments import many
from actshard.base.layers import Layer
from actshard.cli._format import console, size
from actshard.cli._layers import has_range, of_store, several
from actshard.cli._places import options_named, place
from actshard.cli._progress import progress
from actshard.reading.opening import open_quietly
from actshard.writing.staging import Staged, stage


def layers_of(source: str, words: str, options: Sequence[str] | None) -> list[Layer] | None:
    """Parses ``--layers``: names, or ranges of stored layers; None for an empty text."""
    if not words or not has_range(words):
        return several(words, "--layers") if words else None
    location = place(source, options)
    return of_store(words, open_quietly(location, None, "auto").layers, "--layers")


def run(source: str, folder: str, layers: str, options: Sequence[str] | None, *, check: bool, quiet: bool) -> Staged:
    """Stages a dataset and shows progress."""
    names = layers_of(source, layers, options)
    with progress("staging", quiet=quiet) as watch:
        return stage(
            source, folder, names, storage_options=options_named(options) or None, check=check, progress=watch.stage
        )


def show(copy: Staged) -> None:
    """Prints the result."""
    out = console()
    fetched = f"{size(copy.fetched)} read" if copy.fetched else "the copy was complete"
    out.print(f"{escape(str(copy.path))}: {many(copy.files, 'file')}, {size(copy.bytes)}; {fetched}", soft_wrap=True)
    for loss in copy.losses:
        out.print(f"[yellow]lost[/] {escape(loss)}", soft_wrap=True)
