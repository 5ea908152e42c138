"""HalluLens Zarr stores of activations; see docs/formats/zarr.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from actshard.codes import Code
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Format, Tell
from actshard.formats.zarr import codes
from actshard.location import Location

if TYPE_CHECKING:
    from actshard.formats.carrying import Carrying
    from actshard.formats.merging import Merger
    from actshard.formats.report import Report
    from actshard.formats.target import Target


class ZarrFormat(Format):
    """HalluLens Zarr stores of activations."""

    name: ClassVar[str] = "zarr"
    description: ClassVar[str] = "HalluLens Zarr stores of activations"
    findings: ClassVar[tuple[Code, ...]] = codes.FINDINGS
    order: ClassVar[int] = 30
    writes: ClassVar[bool] = True

    def detect(self, path: Path | Location) -> Evidence:
        from actshard.formats.zarr.read import detect

        return detect(Location.at(path))

    def open(self, path: Path | Location, options: Options) -> Contents:
        from actshard.formats.zarr.read import open

        return open(Location.at(path), options)

    def target(self) -> type[Target]:
        from actshard.formats.zarr.write import ZarrTarget

        return ZarrTarget

    def check(self, path: Path | Location, report: Report, tell: Tell) -> None:
        from actshard.formats.zarr.check import check

        check(Location.at(path), report, tell)

    def merger(self) -> Merger:
        from actshard.formats.zarr.merge import ZarrMerger

        return ZarrMerger()

    def carrying(self) -> Carrying:
        from actshard.formats.zarr.columns import ZarrCarrying

        return ZarrCarrying()

    def remains(self, names: frozenset[str]) -> bool:
        return not names.isdisjoint((".zgroup", ".zmetadata", "arrays"))


FORMAT = ZarrFormat()
