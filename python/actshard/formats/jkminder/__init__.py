"""Activation caches of jkminder/dictionary_learning and the diffing toolkit; see docs/formats/jkminder.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class JkminderFormat(Format):
    """Raw shards per layer, and the tokens of all sequences. Read, verified and converted from."""

    name: ClassVar[str] = "jkminder"
    description: ClassVar[str] = "dictionary_learning's ActivationCache (science-of-finetuning, diffing-toolkit)"
    manifest: ClassVar[tuple[str, ...]] = ("*/config.json",)
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "check": ".read:check",
    }


FORMAT = JkminderFormat()
