"""DeepSpec's metadata in other formats, and metadata of other formats in DeepSpec's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from actshard.formats.carrying import Carrying

if TYPE_CHECKING:
    from actshard.formats.contents import Contents

_OF_FILES = frozenset(
    (
        *("num_samples", "num_shards", "target_layer_ids", "hidden_dtype", "token_dtype", "mask_dtype", "hidden_size"),
        *("shards", "cache_context_parallel_size", "context_layout", "index_files", "stores_target_last_hidden_states"),
        *("version", "index_record_size"),
    )
)
"""Fields of the manifest that describe the files."""


class DeepspecCarrying(Carrying):
    """Keeps fields of the manifest that do not describe files. Caches of versions 3 and 4 become version 4 with one rank."""

    model_key: ClassVar[str | None] = "target_model_name_or_path"
    of_files: ClassVar[frozenset[str]] = _OF_FILES

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        kept_metadata = {name: value for name, value in metadata.items() if name not in _OF_FILES}
        if metadata.get("version") not in (3, 4):
            return kept_metadata, {}
        record = metadata.get("index_record_size")
        return kept_metadata, {"version": 4, **({"index_record_size": record} if record in (60, 64) else {})}
