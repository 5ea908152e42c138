"""``Carrying``: converts columns and metadata of a dataset to another format and back.

By default all columns are kept, and the source's metadata are stored under ``converted_from``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents

ORIGIN = "converted_from"
"""Metadata field of a converted dataset that contains its source's metadata."""
_OF_FILES = ("shards", "statistics", "tensors")
"""Metadata fields that list files. Dropped, because a converted dataset has different files."""


class Carrying:
    """A format's part in conversions: first the methods for the source, then the methods for the target."""

    derived: ClassVar[frozenset[str]] = frozenset()
    """Columns that contain positions or counts of rows. Dropped, because every format writes its own."""
    number_column: ClassVar[str | None] = None
    """A column that numbers examples. Dropped where it equals their order."""
    model_key: ClassVar[str | None] = None
    """The metadata field that contains the model's name."""

    of_files: ClassVar[frozenset[str]] = frozenset()
    """Metadata fields that describe the files. Dropping them is not reported as a loss."""

    # -- from this format ------------------------------------------------------------------------------------------

    def names(self, contents: Contents) -> list[str]:
        """Columns that describe examples rather than files."""
        return [name for name in contents.column_names if name not in self.derived]

    def left_behind(self, contents: Contents) -> list[str]:
        """Stored data that other formats cannot keep; reported as a loss."""
        return []

    def generated(self, contents: Contents) -> frozenset[str]:
        """Columns whose values actshard's writer generated, because the format requires them and it was given none."""
        return frozenset()

    def fillers(self, contents: Contents) -> frozenset[str]:
        """Columns that the format always writes but that are empty in this dataset."""
        return frozenset()

    def numbered_by_order(self, contents: Contents) -> bool:
        """Whether the metadata guarantee that :attr:`number_column` equals the order of the examples."""
        return True

    def outgoing(self, table: pa.Table) -> pa.Table:
        """Converts columns to the form used by other formats."""
        return table

    def metadata_kept(self, contents: Contents) -> dict[str, Any]:
        """The metadata to store under :data:`ORIGIN` in another format."""
        return without_files(contents.metadata)

    def origin(self, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
        """The source of a converted dataset: ``{"format", "metadata"}``; None if it was not converted."""
        return checked_origin(metadata.get(ORIGIN))

    def content_only(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Adapts stored metadata to examples without their special tokens."""
        return dict(metadata)

    # -- to this format --------------------------------------------------------------------------------------------

    def metadata_again(
        self, metadata: Mapping[str, Any], contents: Contents | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Converts metadata of this format to metadata and options of :func:`actshard.create`.

        ``contents`` is the source if it has this format; None if the metadata were restored from another format.
        """
        return {}, {}

    def metadata_from(self, contents: Contents, origin: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Metadata and options for a source of another format. ``origin`` is the source's metadata to store."""
        named = {self.model_key: contents.model} if self.model_key is not None and contents.model else {}
        return {**named, ORIGIN: origin}, {}


def checked_origin(found: Any) -> dict[str, Any] | None:
    """Returns a value found under :data:`ORIGIN` if it is valid, else None."""
    if isinstance(found, dict) and isinstance(found.get("metadata"), dict):
        return found
    return None


def without_files(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as JSON-compatible values, without lists of shards and tensors."""
    kept = {name: value for name, value in metadata.items() if name not in _OF_FILES}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain
