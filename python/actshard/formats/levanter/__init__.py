"""Levanter token caches; see docs/formats/levanter.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from actshard.base.codes import Code
from actshard.formats.format import Format, Room
from actshard.formats.levanter import codes


class LevanterFormat(Format):
    """Token caches, opened by :func:`actshard.tokens.open_cache`."""

    name: ClassVar[str] = "levanter"
    description: ClassVar[str] = "Levanter token caches"
    manifest: ClassVar[tuple[str, ...]] = ("*/zarr.json", "*/shard_ledger.json", "shard_ledger.json")
    findings: ClassVar[tuple[Code, ...]] = codes.FINDINGS
    holds: ClassVar[Literal["activations", "tokens"]] = "tokens"
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "check": ".check:check",
        "check_listing": ".copying:check_listing",
        "check_copy": ".copying:check_copy",
    }


FORMAT = LevanterFormat()
