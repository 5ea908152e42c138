"""The codec ``actshard.planes`` for zarr-python 3, which loads it by the entry point of this package.

Inner chunks of rows are packed without loss; docs/formats/planes.md specifies the bytes.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zarr.abc.codec import BytesBytesCodec

import actshard._native as _native
from actshard.formats.zarr.meta import PLANES

if TYPE_CHECKING:
    from typing import Self

    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer

MOST_AROUND = 64 << 10
"""Bytes that codecs between the array and this one may add to a chunk."""


@dataclass(frozen=True)
class PlanesCodec(BytesBytesCodec):  # type: ignore[misc]  # zarr is no dependency: its types are unknown
    """Packs chunks of floating-point rows by the entropy of their exponents, without loss.

    Use it as the only compressor, with ``crc32c`` after it for a checksum:
    ``zarr.create_array(..., compressors=[PlanesCodec(), Crc32cCodec()])``.

    Args:
        typesize: bytes of a value: 1, 2, 4 or 8. From the array by default.
        width: values of a row: the last length of a chunk's shape. From the array by default.
    """

    is_fixed_size = False

    typesize: int | None = None
    width: int | None = None

    @classmethod
    def from_dict(cls, data: dict[str, object]) -> Self:
        """The codec of an entry in ``codecs`` of zarr.json.

        Raises:
            ValueError: the configuration does not consist of two positive integers.
        """
        fields = data.get("configuration")
        if not isinstance(fields, dict) or set(fields) != {"typesize", "width"}:
            raise ValueError(f"codec '{PLANES}': expected a configuration of typesize and width, found {fields}")
        for name, value in fields.items():
            if type(value) is not int or value <= 0:
                raise ValueError(f"codec '{PLANES}', '{name}': expected a positive integer, found {value!r}")
        return cls(fields["typesize"], fields["width"])

    def to_dict(self) -> dict[str, object]:
        """The entry in ``codecs`` of zarr.json."""
        return {"name": PLANES, "configuration": {"typesize": self.typesize, "width": self.width}}

    def evolve_from_array_spec(self, array_spec: ArraySpec) -> Self:
        """The codec with the array's values where they were left out."""
        item = getattr(array_spec.dtype, "item_size", None) or array_spec.dtype.to_native_dtype().itemsize
        width = array_spec.shape[-1] if array_spec.shape else 1
        return replace(self, typesize=self.typesize or item, width=self.width or max(width, 1))

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        item = getattr(chunk_spec.dtype, "item_size", None) or chunk_spec.dtype.to_native_dtype().itemsize
        limit = math.prod(chunk_spec.shape) * item + MOST_AROUND
        return chunk_spec.prototype.buffer.from_bytes(_native.decode_planes(chunk_bytes.to_bytes(), limit))

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._decode_sync, chunk_bytes, chunk_spec)

    def _encode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        codec = self.evolve_from_array_spec(chunk_spec)
        assert codec.typesize is not None
        assert codec.width is not None
        block = _native.encode_planes(chunk_bytes.to_bytes(), codec.typesize, codec.width)
        return chunk_spec.prototype.buffer.from_bytes(block)

    async def _encode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        return await asyncio.to_thread(self._encode_sync, chunk_bytes, chunk_spec)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Unknown before encoding: raises, as zarr's own codecs of variable size do."""
        raise NotImplementedError
