"""Returns the ``Carrying`` of a source: that of its format, or a :class:`JoinedCarrying` if the source joins several stores."""

from __future__ import annotations

from collections.abc import Mapping

from actshard import formats
from actshard.formats.carrying import Carrying
from actshard.formats.contents import Contents
from actshard.formats.target import OTHER_TEXT


def carrying_of(contents: Contents) -> Carrying:
    """Returns the ``Carrying`` of a source, which selects the columns and metadata to convert."""
    return JoinedCarrying() if contents.parts else formats.get(contents.format).carrying()


class JoinedCarrying(Carrying):
    """Keeps the columns that each part's format keeps, and every part's metadata."""

    def names(self, contents: Contents) -> list[str]:
        """Columns that some part keeps, and the column of sources."""
        sources = [part.contents for part in contents.parts]
        stored_names = {name for source in sources for name in source.column_names}
        kept_names = {name for source in sources for name in carrying_of(source).names(source)}
        return [name for name in contents.column_names if name in kept_names or name not in stored_names]

    def left_behind(self, contents: Contents) -> list[str]:
        """Contents that at least one part cannot convert."""
        sources = [part.contents for part in contents.parts]
        return list(dict.fromkeys(what for source in sources for what in carrying_of(source).left_behind(source)))

    def fillers(self, contents: Contents) -> frozenset[str]:
        """Columns that are empty in every part."""
        has: dict[str, bool] = {}
        for part in contents.parts:
            source = part.contents
            fillers = carrying_of(source).fillers(source)
            for name in source.column_names:
                # A part's text column may have the other name in the joined store.
                joined = name if name in contents.column_names else OTHER_TEXT.get(name, name)
                has[joined] = has.get(joined, True) and name in fillers
        return frozenset(name for name, only in has.items() if only)

    def metadata_kept(self, contents: Contents) -> dict[str, object]:
        """Every part's metadata."""
        parts = [
            {**entry, "metadata": carrying_of(part.contents).metadata_kept(part.contents)}
            for entry, part in zip(contents.metadata["parts"], contents.parts, strict=True)
        ]
        return {"parts": parts}

    def origin(self, metadata: Mapping[str, object]) -> dict[str, object] | None:
        """None: the parts may come from several datasets."""
        return None
