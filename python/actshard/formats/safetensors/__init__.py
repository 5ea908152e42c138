"""Folders of plain .safetensors files, one per layer, with a layout.toml; see docs/formats/plain.md.

They are described folders written by actshard, and read by ``layout_toml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.base.location import Location
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Format, Room
from actshard.formats.plain_folders import PlainCarrying, check, plain_contents, plain_evidence

__all__ = ["FORMAT", "PlainCarrying", "check", "detect", "open"]


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
        "detect": ".:detect",
        "open": ".:open",
        "target": ".write:SafetensorsTarget",
        "check": ".:check",
        "carrying": ".:PlainCarrying",
    }


FORMAT = SafetensorsFormat()


def detect(path: Location) -> Evidence:
    """Checks for a description with the mark of ``safetensors``."""
    return plain_evidence(path, "safetensors")


def open(path: Location, options: Options) -> Contents:
    """Reads the description, the headers and the metadata, but no rows."""
    return plain_contents(path, options, "safetensors")
