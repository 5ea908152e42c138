"""speculators' offline training data: rows in Arrow, hidden states one file per row; see docs/formats/speculators.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.base.codes import ERROR, WARNING, Code
from actshard.formats.format import Format, Room

FINDINGS = (
    Code(
        "scale-value",
        ERROR,
        "A scale of float8 or int8 states is NaN, infinite, zero or negative.",
        "The states of its tokens are NaN, infinite, zero, or have the wrong sign.",
        "generate the example again",
    ),
    Code(
        "saturated-codes",
        WARNING,
        "Many float8 or int8 codes have the largest magnitude.",
        "Scales are too small: larger values were clipped when the file was written.",
        "write the states again with scales of their largest magnitude",
    ),
)


class SpeculatorsFormat(Format):
    """speculators' training data, and the request files of vLLM's connector. Request files are not written."""

    name: ClassVar[str] = "speculators"
    description: ClassVar[str] = "vLLM speculators training data"
    skips_incomplete: ClassVar[bool] = True
    manifest: ClassVar[tuple[str, ...]] = ("dataset_info.json", "state.json")
    column_files: ClassVar[tuple[str, ...]] = ("*.arrow",)
    order: ClassVar[int] = 60
    writes: ClassVar[bool] = True
    findings: ClassVar[tuple[Code, ...]] = FINDINGS
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "target": ".write:SpeculatorsTarget",
        "check": ".read:check",
        "carrying": ".write:SpeculatorsCarrying",
    }


FORMAT = SpeculatorsFormat()
