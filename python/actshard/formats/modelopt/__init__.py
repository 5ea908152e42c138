"""NVIDIA Model-Optimizer's hidden states for training EAGLE-3; see docs/formats/modelopt.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class ModeloptFormat(Format):
    """Model-Optimizer hidden states."""

    name: ClassVar[str] = "modelopt"
    description: ClassVar[str] = "Model-Optimizer hidden states"
    names_layers: ClassVar[bool] = True
    records_summed: ClassVar[tuple[str, ...]] = ("",)
    skips_incomplete: ClassVar[bool] = True
    order: ClassVar[int] = 72
    writes: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".files:detect",
        "open": ".files:open",
        "target": ".write:ModeloptTarget",
        "check": ".files:check",
        "carrying": ".write:DraftCarrying",
    }


FORMAT = ModeloptFormat()
