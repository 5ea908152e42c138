"""Recognises described folders."""

from __future__ import annotations

from actshard.base.location import Location
from actshard.formats.contents import Evidence
from actshard.formats.layout_toml.known import find
from actshard.formats.plain_folders import NAME, beginning, marked

_LOOKED_FOR = f"a folder with a {NAME}, or of probelab, icalens or activault, or layout="


def detect(path: Location) -> Evidence:
    """Checks for a description in the folder, or the manifest of a known program."""
    if path.kind() != "folder":
        return Evidence(False, _LOOKED_FOR, "a file")
    if (path / NAME).kind() != "file":
        known_folder = find(path)
        if known_folder is None:
            return Evidence(False, _LOOKED_FOR, f"no {NAME}")
        return Evidence(True, _LOOKED_FOR, f"{known_folder.manifest.name} of {known_folder.program}")
    if path.is_remote and beginning(path / NAME).lstrip()[:1] in (b"", b"{", b"<"):
        # some web servers return nothing, JSON or an HTML page for every name
        return Evidence(False, _LOOKED_FOR, f"a {NAME} that is not TOML", near=True)
    if (format := marked(path / NAME)) is not None:
        return Evidence(False, _LOOKED_FOR, f"a {NAME} of the format {format}", near=True)
    return Evidence(True, _LOOKED_FOR, f"a {NAME}")
