"""DeepSpec's target caches for training draft models; see docs/formats/deepspec.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class DeepspecFormat(Format):
    """DeepSpec target caches, versions 2 to 4."""

    name: ClassVar[str] = "deepspec"
    description: ClassVar[str] = "DeepSpec target caches"
    signs: ClassVar[tuple[str, ...]] = ("manifest.json",)
    manifest: ClassVar[tuple[str, ...]] = ("manifest.json",)
    column_files: ClassVar[tuple[str, ...]] = ("samples.idx",)
    order: ClassVar[int] = 50
    writes: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "target": ".write:DeepspecTarget",
        "check": ".read:check",
        "carrying": ".write:DeepspecCarrying",
    }

    def remains(self, names: frozenset[str]) -> bool:
        return any(name.startswith("samples.") and name.endswith(".idx") for name in names)


FORMAT = DeepspecFormat()
