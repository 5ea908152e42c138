"""EAGLE's hidden states for training EAGLE 1 and 2; see docs/formats/eagle.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class EagleFormat(Format):
    """EAGLE hidden states."""

    name: ClassVar[str] = "eagle"
    description: ClassVar[str] = "EAGLE hidden states"
    names_layers: ClassVar[bool] = True
    records_summed: ClassVar[tuple[str, ...]] = ("",)
    skips_incomplete: ClassVar[bool] = True
    order: ClassVar[int] = 76
    writes: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".files:detect",
        "open": ".files:open",
        "target": ".write:EagleTarget",
        "check": ".files:check",
        "carrying": ".write:DraftCarrying",
    }


FORMAT = EagleFormat()
