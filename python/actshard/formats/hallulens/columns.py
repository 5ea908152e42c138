"""What an inference capture's columns become in other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from actshard.formats.carrying import Carrying
from actshard.formats.hallulens.files import ATTENTION
from actshard.location import Location

if TYPE_CHECKING:
    from actshard.formats.contents import Contents


class HallulensCarrying(Carrying):
    """Texts, labels, tokens and scores go along; row numbers and attention stay behind."""

    derived: ClassVar[frozenset[str]] = frozenset(("sample_index",))
    number_column: ClassVar[str | None] = None

    def left_behind(self, contents: Contents) -> list[str]:
        return [ATTENTION] if (Location.at(contents.path) / f"{ATTENTION}.npy").exists() else []
