"""Reads folders of .npy files by their description; see docs/formats/plain.md."""

from __future__ import annotations

from actshard.base.location import Location
from actshard.formats.contents import Contents, Evidence, Options
from actshard.formats.plain_folders import PlainCarrying, check, plain_contents, plain_evidence

__all__ = ["PlainCarrying", "check", "detect", "open"]


def detect(path: Location) -> Evidence:
    """Checks for a description with the mark of ``npy``."""
    return plain_evidence(path, "npy")


def open(path: Location, options: Options) -> Contents:
    """Reads the description, the headers and the metadata, but no rows."""
    return plain_contents(path, options, "npy")
