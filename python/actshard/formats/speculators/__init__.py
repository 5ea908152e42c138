"""speculators' offline training data: rows in Arrow, hidden states one file per row; see docs/formats/speculators.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.base.codes import Code
from actshard.formats.format import Format, Room
from actshard.formats.speculators import codes


class SpeculatorsFormat(Format):
    """speculators' training data, and the request files of vLLM's connector. Request files are not written."""

    name: ClassVar[str] = "speculators"
    description: ClassVar[str] = "vLLM speculators training data"
    skips_incomplete: ClassVar[bool] = True
    manifest: ClassVar[tuple[str, ...]] = ("dataset_info.json", "state.json")
    column_files: ClassVar[tuple[str, ...]] = ("*.arrow",)
    order: ClassVar[int] = 60
    writes: ClassVar[bool] = True
    findings: ClassVar[tuple[Code, ...]] = codes.FINDINGS
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "target": ".write:SpeculatorsTarget",
        "check": ".check:check",
        "carrying": ".columns:SpeculatorsCarrying",
    }


FORMAT = SpeculatorsFormat()
