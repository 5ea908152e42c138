"""HalluLens Zarr stores of activations; see docs/formats/zarr.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.base.codes import Code
from actshard.formats.format import Format, Room
from actshard.formats.zarr import codes


class ZarrFormat(Format):
    """HalluLens Zarr stores. Read, written, verified, merged and converted."""

    name: ClassVar[str] = "zarr"
    description: ClassVar[str] = "HalluLens Zarr stores of activations"
    # Arrays first, then a run's list of stores, then the groups: a store opens as soon as its group has metadata.
    signs: ClassVar[tuple[str, ...]] = (".zmetadata", "zarr.json", "manifest.json")
    rare_signs: ClassVar[tuple[str, ...]] = (".zgroup", ".zattrs", ".zarray")
    manifest: ClassVar[tuple[str, ...]] = (
        "*/.zarray",
        "*arrays/*/zarr.json",
        "manifest.json",
        "*/.zattrs",
        "*/.zgroup",
        "*/.zmetadata",
        "*/zarr.json",
        ".zattrs",
        ".zgroup",
        ".zmetadata",
        "zarr.json",
    )
    column_files: ClassVar[tuple[str, ...]] = (
        "*text/*.jsonl",
        "*meta/config.json",
        "*arrays/*/[0-9]",
        "*arrays/*/[0-9][0-9]",
        "*arrays/*/c.[0-9]",
        "*arrays/*/c.[0-9][0-9]",
    )
    findings: ClassVar[tuple[Code, ...]] = codes.FINDINGS
    order: ClassVar[int] = 30
    writes: ClassVar[bool] = True
    skips_incomplete: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "target": ".write:ZarrTarget",
        "check": ".check:check",
        "merger": ".merge:ZarrMerger",
        "carrying": ".columns:ZarrCarrying",
    }

    def remains(self, names: frozenset[str]) -> bool:
        return not names.isdisjoint((".zgroup", ".zmetadata", "arrays"))


FORMAT = ZarrFormat()
