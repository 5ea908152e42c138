"""lmprobe extractions; see docs/formats/lmprobe.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from actshard.codes import Code
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Format, Tell
from actshard.formats.lmprobe import codes
from actshard.location import Location

if TYPE_CHECKING:
    from actshard.formats.carrying import Carrying
    from actshard.formats.merging import Merger
    from actshard.formats.report import Report
    from actshard.formats.target import Target


class LmprobeFormat(Format):
    """lmprobe extractions."""

    name: ClassVar[str] = "lmprobe"
    description: ClassVar[str] = "lmprobe extractions"
    findings: ClassVar[tuple[Code, ...]] = codes.FINDINGS
    calls: ClassVar[tuple[Code, ...]] = codes.CALLS
    order: ClassVar[int] = 20
    writes: ClassVar[bool] = True

    def detect(self, path: Path | Location) -> Evidence:
        from actshard.formats.lmprobe.read import detect

        return detect(Location.at(path))

    def open(self, path: Path | Location, options: Options) -> Contents:
        from actshard.formats.lmprobe.read import open

        return open(Location.at(path), options)

    def target(self) -> type[Target]:
        from actshard.formats.lmprobe.write import LmprobeTarget

        return LmprobeTarget

    def check(self, path: Path | Location, report: Report, tell: Tell) -> None:
        from actshard.formats.lmprobe.check import check

        check(Location.at(path), report, tell)

    def merger(self) -> Merger:
        from actshard.formats.lmprobe.merge import LmprobeMerger

        return LmprobeMerger()

    def carrying(self) -> Carrying:
        from actshard.formats.lmprobe.columns import LmprobeCarrying

        return LmprobeCarrying()

    def remains(self, names: frozenset[str]) -> bool:
        return not names.isdisjoint(("index", "tensors"))


FORMAT = LmprobeFormat()
