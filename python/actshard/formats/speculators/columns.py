"""speculators' columns and metadata in other formats, and the reverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from actshard.formats.carrying import Carrying
from actshard.formats.speculators.files import LAYERS, SCALED_BY

if TYPE_CHECKING:
    from actshard.formats.contents import Contents

_OF_FILES = frozenset(("features", "splits", "citation", "description", "homepage", "license", LAYERS, SCALED_BY))
"""Fields of dataset_info.json that describe the files, or that the writer sets."""


class SpeculatorsCarrying(Carrying):
    """Keeps token ids and masks. ``seq_len`` is the number of tokens, and is derived from the rows."""

    derived: ClassVar[frozenset[str]] = frozenset(("seq_len",))
    of_files: ClassVar[frozenset[str]] = _OF_FILES

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        return {name: value for name, value in metadata.items() if name not in _OF_FILES}, {}
