"""Metadata of Arrow directories in other formats, and the reverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from actshard.formats.carrying import Carrying, without_files
from actshard.formats.hf_arrow.write import FILE_FIELDS, TEXT_FIELDS

if TYPE_CHECKING:
    from actshard.formats.contents import Contents

_OF_STATE = (
    *("_data_files", "_fingerprint", "_format_columns", "_format_kwargs", "_format_type", "_indices_data_files"),
    *("_indices_files", "_output_all_columns", "_split"),
)


class HfArrowCarrying(Carrying):
    """Drops fields that describe files, and empty strings, which ``datasets`` writes for absent fields."""

    model_key: ClassVar[str | None] = "model"

    def metadata_kept(self, contents: Contents) -> dict[str, object]:
        return _about(without_files(contents.metadata))

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        fields = _about(metadata)
        return {k: v for k, v in fields.items() if k not in TEXT_FIELDS or isinstance(v, str)}, {}


def _about(metadata: Mapping[str, object]) -> dict[str, object]:
    omitted_fields = (*_OF_STATE, *FILE_FIELDS)
    return {k: v for k, v in metadata.items() if k not in omitted_fields and (v or k not in TEXT_FIELDS)}
