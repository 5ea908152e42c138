"""saev's metadata in other formats, and metadata of other formats in saev's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from actshard.formats.carrying import ORIGIN, Carrying, checked_origin
from actshard.formats.saev.read import BUDGET, CHECKPOINT, D_MODEL, FAMILY

if TYPE_CHECKING:
    import pyarrow as pa

    from actshard.formats.contents import Contents


class SaevCarrying(Carrying):
    """saev's metadata fields are fixed, so another format's metadata are stored as JSON text in ``data``."""

    model_key: ClassVar[str | None] = "ckpt"
    number_column: ClassVar[str | None] = "example_idx"

    def origin(self, metadata: Mapping[str, object]) -> dict[str, object] | None:
        data = metadata.get("data")
        if isinstance(data, str) and data.startswith(f'{{"{ORIGIN}"'):
            try:
                data = json.loads(data)
            except ValueError:
                return None
        return checked_origin(data.get(ORIGIN)) if isinstance(data, dict) else None

    def content_only(self, metadata: Mapping[str, object]) -> dict[str, object]:
        return {**metadata, "cls_token": False}

    def metadata_again(
        self, metadata: Mapping[str, object], contents: Contents | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        def first(names: Sequence[str]) -> pa.Table:
            return next((metadata[n] for n in names if n in metadata), None)

        kept_metadata = {
            "family": first(FAMILY),
            "ckpt": first(CHECKPOINT),
            "data": metadata.get("data"),
            "dataset": metadata.get("dataset"),
            "pixel_agg": metadata.get("pixel_agg"),
        }
        options: dict[str, object] = {"cls_token": bool(metadata.get("cls_token", "layers" not in metadata))}
        budget = first(BUDGET)
        if isinstance(budget, int) and first(D_MODEL):
            options["max_tokens_per_shard"] = budget
        return {k: v for k, v in kept_metadata.items() if v is not None}, options

    def metadata_from(
        self, contents: Contents, origin: dict[str, object]
    ) -> tuple[dict[str, object], dict[str, object]]:
        text = json.dumps({ORIGIN: origin}, separators=(",", ":"), ensure_ascii=False, default=str)
        return {"ckpt": contents.model or "unknown", "data": text}, {"cls_token": bool(contents.special_tokens)}
