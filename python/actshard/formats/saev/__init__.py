"""saev activation shards; see docs/formats/saev.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from actshard.codes import Code
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Format, Tell
from actshard.formats.saev import codes
from actshard.location import Location

if TYPE_CHECKING:
    from actshard.formats.carrying import Carrying
    from actshard.formats.merging import Merger
    from actshard.formats.report import Report
    from actshard.formats.target import Target


class SaevFormat(Format):
    """saev activation shards."""

    name: ClassVar[str] = "saev"
    description: ClassVar[str] = "saev activation shards"
    findings: ClassVar[tuple[Code, ...]] = codes.FINDINGS
    order: ClassVar[int] = 10
    writes: ClassVar[bool] = True

    def detect(self, path: Path | Location) -> Evidence:
        from actshard.formats.saev.read import detect

        return detect(Location.at(path))

    def open(self, path: Path | Location, options: Options) -> Contents:
        from actshard.formats.saev.read import open

        return open(Location.at(path), options)

    def target(self) -> type[Target]:
        from actshard.formats.saev.write import SaevTarget

        return SaevTarget

    def check(self, path: Path | Location, report: Report, tell: Tell) -> None:
        from actshard.formats.saev.check import check

        check(Location.at(path), report, tell)

    def merger(self) -> Merger:
        from actshard.formats.saev.merge import SaevMerger

        return SaevMerger()

    def carrying(self) -> Carrying:
        from actshard.formats.saev.columns import SaevCarrying

        return SaevCarrying()

    def begun(self, path: Path) -> list[Path]:
        from actshard.formats.saev.write import writing_folders

        return writing_folders(path)

    def remains(self, names: frozenset[str]) -> bool:
        return "shards.json" in names or any(re.fullmatch(r"acts\d{6}\.bin", name) for name in names)


FORMAT = SaevFormat()
