"""Columns and metadata of lmprobe extractions in other formats, and the reverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from actshard.formats.carrying import Carrying, without_files
from actshard.formats.lmprobe.index import TOKEN_LISTS
from actshard.formats.lmprobe.write import MADE_UP

if TYPE_CHECKING:
    from actshard.formats.contents import Contents

_OF_FILES = frozenset(("format_version", "num_prompts", "prompt_ordering", "tensors", "model", MADE_UP))
"""Metadata fields that the writer computes."""


class LmprobeCarrying(Carrying):
    """Drops the index's addresses, and columns that lmprobe requires but that are empty."""

    derived: ClassVar[frozenset[str]] = frozenset(
        ("shard_index", "row_offset", "shard_index_logits", "row_offset_logits", "token_offset", *TOKEN_LISTS)
    )
    model_key: ClassVar[str | None] = "name"

    def names(self, contents: Contents) -> list[str]:
        full = _hidden(contents.metadata).get("storage") == "full_sequence"
        return [name for name in super().names(contents) if not (full and name == "num_tokens")]

    def generated(self, contents: Contents) -> frozenset[str]:
        names = contents.metadata.get(MADE_UP)
        return frozenset({"text"}.intersection(contents.column_names, names if isinstance(names, list) else ()))

    def fillers(self, contents: Contents) -> frozenset[str]:
        import pyarrow as pa
        import pyarrow.compute as pc

        filler_names = self.generated(contents)
        empty = {name for name in ("text", "label", "num_tokens") if name in contents.column_names} - filler_names
        read = contents.column_batches or (lambda names: iter([contents.columns(names)]))  # some examples only
        for table in read(sorted(empty)) if empty else ():
            for name in sorted(empty):
                column = table[name]
                nothing = column.null_count == len(column)
                if name == "text" and not nothing and not column.null_count and pa.types.is_string(column.type):
                    nothing = not pc.max(pc.binary_length(column)).as_py()
                if not nothing:
                    empty.discard(name)
            if not empty:
                break
        return filler_names | empty

    def metadata_kept(self, contents: Contents) -> dict[str, object]:
        kept_metadata = without_files(contents.metadata)
        if not isinstance(_tensors(contents.metadata).get("hidden_layers"), dict):
            return kept_metadata
        hidden = {name: value for name, value in _hidden(contents.metadata).items() if name in ("storage", "pooling")}
        return {**kept_metadata, "tensors": {"hidden_layers": hidden}}

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, Any]]:
        declared = metadata.get("model")
        model: dict[str, object] = declared if isinstance(declared, dict) else {}
        rest = {name: value for name, value in metadata.items() if name not in _OF_FILES}
        pooling = _hidden(metadata).get("pooling")
        options = {"pooling": pooling} if isinstance(pooling, str) else {}
        return {"name": model.get("name"), "revision": model.get("revision"), **rest}, options


def _tensors(metadata: Mapping[str, object]) -> dict[str, object]:
    tensors = metadata.get("tensors")
    return tensors if isinstance(tensors, dict) else {}


def _hidden(metadata: Mapping[str, object]) -> dict[str, object]:
    """The descriptor of hidden states; empty if there is none."""
    hidden = _tensors(metadata).get("hidden_layers")
    return hidden if isinstance(hidden, dict) else {}
