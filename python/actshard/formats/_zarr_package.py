"""Arrays whose codecs the core does not have, decoded by the ``zarr`` package: right, one chunk at a time, with the GIL held.

The package is the extra ``zarr``; numcodecs comes with it and knows what Zarr version 2 could ever be compressed with.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actshard.errors import FormatError, MissingExtraError, UnsupportedError

if TYPE_CHECKING:
    from actshard.formats._zarr_arrays import ArrayMeta


_NUMBERS = ("astype", "bitround", "delta", "fixedscaleoffset", "packbits", "quantize", "shuffle", "transpose")
_COMPRESSORS = ("blosc", "bz2", "gzip", "lz4", "lzma", "pcodec", "zfpy", "zlib", "zstd")
_AROUND = ("adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3", "bytes", "sharding_indexed")
HARMLESS = frozenset((*_NUMBERS, *_COMPRESSORS, *_AROUND))
"""Codecs that turn bytes into bytes or numbers. numcodecs has a ``pickle`` too, which runs what it reads."""


class PackageArray:
    """An array that the package reads, opened when it is first needed and again in a forked child.

    Raises:
        UnsupportedError: a codec is none that actshard hands to the package.
        MissingExtraError: the package is not installed.
    """

    def __init__(self, meta: ArrayMeta, why: str) -> None:
        unknown = [c for c in meta.codecs if c.removeprefix("numcodecs.") not in HARMLESS]
        if unknown:
            raise UnsupportedError(f"codec '{unknown[0]}' is not read", path=meta.metadata)
        self.meta = meta
        self._live: tuple[int, Any] | None = None
        try:
            import zarr  # noqa: F401 -- said now, not at the first read
        except ImportError as error:
            raise MissingExtraError.of(f"reading this array ({why})", "zarr", meta.metadata) from error

    def _array(self) -> Any:
        import zarr

        if self._live is None or self._live[0] != os.getpid():
            self._live = (os.getpid(), zarr.open_group(str(self.meta.store), mode="r")[self.meta.node])
        return self._live[1]

    def chunk(self, indices: list[int]) -> bytes:
        """A whole chunk in C order and native byte order; past the array's end, the fill value."""
        meta = self.meta
        assert meta.dtype is not None
        whole = np.full(meta.chunks, meta.fill, meta.dtype)
        where = tuple(
            slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(indices, meta.chunks, meta.shape, strict=True)
        )
        whole[tuple(slice(0, s.stop - s.start) for s in where)] = self._array()[where]
        return whole.tobytes()

    def whole(self) -> NDArray[Any]:
        """All of a small array."""
        try:
            return np.asarray(self._array()[...])
        except Exception as error:  # what a codec raises over damaged bytes is anyone's guess
            raise FormatError(f"the zarr package cannot read this: {error}", path=self.meta.metadata) from error
