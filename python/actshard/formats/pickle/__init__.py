"""pickle shards; see docs/formats/pickle.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from actshard.codes import Code
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Format, Tell
from actshard.formats.pickle import codes
from actshard.location import Location

if TYPE_CHECKING:
    from actshard.formats.carrying import Carrying
    from actshard.formats.merging import Merger
    from actshard.formats.report import Report
    from actshard.formats.target import Target


class PickleFormat(Format):
    """pickle shards."""

    name: ClassVar[str] = "pickle"
    description: ClassVar[str] = "pickle shards"
    findings: ClassVar[tuple[Code, ...]] = codes.FINDINGS
    order: ClassVar[int] = 40
    writes: ClassVar[bool] = True

    def detect(self, path: Path | Location) -> Evidence:
        from actshard.formats.pickle.read import detect

        return detect(Location.at(path))

    def open(self, path: Path | Location, options: Options) -> Contents:
        from actshard.formats.pickle.read import open

        return open(Location.at(path), options)

    def target(self) -> type[Target]:
        from actshard.formats.pickle.write import PickleTarget

        return PickleTarget

    def check(self, path: Path | Location, report: Report, tell: Tell) -> None:
        from actshard.formats.pickle.check import check

        check(Location.at(path), report, tell)

    def merger(self) -> Merger:
        from actshard.formats.pickle.merge import PickleMerger

        return PickleMerger()

    def carrying(self) -> Carrying:
        from actshard.formats.pickle.columns import PickleCarrying

        return PickleCarrying()

    opens_several: ClassVar[bool] = True

    def open_several(self, path: Path | Location, folders: Sequence[Path | Location], options: Options) -> Contents:
        from actshard.formats.pickle.read import open_many

        return open_many(Location.at(path), [Location.at(folder) for folder in folders], options)

    def remains(self, names: frozenset[str]) -> bool:
        return any(re.fullmatch(r"shard_\d+\.pkl(\.gz)?", name) for name in names)


FORMAT = PickleFormat()
