"""saev activation shards; see docs/formats/saev.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from actshard.base.codes import WARNING, Code
from actshard.formats.format import Format, Room

FINDINGS = (
    Code(
        "hash-mismatch",
        WARNING,
        "The folder's name is not the hash of its metadata.",
        "The folder was renamed, or its metadata changed.",
        "rename it to the hash, or restore the metadata",
    ),
    Code(
        "layer-order",
        WARNING,
        "Layers are not in ascending order.",
        "The names of layers may be swapped: saev's recorder stores layers in the order in which the model runs.",
        "check one layer against the model",
    ),
)


class SaevFormat(Format):
    """saev activation shards. Read, written, verified, merged and converted."""

    name: ClassVar[str] = "saev"
    description: ClassVar[str] = "saev activation shards"
    signs: ClassVar[tuple[str, ...]] = ("metadata.json",)
    manifest: ClassVar[tuple[str, ...]] = ("shards.json", "metadata.json")
    column_files: ClassVar[tuple[str, ...]] = ("labels.bin", "actshard_lengths.bin")
    findings: ClassVar[tuple[Code, ...]] = FINDINGS
    order: ClassVar[int] = 10
    writes: ClassVar[bool] = True
    skips_incomplete: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "target": ".write:SaevTarget",
        "begun": ".write:writing_folders",
        "check": ".read:check",
        "merger": ".merge:SaevMerger",
        "carrying": ".merge:SaevCarrying",
    }

    def remains(self, names: frozenset[str]) -> bool:
        return "shards.json" in names or any(re.fullmatch(r"acts\d{6}\.bin", name) for name in names)


FORMAT = SaevFormat()
