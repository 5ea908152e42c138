"""lmprobe extractions; see docs/formats/lmprobe.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.base.codes import Code
from actshard.formats.format import Format, Room
from actshard.formats.lmprobe import codes


class LmprobeFormat(Format):
    """lmprobe extractions. Read, written, verified, merged and converted."""

    name: ClassVar[str] = "lmprobe"
    description: ClassVar[str] = "lmprobe extractions"
    manifest: ClassVar[tuple[str, ...]] = ("lmprobe_info.json", "index/*.parquet")
    findings: ClassVar[tuple[Code, ...]] = codes.FINDINGS
    order: ClassVar[int] = 20
    writes: ClassVar[bool] = True
    skips_incomplete: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "target": ".write:LmprobeTarget",
        "check": ".check:check",
        "merger": ".merge:LmprobeMerger",
        "carrying": ".columns:LmprobeCarrying",
    }

    def remains(self, names: frozenset[str]) -> bool:
        return not names.isdisjoint(("index", "tensors"))


FORMAT = LmprobeFormat()
