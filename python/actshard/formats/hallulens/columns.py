"""Columns of inference captures in other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from actshard.base.location import Location
from actshard.formats.carrying import Carrying
from actshard.formats.hallulens.files import ATTENTION

if TYPE_CHECKING:
    from actshard.formats.contents import Contents


class HallulensCarrying(Carrying):
    """Keeps texts, labels, tokens and scores. Drops row numbers and attention."""

    derived: ClassVar[frozenset[str]] = frozenset(("sample_index",))
    number_column: ClassVar[str | None] = None

    def left_behind(self, contents: Contents) -> list[str]:
        return [ATTENTION] if (Location.at(contents.path) / f"{ATTENTION}.npy").exists() else []
