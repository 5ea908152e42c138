"""Chunks of Llamascopium (Language-Model-SAEs, once lm-saes); see docs/formats/llamascopium.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class LlamascopiumFormat(Format):
    """Folders of chunks, one per hook point. Read, verified and converted from."""

    name: ClassVar[str] = "llamascopium"
    description: ClassVar[str] = "Llamascopium's cached activations (Language-Model-SAEs)"
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "check": ".read:check",
    }


FORMAT = LlamascopiumFormat()
