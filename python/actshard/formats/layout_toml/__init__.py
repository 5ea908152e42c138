"""Folders of plain files (torch, npy, npz, safetensors, raw) that a ``layout.toml`` describes; see docs/formats/layout.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class LayoutFormat(Format):
    """Folders with a layout description. Written with a mark, as the formats npy and safetensors."""

    name: ClassVar[str] = "layout_toml"
    description: ClassVar[str] = "folders of .pt, .npy, .npz, .safetensors or raw files with a layout.toml"
    signs: ClassVar[tuple[str, ...]] = ("layout.toml", "metadata.json")
    rare_signs: ClassVar[tuple[str, ...]] = ("meta.json", "activations.json", "cfg.json")
    manifest: ClassVar[tuple[str, ...]] = ("layout.toml",)
    takes_layout: ClassVar[bool] = True
    skips_incomplete: ClassVar[bool] = True
    describes: ClassVar[tuple[str, ...]] = (
        *(".npy", ".npz", ".safetensors", ".h5", ".hdf5", ".raw", ".dat", ".memmap", ".bin", ".bin.gz"),
        *(".pt", ".pth", ".ckpt", ".pt.gz", ".pth.gz", ".ckpt.gz"),
    )
    checks_columns: ClassVar[bool] = False
    records_summed: ClassVar[tuple[str, ...]] = (".pt", ".pth", ".ckpt", ".npz")
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".detect:detect",
        "open": ".read:open",
        "check": ".check:check",
        "guess": ".guess:guess",
        "read_layout": ".description:read_layout",
    }


FORMAT = LayoutFormat()
