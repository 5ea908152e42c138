"""HalluLens' inference captures (storage format ``inference_capture_v1``); see docs/formats/hallulens.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class HallulensFormat(Format):
    """HalluLens inference captures. Read, verified and converted from, but not written."""

    name: ClassVar[str] = "hallulens"
    description: ClassVar[str] = "HalluLens inference captures"
    rare_signs: ClassVar[tuple[str, ...]] = ("config.json",)
    manifest: ClassVar[tuple[str, ...]] = ("config.json",)
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "check": ".read:check",
        "carrying": ".read:HallulensCarrying",
    }

    def remains(self, names: frozenset[str]) -> bool:
        return "response_activations.npy" in names or {"meta.jsonl", "generation.jsonl"} <= names


FORMAT = HallulensFormat()
