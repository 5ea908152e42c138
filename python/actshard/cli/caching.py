"""``actshard cache``."""

from __future__ import annotations

from rich.markup import escape

from actshard._arguments import many
from actshard.caching import CacheInfo
from actshard.cli._format import console, show_facts, size


def show(found: CacheInfo) -> None:
    """Prints the state of a cache."""
    show_facts(
        [
            ("folder", escape(str(found.folder))),
            ("bytes", size(found.bytes)),
            ("limit", size(found.limit) if found.limit is not None else "[dim]unknown[/]"),
            ("objects", f"{found.objects:,}"),
        ],
        (),
    )


def show_cleared(left: CacheInfo, freed: int) -> None:
    """Prints the bytes that clearing removed, and the objects that are still in use."""
    more = f"; {size(left.bytes)} of {many(left.objects, 'object', 'is', 'are')} in use" if left.objects else ""
    console().print(f"{escape(str(left.folder))}: {size(freed)} removed{more}", soft_wrap=True)
