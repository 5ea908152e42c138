"""SpecForge's hidden states for training EAGLE-3, DFlash and DSpark; see docs/formats/specforge.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class SpecForgeFormat(Format):
    """SpecForge hidden states."""

    name: ClassVar[str] = "specforge"
    description: ClassVar[str] = "SpecForge hidden states"
    names_layers: ClassVar[bool] = True
    records_summed: ClassVar[tuple[str, ...]] = ("",)
    skips_incomplete: ClassVar[bool] = True
    order: ClassVar[int] = 70
    writes: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".files:detect",
        "open": ".files:open",
        "target": ".write:SpecForgeTarget",
        "check": ".files:check",
        "carrying": ".write:DraftCarrying",
    }


FORMAT = SpecForgeFormat()
