"""Columns and metadata of pickle shards in other formats, and the reverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from actshard.formats.carrying import ORIGIN, Carrying, checked_origin
from actshard.formats.target import PREVIEW

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents

_OF_FILES = frozenset(("layers_extracted", "max_seq_length"))
"""Fields of ``extraction_config`` that the writer computes."""


class PickleCarrying(Carrying):
    """Metadata are the fields of ``extraction_config``; samples are numbered."""

    derived: ClassVar[frozenset[str]] = frozenset(("shape", "layers"))
    number_column: ClassVar[str | None] = "sample_idx"
    model_key: ClassVar[str | None] = "model_name"

    def numbered_by_order(self, contents: Contents) -> bool:
        """Whether samples are numbered by order, according to the shards' ``sample_id_range``."""
        shards: object = contents.metadata.get("shards")
        if not isinstance(shards, list):
            return False
        first = 0
        for shard in shards:
            if not isinstance(shard, dict):
                return False
            ids, count = shard.get("sample_id_range"), shard.get("num_samples")
            if count == 0:
                continue
            if not isinstance(count, int) or ids != [first, first + count - 1]:
                return False
            first += count
        return True

    def fillers(self, contents: Contents) -> frozenset[str]:
        """The preview, if no example has a text. Shards are decoded up to the first text."""
        if PREVIEW not in contents.column_names:
            return frozenset()
        unit_columns = contents.unit_columns
        if unit_columns is None or contents.units is None:
            tables = iter([contents.columns([PREVIEW])])  # some examples only
        else:
            tables = map(unit_columns, range(len(contents.units) - 1))
        is_empty = is_null = True
        for table in tables:
            previews = table[PREVIEW].to_pylist()  # of any type
            is_null &= all(preview is None for preview in previews)
            is_empty &= all(preview == "" for preview in previews)
            if not (is_null or is_empty):
                return frozenset()
        return frozenset((PREVIEW,))

    def outgoing(self, table: pa.Table) -> pa.Table:
        """Replaces the preview by the whole text if that is stored, so that other formats get one text column."""
        import pyarrow.compute as pc

        if PREVIEW not in table.column_names or "text" not in table.column_names:
            return table
        texts = pc.coalesce(table["text"].cast("string"), table[PREVIEW].cast("string"))
        table = table.drop_columns(["text"])
        return table.set_column(table.column_names.index(PREVIEW), PREVIEW, texts)

    def origin(self, metadata: Mapping[str, object]) -> dict[str, object] | None:
        config = metadata.get("extraction_config") or {}
        return checked_origin(config.get(ORIGIN)) if isinstance(config, dict) else None

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        config: Any = metadata.get("extraction_config")
        if not isinstance(config, dict) and isinstance(machines := metadata.get("machines"), dict):
            config = next((m.get("extraction_config") for m in machines.values()), None)
        return {k: v for k, v in (config or {}).items() if k not in _OF_FILES}, {}
