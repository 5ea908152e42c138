"""``Carrying``: converts columns and metadata of a dataset to another format and back.

By default all columns are kept, and the source's metadata are stored under ``converted_from``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from actshard.base._json import show
from actshard.base.location import Location

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents

ORIGIN = "converted_from"
"""Metadata field of a converted dataset that contains its source's metadata."""
_OF_WRITING = ("created_at", "schema_version", "provenance")
"""Metadata fields of the writing program, in which stores may differ: times and versions."""
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

    def metadata_left(self, contents: Contents) -> list[str]:
        """Texts about metadata in which the dataset's stores differ; reported as a loss, because the first one's are kept."""
        return metadata_differences([(name, self.metadata_of(values)) for name, values in contents.store_metadata()])

    def metadata_of(self, metadata: Mapping[str, object]) -> dict[str, object]:
        """A store's metadata that do not describe its files."""
        return without_files(metadata)

    def metadata_kept(self, contents: Contents) -> dict[str, object]:
        """The metadata to store under :data:`ORIGIN` in another format."""
        return without_files(contents.metadata)

    def origin(self, metadata: Mapping[str, object]) -> dict[str, Any] | None:
        """The source of a converted dataset: ``{"format", "metadata"}``; None if it was not converted."""
        return checked_origin(metadata.get(ORIGIN))

    def content_only(self, metadata: Mapping[str, object]) -> dict[str, object]:
        """Adapts stored metadata to examples without their special tokens."""
        return dict(metadata)

    # -- to this format --------------------------------------------------------------------------------------------

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        """Converts metadata of this format to metadata and options of :func:`actshard.create`.

        ``contents`` is the source if it has this format; None if the metadata were restored from another format.
        """
        return {}, {}

    def copy_options(self, root: Location, files: Iterable[str]) -> dict[str, Any]:
        """Options of :func:`actshard.convert` with which a copy of some layers keeps the form of a dataset of this format.

        ``files`` are the names of the files in ``root``, relative to it.
        """
        return {}

    def metadata_from(
        self, contents: Contents, origin: dict[str, object]
    ) -> tuple[dict[str, object], dict[str, object]]:
        """Metadata and options for a source of another format. ``origin`` is the source's metadata to store."""
        model_field = {self.model_key: contents.model} if self.model_key is not None and contents.model else {}
        return {**model_field, ORIGIN: origin}, {}


def metadata_differences(stores: Sequence[tuple[str, Mapping[str, object]]]) -> list[str]:
    """Texts about the metadata in which stores (name, metadata) differ from the first, one per field.

    Times and versions of the writing program may differ.
    """
    texts: dict[str, str] = {}
    for store, metadata in stores:
        first = stores[0][1]
        for name in {**first, **metadata}:
            if name not in _OF_WRITING and name not in texts and first.get(name) != metadata.get(name):
                entry, first_value, value = first_difference(name, first.get(name), metadata.get(name))
                texts[name] = f"{entry}: {show(first_value)} is kept, {show(value)} of {store} is not"
    return list(texts.values())


def first_difference(name: str, a: object, b: object) -> tuple[str, object, object]:
    """Path of the first field in which two values differ, and its values; of a dict that only one of them has, the keys."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return name, a, b
    if a.keys() != b.keys():
        return f"{name} with the fields", sorted(a), sorted(b)
    inner = next(key for key in a if a[key] != b[key])
    return first_difference(f"{name}.{inner}", a[inner], b[inner])


def checked_origin(origin: object) -> dict[str, Any] | None:
    """Returns a value found under :data:`ORIGIN` if it is valid, else None."""
    if isinstance(origin, dict) and isinstance(origin.get("metadata"), dict):
        return origin
    return None


def without_files(metadata: Mapping[str, object]) -> dict[str, object]:
    """Metadata as JSON-compatible values, without lists of shards and tensors."""
    kept_metadata = {name: value for name, value in metadata.items() if name not in _OF_FILES}
    plain: dict[str, object] = json.loads(json.dumps(kept_metadata, default=str))
    return plain
