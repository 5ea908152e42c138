"""How what is known of a dataset is carried to another format and back: columns and metadata.

The defaults fit a format that declares nothing: all columns go along, and its metadata are kept under ``converted_from``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents

ORIGIN = "converted_from"
"""The field of a converted dataset's metadata that holds those of its source."""
_OF_FILES = ("shards", "statistics", "tensors")
"""Fields of metadata that list files, which a converted dataset does not have."""


class Carrying:
    """What a format adds to a conversion. Methods on the source's side come first, then those on the target's."""

    derived: ClassVar[frozenset[str]] = frozenset()
    """Columns that describe where rows lie or how many there are: every format writes its own."""
    number_column: ClassVar[str | None] = None
    """A column that numbers examples; left out where it equals their order."""
    model_key: ClassVar[str | None] = None
    """The field of the metadata for the model's name."""

    # -- from this format ------------------------------------------------------------------------------------------

    def names(self, contents: Contents) -> list[str]:
        """Columns that describe examples, and not files."""
        return [name for name in contents.column_names if name not in self.derived]

    def left_behind(self, contents: Contents) -> list[str]:
        """What other formats do not get although the dataset holds it: told as a loss."""
        return []

    def fillers(self, contents: Contents) -> frozenset[str]:
        """Columns that the format always has and that hold nothing in this dataset."""
        return frozenset()

    def numbered_by_order(self, contents: Contents) -> bool:
        """Whether the metadata promise that :attr:`number_column` equals the order of the examples."""
        return True

    def outgoing(self, table: pa.Table) -> pa.Table:
        """Columns of some examples as other formats should get them."""
        return table

    def metadata_kept(self, contents: Contents) -> dict[str, Any]:
        """The metadata that another format keeps under :data:`ORIGIN`."""
        return without_files(contents.metadata)

    def origin(self, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a dataset of this format was converted from: ``{"format", "metadata"}``; None if it was not."""
        return checked_origin(metadata.get(ORIGIN))

    def content_only(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Kept metadata of examples that were stored without their special tokens."""
        return dict(metadata)

    # -- to this format --------------------------------------------------------------------------------------------

    def metadata_again(
        self, metadata: Mapping[str, Any], contents: Contents | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Metadata of this format as metadata and options of :func:`actshard.create`.

        ``contents`` is the source if that is of this format; None: the metadata come back from another format.
        """
        return {}, {}

    def metadata_from(self, contents: Contents, origin: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Metadata and options for a source of another format; ``origin`` is what to keep of its own metadata."""
        named = {self.model_key: contents.model} if self.model_key is not None and contents.model else {}
        return {**named, ORIGIN: origin}, {}


def checked_origin(found: Any) -> dict[str, Any] | None:
    """An entry under :data:`ORIGIN` if it is one."""
    if isinstance(found, dict) and isinstance(found.get("metadata"), dict):
        return found
    return None


def without_files(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata without lists of shards and tensors, as JSON holds them."""
    kept = {name: value for name, value in metadata.items() if name not in _OF_FILES}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain
