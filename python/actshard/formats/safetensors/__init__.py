"""Folders of plain .safetensors files, one per layer, with a layout.toml; see docs/formats/plain.md.

They are described folders written by actshard, and read by ``layout_toml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class SafetensorsFormat(Format):
    """A folder with a .safetensors file per layer, for readers without actshard."""

    name: ClassVar[str] = "safetensors"
    description: ClassVar[str] = "a folder with a .safetensors file per layer, and a layout.toml"
    signs: ClassVar[tuple[str, ...]] = ("layout.toml",)
    manifest: ClassVar[tuple[str, ...]] = ("layout.toml",)
    column_files: ClassVar[tuple[str, ...]] = ("columns.parquet", "lengths.*", "metadata.json")
    order: ClassVar[int] = 47
    writes: ClassVar[bool] = True
    skips_incomplete: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "target": ".write:SafetensorsTarget",
        "check": ".read:check",
        "carrying": ".read:PlainCarrying",
    }


FORMAT = SafetensorsFormat()
