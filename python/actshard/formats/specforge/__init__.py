"""SpecForge's hidden states for training EAGLE-3, DFlash and DSpark; see docs/formats/specforge.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class SpecForgeFormat(Format):
    """SpecForge hidden states. Read, verified and converted from."""

    name: ClassVar[str] = "specforge"
    description: ClassVar[str] = "SpecForge hidden states"
    names_layers: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".files:detect",
        "open": ".files:open",
        "check": ".files:check",
    }


FORMAT = SpecForgeFormat()
