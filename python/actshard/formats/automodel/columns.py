"""Automodel's metadata and columns in other formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from actshard.base.location import Location
from actshard.formats.automodel.files import OF_FILES, WEIGHTS
from actshard.formats.carrying import Carrying

if TYPE_CHECKING:
    from actshard.formats.contents import Contents


class AutomodelCarrying(Carrying):
    """Keeps token ids, masks and settings. Drops the target's distribution and weights."""

    model_key: ClassVar[str | None] = "target_model"
    of_files: ClassVar[frozenset[str]] = frozenset(OF_FILES)

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        kept_metadata = {name: value for name, value in metadata.items() if name not in OF_FILES}
        size = metadata.get("shard_size")
        return kept_metadata, {"shard_size": size} if type(size) is int and size > 0 else {}

    def left_behind(self, contents: Contents) -> list[str]:
        root = Location.at(contents.path)
        probs = ["target_probs"] if "target distribution" in contents.extras else []
        return [*probs, *(name for name in WEIGHTS if (root / name).exists())]
