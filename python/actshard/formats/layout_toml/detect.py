"""Recognises described folders."""

from __future__ import annotations

from actshard.errors import boundary
from actshard.formats.contents import Evidence
from actshard.formats.layout_toml.known import find
from actshard.location import Location

NAME = "layout.toml"
_LOOKED_FOR = f"a folder with a {NAME}, or of probelab, icalens or activault, or layout="


def detect(path: Location) -> Evidence:
    """Checks for a description in the folder, or the manifest of a known program."""
    if path.kind() != "folder":
        return Evidence(False, _LOOKED_FOR, "a file")
    if (path / NAME).kind() != "file":
        known = find(path)
        if known is None:
            return Evidence(False, _LOOKED_FOR, f"no {NAME}")
        return Evidence(True, _LOOKED_FOR, f"{known.manifest.name} of {known.program}")
    if path.is_remote:  # some web servers answer every name with JSON or a page
        with boundary(path / NAME, "read"), (path / NAME).open("read") as file:
            if file.read(512).lstrip()[:1] in (b"{", b"<"):
                return Evidence(False, _LOOKED_FOR, f"no TOML in {NAME}")
    return Evidence(True, _LOOKED_FOR, f"a {NAME}")
