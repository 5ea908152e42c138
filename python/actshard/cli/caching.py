"""``actshard cache``."""

from __future__ import annotations

from rich.markup import escape

from actshard.base._arguments import many
from actshard.cli._format import console, show_facts, size
from actshard.reading.caching import CacheInfo


def show(usage: CacheInfo) -> None:
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
