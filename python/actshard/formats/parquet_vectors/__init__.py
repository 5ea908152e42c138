"""Parquet files with columns of vectors: NLA's datasets, uploads to the hub; see docs/formats/parquet_vectors.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from actshard.formats.format import Format, Room


class ParquetVectorsFormat(Format):
    """Parquet files with vectors. Read, verified and converted from."""

    name: ClassVar[str] = "parquet_vectors"
    description: ClassVar[str] = "parquet files with a column of vectors"
    manifest: ClassVar[tuple[str, ...]] = ("*.parquet",)
    names_layers: ClassVar[bool] = True
    rooms: ClassVar[Mapping[Room, str]] = {
        "detect": ".read:detect",
        "open": ".read:open",
        "check": ".read:check",
    }


FORMAT = ParquetVectorsFormat()
