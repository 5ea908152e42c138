"""Levanter token caches; see docs/formats/levanter.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from actshard.codes import Code
from actshard.formats.contents import Evidence
from actshard.formats.format import Format, Tell
from actshard.formats.levanter import codes
from actshard.location import Location

if TYPE_CHECKING:
    from actshard.formats.report import Report


class LevanterFormat(Format):
    """Caches of tokenized text, which :func:`actshard.tokens.open_cache` opens."""

    name: ClassVar[str] = "levanter"
    description: ClassVar[str] = "Levanter token caches"
    findings: ClassVar[tuple[Code, ...]] = codes.FINDINGS
    holds: ClassVar[Literal["activations", "tokens"]] = "tokens"

    def detect(self, path: Path) -> Evidence:
        from actshard.finding import LEDGER, is_cache_itself

        matches = is_cache_itself(Location.at(path))
        return Evidence(matches, f"a {LEDGER}", f"a {LEDGER}" if matches else "none")

    def check(self, path: Path, report: Report, tell: Tell) -> None:
        from actshard.formats.levanter.check import check

        check(Location.at(path), report, tell)


FORMAT = LevanterFormat()
