"""Arrays with codecs that the core lacks, decoded by the ``zarr`` package: slower, one chunk at a time, with the GIL held.

The package is the extra ``zarr``. It brings numcodecs, which supports all codecs of Zarr version 2.
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
"""Codecs that only transform data. numcodecs also has ``pickle``, which would execute code from the file."""

MOST_WIDER = 8
"""How much larger a chunk may be before its filters are undone: 64 bits per 8 bits."""


class PackageArray:
    """An array read by the package, opened on first use, and again in a forked child.

    Raises:
        UnsupportedError: a codec is not on the list of safe codecs.
        MissingExtraError: the package is not installed.
    """

    def __init__(self, meta: ArrayMeta, why: str) -> None:
        unknown = [c for c in meta.codecs if c.removeprefix("numcodecs.") not in HARMLESS]
        if unknown:
            raise UnsupportedError(f"codec '{unknown[0]}' is not supported", path=meta.metadata)
        self.meta = meta
        self._live: tuple[int, Any] | None = None
        try:
            import zarr  # noqa: F401 -- raises now, not at the first read
        except ImportError as error:
            raise MissingExtraError.of(f"reading this array ({why})", "zarr", meta.metadata) from error

    def _array(self) -> Any:
        import zarr

        if self._live is None or self._live[0] != os.getpid():
            self._check_metadata_files()
            self._live = (os.getpid(), zarr.open_group(str(self.meta.store.local), mode="r")[self.meta.node])
        return self._live[1]

    def _check_metadata_files(self) -> None:
        """Rejects special files. The package opens all metadata files on the path, and a named pipe would block it."""
        folder = self.meta.store
        for part in (".", *self.meta.node.split("/")):
            folder = folder / part
            for name in (".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json"):
                path = folder / name
                if path.kind() not in (None, "file"):
                    raise NotAFileError("expected a regular file, found a folder or a special file", path=path)

    def chunk(self, indices: list[int]) -> bytes | None:
        """Decodes a chunk in C order and native byte order, padded with the fill value. None if the file is missing."""
        return self._block(indices, self.meta.chunks)

    def file(self, indices: list[int]) -> bytes | None:
        """Decodes a whole file: a chunk or a shard."""
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
        except Exception as error:  # codecs raise any exception for damaged data
            code = "gzip" if isinstance(error, gzip.BadGzipFile) else None
            raise FormatError(f"the zarr package cannot decode this chunk: {error}", path=path, code=code) from error
        return whole.tobytes()

    def _check_size(self, path: Location, length: int) -> None:
        """Raises FormatError if compressed data would exceed the chunk's size when decoded. The package has no such limit."""
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
                f"{name}: expected at most {limit} decoded bytes by the chunk's shape, found more", path=path
            )


def _outermost(metadata: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The last codec applied when the chunk was written, and its configuration."""
    if metadata.get("zarr_format") == 3:
        codec = metadata["codecs"][-1]
        if isinstance(codec, str):
            return codec.removeprefix("numcodecs."), {}
        return str(codec.get("name")).removeprefix("numcodecs."), codec.get("configuration") or {}
    codec = metadata.get("compressor") or ([{}, *(metadata.get("filters") or [])])[-1]
    return str(codec.get("id")), codec


def _lzma_size(data: bytes, configuration: dict[str, Any], limit: int, path: Location) -> int:
    """Decoded size of LZMA data, at most ``limit + 1``."""
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
        raise FormatError(f"the zarr package cannot decode this chunk: {error}", path=path) from error
    return size
