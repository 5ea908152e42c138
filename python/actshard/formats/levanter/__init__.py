"""Levanter token caches; see docs/formats/levanter.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from actshard.base.codes import NOTE, WARNING, Code
from actshard.base.location import Location
from actshard.base.walking import LEDGER, is_cache_itself
from actshard.formats.contents import Evidence
from actshard.formats.format import Format, Room

FINDINGS = (
    Code(
        "leftover",
        NOTE,
        "The folder contains temporary files of a build.",
        "None: readers ignore them.",
        "remove it, if no build is running",
    ),
    Code(
        "row-lengths-differ",
        WARNING,
        "Rows have different lengths in different fields.",
        "Tokens, masks and weights of these rows do not correspond.",
        "check how they were made",
    ),
)


class LevanterFormat(Format):
    """Token caches, opened by :func:`actshard.tokens.open_cache`."""

    name: ClassVar[str] = "levanter"
    description: ClassVar[str] = "Levanter token caches"
    manifest: ClassVar[tuple[str, ...]] = ("*/zarr.json", "*/shard_ledger.json", "shard_ledger.json")
    findings: ClassVar[tuple[Code, ...]] = FINDINGS
    holds: ClassVar[Literal["activations", "tokens"]] = "tokens"
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".:detect",
        "check": ".check:check",
        "check_listing": ".check:check_listing",
        "check_copy": ".check:check_copy",
    }


FORMAT = LevanterFormat()


def detect(path: Location) -> Evidence:
    """Whether a path is a token cache."""
    matches = is_cache_itself(path)
    return Evidence(matches, f"a {LEDGER}", f"a {LEDGER}" if matches else "none")
