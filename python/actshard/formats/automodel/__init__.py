"""NeMo Automodel's caches for training draft models, EAGLE-3 and DSpark; see docs/formats/automodel.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class AutomodelFormat(Format):
    """NeMo Automodel caches. DSpark caches are written; EAGLE-3 caches are read, verified and converted from."""

    name: ClassVar[str] = "automodel"
    description: ClassVar[str] = "NeMo Automodel caches"
    signs: ClassVar[tuple[str, ...]] = ("manifest.json",)
    manifest: ClassVar[tuple[str, ...]] = ("manifest.json",)
    order: ClassVar[int] = 65
    writes: ClassVar[bool] = True
    skips_incomplete: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "target": ".write:AutomodelTarget",
        "check": ".read:check",
        "carrying": ".write:AutomodelCarrying",
    }


FORMAT = AutomodelFormat()
