"""pickle shards; see docs/formats/pickle.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from actshard.base.codes import NOTE, Code
from actshard.formats.format import Format, Room

FINDINGS = (
    Code(
        "no-checksum",
        NOTE,
        "The metadata give no checksum for a shard.",
        "Damage to the shard may go unnoticed.",
        "add checksums to metadata.json",
    ),
)


class PickleFormat(Format):
    """Pickle shards. Read, written, verified, merged and converted."""

    name: ClassVar[str] = "pickle"
    description: ClassVar[str] = "pickle shards"
    signs: ClassVar[tuple[str, ...]] = ("metadata.json",)
    manifest: ClassVar[tuple[str, ...]] = ("*/metadata.json", "metadata.json")
    findings: ClassVar[tuple[Code, ...]] = FINDINGS
    order: ClassVar[int] = 40
    writes: ClassVar[bool] = True
    skips_incomplete: ClassVar[bool] = True
    opens_several: ClassVar[bool] = True
    records_summed: ClassVar[tuple[str, ...]] = (".pkl", ".pkl.gz")
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "open_several": ".read:open_many",
        "target": ".write:PickleTarget",
        "check": ".read:check",
        "merger": ".write:PickleMerger",
        "carrying": ".write:PickleCarrying",
    }

    def remains(self, names: frozenset[str]) -> bool:
        return any(re.fullmatch(r"shard_\d+\.pkl(\.gz)?", name) for name in names)


FORMAT = PickleFormat()
