"""HalluLens' inference captures (storage format ``inference_capture_v1``); see docs/formats/hallulens.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.format import Format, Tell
from actshard.location import Location

if TYPE_CHECKING:
    from actshard.formats.carrying import Carrying
    from actshard.formats.report import Report


class HallulensFormat(Format):
    """HalluLens inference captures: read, verified and converted from; not written."""

    name: ClassVar[str] = "hallulens"
    description: ClassVar[str] = "HalluLens inference captures"

    def detect(self, path: Path | Location) -> Evidence:
        from actshard.formats.hallulens.read import detect

        return detect(Location.at(path))

    def open(self, path: Path | Location, options: Options) -> Contents:
        from actshard.formats.hallulens.read import open

        return open(Location.at(path), options)

    def check(self, path: Path | Location, report: Report, tell: Tell) -> None:
        from actshard.formats.hallulens.check import check

        check(Location.at(path), report, tell)

    def remains(self, names: frozenset[str]) -> bool:
        return "response_activations.npy" in names or {"meta.jsonl", "generation.jsonl"} <= names

    def carrying(self) -> Carrying:
        from actshard.formats.hallulens.columns import HallulensCarrying

        return HallulensCarrying()


FORMAT = HallulensFormat()
