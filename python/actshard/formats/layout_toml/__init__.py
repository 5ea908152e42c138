"""Folders of plain files (torch, npy, npz, safetensors, raw) that a ``layout.toml`` describes; see docs/formats/layout.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.codes import ERROR, WARNING, Code
from actshard.formats.format import Format, Room


class LayoutFormat(Format):
    """Folders with a layout description. Read, verified and converted from, but not written."""

    name: ClassVar[str] = "layout_toml"
    description: ClassVar[str] = "folders of .pt, .npy, .npz, .safetensors or raw files with a layout.toml"
    manifest: ClassVar[tuple[str, ...]] = ("layout.toml",)
    takes_layout: ClassVar[bool] = True
    findings: ClassVar[tuple[Code, ...]] = (
        Code(
            "oversized-file",
            WARNING,
            "a torch file stores far more bytes than its tensors have: slices were saved with their whole storage",
            "the folder takes many times the space, and copies of it take as much longer",
            "save tensor.clone() instead of a slice, or convert the folder",
        ),
        Code(
            "record-checksum",
            ERROR,
            "the CRC-32 of a record of a zip archive differs from the one in its directory",
            "the values in it may be wrong",
            "copy the file again from its source",
        ),
    )
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".detect:detect",
        "open": ".read:open",
        "check": ".check:check",
        "guess": ".guess:guess",
    }


FORMAT = LayoutFormat()
