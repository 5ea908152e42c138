"""Arrays whose codecs the core does not have, decoded by the ``zarr`` package: right, one chunk at a time, with the GIL held.

The package is the extra ``zarr``; numcodecs comes with it and knows what Zarr version 2 could ever be compressed with.
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
import os
from typing import TYPE_CHECKING, Any

import numpy as np

import actshard._native as _native
from actshard.errors import ActshardError, FormatError, MissingExtraError, NotAFileError, UnsupportedError

if TYPE_CHECKING:
    from actshard.formats.zarr.meta import ArrayMeta
    from actshard.location import Location


_NUMBERS = ("astype", "bitround", "delta", "fixedscaleoffset", "packbits", "quantize", "shuffle", "transpose")
_COMPRESSORS = ("blosc", "bz2", "gzip", "lz4", "lzma", "pcodec", "zfpy", "zlib", "zstd")
_AROUND = ("adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3", "bytes", "sharding_indexed")
HARMLESS = frozenset((*_NUMBERS, *_COMPRESSORS, *_AROUND))
"""Codecs that turn bytes into bytes or numbers. numcodecs has a ``pickle`` too, which runs what it reads."""

MOST_WIDER = 8
"""Times that a chunk may be longer before its filters are undone: 64 bits stored for each 8."""


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
            self._check_metadata_files()
            self._live = (os.getpid(), zarr.open_group(str(self.meta.store.local), mode="r")[self.meta.node])
        return self._live[1]

    def _check_metadata_files(self) -> None:
        """The package reads every metadata file on the way; a named pipe in place of one would make it wait."""
        folder = self.meta.store
        for part in (".", *self.meta.node.split("/")):
            folder = folder / part
            for name in (".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json"):
                path = folder / name
                if path.kind() not in (None, "file"):
                    raise NotAFileError("expected a regular file, found a folder or a special file", path=path)

    def chunk(self, indices: list[int]) -> bytes | None:
        """A chunk in C order and native byte order; past the array's end, the fill value. None if its file is not there."""
        return self._block(indices, self.meta.chunks)

    def file(self, indices: list[int]) -> bytes | None:
        """What a file holds: a chunk, or a whole shard."""
        return self._block(indices, self.meta.outer)

    def _block(self, indices: list[int], shape: tuple[int, ...]) -> bytes | None:
        meta = self.meta
        assert meta.dtype is not None
        path = meta.path_of(tuple(i * s // o for i, s, o in zip(indices, shape, meta.outer, strict=True)))
        found = path.found("read")
        if found is None:
            return None
        if found.kind != "file":
            raise NotAFileError("expected a regular file, a chunk, found a folder or a special file", path=path)
        self._check_size(path, found.size)
        whole = np.full(shape, meta.fill, meta.dtype)
        where = tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(indices, shape, meta.shape, strict=True))
        try:
            whole[tuple(slice(0, s.stop - s.start) for s in where)] = self._array()[where]
        except (ActshardError, MemoryError):
            raise
        except Exception as error:  # a codec raises anything over damaged bytes
            code = "gzip" if isinstance(error, gzip.BadGzipFile) else None
            raise FormatError(f"the zarr package cannot decode this: {error}", path=path, code=code) from error
        return whole.tobytes()

    def _check_size(self, path: Location, length: int) -> None:
        """Compressed data must not decode to more than the chunk's shape allows: the package has no such limit."""
        meta = self.meta
        assert meta.dtype is not None
        if "sharding_indexed" in meta.codecs:
            return
        limit = MOST_WIDER * math.prod(meta.outer) * meta.dtype.itemsize + (64 << 10)
        if length > limit:
            raise FormatError(f"expected at most {limit} encoded bytes, found {length}", path=path)
        name, configuration = _outermost(json.loads(meta.json))
        data = path.read()
        size: int | None = None
        if name in ("gzip", "zlib", "bz2", "zstd"):
            _native.check_decoded_size(name, data, limit, path)
        elif name == "lz4":
            size = int.from_bytes(data[:4], "little")
        elif name == "blosc":
            size = int.from_bytes(data[4:8], "little")
        elif name == "lzma":
            size = _lzma_size(data, configuration, limit, path)
        if size is not None and size > limit:
            raise FormatError(
                f"{name}: decodes to more than the {limit} bytes that the chunk's shape allows", path=path
            )


def _outermost(metadata: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The codec whose output a chunk's file is, and its configuration."""
    if metadata.get("zarr_format") == 3:
        codec = metadata["codecs"][-1]
        if isinstance(codec, str):
            return codec.removeprefix("numcodecs."), {}
        return str(codec.get("name")).removeprefix("numcodecs."), codec.get("configuration") or {}
    codec = metadata.get("compressor") or ([{}, *(metadata.get("filters") or [])])[-1]
    return str(codec.get("id")), codec


def _lzma_size(data: bytes, configuration: dict[str, Any], limit: int, path: Location) -> int:
    """Bytes that LZMA data decode to, at most ``limit + 1``."""
    try:
        kind = int(configuration.get("format", lzma.FORMAT_XZ))
        filters = configuration.get("filters") if kind == lzma.FORMAT_RAW else None
        size = 0
        while data and size <= limit:
            decoder = lzma.LZMADecompressor(kind, memlimit=None if filters else 256 << 20, filters=filters)
            while not decoder.eof and size <= limit:
                made = decoder.decompress(data, max_length=min(1 << 20, limit + 1 - size))
                if not made and decoder.needs_input:
                    break
                size, data = size + len(made), b""
            data = decoder.unused_data
    except (lzma.LZMAError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise FormatError(f"the zarr package cannot decode this: {error}", path=path) from error
    return size
