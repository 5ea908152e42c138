"""Automodel's metadata and columns in other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actshard.formats.automodel.files import WEIGHTS
from actshard.formats.carrying import Carrying
from actshard.location import Location

if TYPE_CHECKING:
    from actshard.formats.contents import Contents


class AutomodelCarrying(Carrying):
    """Keeps token ids and masks; leaves the target's distribution and weights behind."""

    def left_behind(self, contents: Contents) -> list[str]:
        root = Location.at(contents.path)
        probs = ["target_probs"] if "target distribution" in contents.extras else []
        return [*probs, *(name for name in WEIGHTS if (root / name).exists())]
