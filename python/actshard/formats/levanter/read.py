"""Detects token caches. :mod:`actshard.tokens` reads them."""

from __future__ import annotations

from actshard.base.location import Location
from actshard.base.walking import LEDGER, is_cache_itself
from actshard.formats.contents import Evidence


def detect(path: Location) -> Evidence:
    """Whether a path is a token cache."""
    matches = is_cache_itself(path)
    return Evidence(matches, f"a {LEDGER}", f"a {LEDGER}" if matches else "none")
