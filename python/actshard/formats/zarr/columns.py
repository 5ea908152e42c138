"""Columns and attributes of Zarr stores in other formats, and the reverse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from actshard.base.location import Location
from actshard.formats.carrying import Carrying, without_files
from actshard.formats.zarr.member import Member
from actshard.formats.zarr.packing import PACKS, codec_name
from actshard.formats.zarr.read import members_of
from actshard.formats.zarr.write import OWN_ATTRIBUTES

if TYPE_CHECKING:
    from actshard.formats.contents import Contents

_OF_FILES = frozenset(
    (*OWN_ATTRIBUTES, "written_by", "text_only_lines", "n_samples", "shards", "format", "manifest_version")
)
"""Attributes that the writer computes."""


class ZarrCarrying(Carrying):
    """A run's manifest only lists stores. The metadata are the attributes of the first store."""

    derived: ClassVar[frozenset[str]] = frozenset(("seq_len",))
    model_key: ClassVar[str | None] = "model_id"

    def metadata_of(self, metadata: Mapping[str, object]) -> dict[str, object]:
        return {name: value for name, value in without_files(metadata).items() if name not in _OF_FILES}

    def metadata_kept(self, contents: Contents) -> dict[str, object]:
        kept_metadata = without_files(contents.metadata)
        return kept_metadata | without_files(_first(contents)) if "shards" in contents.metadata else kept_metadata

    def copy_options(self, root: Location, files: Iterable[str]) -> dict[str, object]:
        if not any(file.rpartition("/")[2] == "zarr.json" for file in files):
            return {}
        array = Member(members_of(root)[0]).arrays[0]
        pack = next((pack for pack in PACKS if array.inner and codec_name(pack) in array.codecs), None)
        return {"version": 3} if pack is None else {"version": 3, "pack": pack}

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        if contents is not None and "shards" in metadata:
            metadata = {**_first(contents), **metadata}
        return {name: value for name, value in metadata.items() if name not in _OF_FILES}, {}


def _first(contents: Contents) -> dict[str, object]:
    """Attributes of a run's first store."""
    return Member(members_of(Location.at(contents.path))[0]).metadata
