"""AngelSlim's hidden states for training EAGLE-3 and DFlash; see docs/formats/angelslim.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class AngelSlimFormat(Format):
    """AngelSlim hidden states."""

    name: ClassVar[str] = "angelslim"
    description: ClassVar[str] = "AngelSlim hidden states"
    names_layers: ClassVar[bool] = True
    records_summed: ClassVar[tuple[str, ...]] = ("",)
    skips_incomplete: ClassVar[bool] = True
    order: ClassVar[int] = 74
    writes: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".files:detect",
        "open": ".files:open",
        "target": ".write:AngelSlimTarget",
        "check": ".files:check",
        "carrying": ".write:DraftCarrying",
    }


FORMAT = AngelSlimFormat()
