"""Arrays with codecs that the core lacks, decoded by the ``zarr`` package: slower, one chunk at a time, while holding the GIL.

The package is the extra ``zarr``. It depends on numcodecs, which supports all codecs of Zarr version 2.
"""

from __future__ import annotations

import functools
import gzip
import json
import lzma
import math
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import actshard._native as _native
from actshard.base.errors import ActshardError, FormatError, MissingExtraError, NotAFileError, UnsupportedError
from actshard.formats.zarr.meta import PLANES

if TYPE_CHECKING:
    from actshard.base.location import Location
    from actshard.formats.zarr.meta import ArrayMeta


_NUMBERS = ("astype", "bitround", "delta", "fixedscaleoffset", "packbits", "quantize", "shuffle", "transpose")
_COMPRESSORS = ("blosc", "bz2", "gzip", "lz4", "lzma", "pcodec", "zfpy", "zlib", "zstd")
_AROUND = ("adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3", "bytes", "sharding_indexed")
HARMLESS = frozenset((*_NUMBERS, *_COMPRESSORS, PLANES, *_AROUND))
"""Codecs that only transform data. numcodecs also has ``pickle``, which would execute code from the file."""

MOST_WIDER = 8
"""Factor by which filtered data may exceed the chunk's size: 64 bits per 8 bits."""


class PackageArray:
    """An array whose chunks the package decodes. It is opened for each chunk, because its objects cannot be used after a fork.

    Raises:
        UnsupportedError: a codec is not on the list of safe codecs.
        FormatError: the package is not installed, and the core knows the codecs, but not their configuration.
        MissingExtraError: the package is not installed.
    """

    def __init__(self, meta: ArrayMeta, why: str) -> None:
        unknown = [c for c in meta.codecs if c.removeprefix("numcodecs.") not in HARMLESS]
        if unknown:
            raise UnsupportedError(f"codec '{unknown[0]}' is not supported", path=meta.metadata)
        self.meta = meta
        try:
            import zarr  # noqa: F401 -- raises now, not at the first read
        except ImportError as error:
            fault = why.partition("configuration is unsupported: ")[2]
            if fault:
                text = f"field 'codecs': expected valid configurations of {', '.join(meta.codecs)}: {fault}"
                raise FormatError(text, path=meta.metadata, code="metadata") from error
            raise MissingExtraError.of(f"reading this array ({why})", "zarr", meta.metadata) from error

    def _array(self, chunks: Mapping[str, bytes]) -> Any:
        """The array as an object of the package. ``chunks``: chunks that were read, by key."""
        import zarr

        files = _class_of_files()(self.meta, chunks)
        return zarr.open_array(files, mode="r", zarr_format=3 if files.metadata == "zarr.json" else 2)

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
        data = None if "sharding_indexed" in meta.codecs else self._read_encoded(path)
        if data is None and ("sharding_indexed" not in meta.codecs or not _is_file(path)):
            return None
        chunk = np.full(shape, meta.fill, meta.dtype)
        where = tuple(slice(i * c, min((i + 1) * c, n)) for i, c, n in zip(indices, shape, meta.shape, strict=True))
        try:
            array = self._array({} if data is None else {path.key: data})
            chunk[tuple(slice(0, s.stop - s.start) for s in where)] = array[where]
        except (ActshardError, MemoryError):
            raise
        except Exception as error:  # codecs raise any exception for damaged data
            code = "gzip" if isinstance(error, gzip.BadGzipFile) else None
            raise FormatError(f"the zarr package cannot decode this chunk: {error}", path=path, code=code) from error
        return chunk.tobytes()

    def _read_encoded(self, path: Location) -> bytes | None:
        """Reads a chunk; None if it does not exist.

        Raises:
            FormatError: the chunk would decode to more than its size, which the package does not check.
        """
        meta = self.meta
        assert meta.dtype is not None
        limit = MOST_WIDER * math.prod(meta.outer) * meta.dtype.itemsize + (64 << 10)
        data = _read(path, limit)
        if data is None:
            return None
        name, configuration = _outermost(json.loads(meta.json))
        size: int | None = None
        if name in ("gzip", "zlib", "bz2", "zstd"):
            _native.check_decoded_size(name, data, limit, path)
        elif name == "lz4":
            size = int.from_bytes(data[:4], "little")
        elif name == "blosc":
            size = int.from_bytes(data[4:8], "little")
        elif name == PLANES:
            size = int.from_bytes(data[8:12], "little")
        elif name == "lzma":
            size = _lzma_size(data, configuration, limit, path)
        if size is not None and size > limit:
            raise FormatError(
                f"{name}: expected at most {limit} decoded bytes by the chunk's shape, found more", path=path
            )
        return data


def _is_file(path: Location) -> bool:
    """Whether a chunk exists.

    Raises:
        NotAFileError: the path is a folder or a special file.
    """
    stat = path.found("read")
    if stat is not None and stat.kind != "file":
        raise NotAFileError("expected a regular file, a chunk, found a folder or a special file", path=path)
    return stat is not None


def _read(path: Location, limit: int) -> bytes | None:
    """Reads a chunk of at most ``limit`` bytes; None if it does not exist."""
    if path.is_remote:
        data = path.read_at_most(limit)
    elif not _is_file(path):
        return None
    else:
        data = path.read() if path.stat().size <= limit else False
    if data is False:
        raise FormatError(f"expected at most {limit} encoded bytes, found more", path=path)
    return data


@functools.cache
def _class_of_files() -> Any:
    """The class of stores, in the sense of the package, for the files of one array in any storage."""
    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
    from zarr.core.buffer import default_buffer_prototype

    class ArrayFiles(Store):  # type: ignore[misc]  # zarr is no dependency: its types are unknown
        """The array's checked metadata, chunks that were read, and parts of shards, which are read on demand."""

        supports_writes = supports_deletes = supports_listing = False

        def __init__(self, meta: ArrayMeta, chunks: Mapping[str, bytes]) -> None:
            super().__init__(read_only=True)
            self.meta, self.chunks = meta, chunks
            self.metadata = "zarr.json" if json.loads(meta.json).get("zarr_format") == 3 else ".zarray"

        def __eq__(self, other: object) -> bool:
            return self is other

        def __hash__(self) -> int:
            return id(self)

        async def get(self, key: str, prototype: Any = None, byte_range: object = None) -> object:
            data = self._bytes(key, byte_range)
            return None if data is None else (prototype or default_buffer_prototype()).buffer.from_bytes(data)

        def _bytes(self, key: str, part: object) -> bytes | None:
            if key == self.metadata:
                return self.meta.json
            if key.startswith(".z") or key == "zarr.json":
                return None
            path = self.meta.folder.joinpath(key)
            data = self.chunks.get(path.key)
            if data is None and not _is_file(path):
                return None
            size = path.stat().size if data is None else len(data)
            first, last = 0, size
            if isinstance(part, RangeByteRequest):
                first, last = part.start, part.end
            elif isinstance(part, OffsetByteRequest):
                first = part.offset
            elif isinstance(part, SuffixByteRequest):
                first = max(size - part.suffix, 0)
            return path.read(first, max(last - first, 0)) if data is None else data[first:last]

        async def get_partial_values(self, prototype: object, key_ranges: Any) -> list[object]:
            return [await self.get(key, prototype, part) for key, part in key_ranges]

        async def exists(self, key: str) -> bool:
            return self._bytes(key, None) is not None

        async def set(self, key: str, value: object) -> None:
            raise NotImplementedError  # zarr's base class demands it; this store is read-only, so zarr never calls it

        async def delete(self, key: str) -> None:
            raise NotImplementedError  # zarr's base class demands it; this store is read-only, so zarr never calls it

        async def list(self) -> AsyncIterator[str]:
            for key in (self.metadata,):
                yield key

        def list_prefix(self, prefix: str) -> AsyncIterator[str]:
            return self.list()

        def list_dir(self, prefix: str) -> AsyncIterator[str]:
            return self.list()

    return ArrayFiles


def _outermost(metadata: dict[str, Any]) -> tuple[str, dict[str, object]]:
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
                output = decoder.decompress(data, max_length=min(1 << 20, limit + 1 - size))
                if not output and decoder.needs_input:
                    break
                size, data = size + len(output), b""
            data = decoder.unused_data
    except (lzma.LZMAError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise FormatError(f"the zarr package cannot decode this chunk: {error}", path=path) from error
    return size
