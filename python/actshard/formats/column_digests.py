"""Digests of a finished dataset's columns, as its reader returns them: the last step of writing records them, and verify compares.

Each value has a hash; null has 0. Equal values have equal hashes in every width, and in every layout of Arrow, so that readers may
choose their types. A digest sums the hashes of all examples (:class:`~actshard.request.Digest`), whatever blocks they are read in.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.formats.contents import Contents
from actshard.formats.tables import is_list
from actshard.request import Digest

if TYPE_CHECKING:
    import pyarrow as pa

Hashes = NDArray[np.uint64]
_BLOCK = 1 << 16
"""Examples that are hashed at once."""
_FEW = 8
"""Depth of lists and dicts; deeper values have the hash of their text."""


def digests_of_contents(contents: Contents, names: Sequence[str]) -> dict[str, Digest]:
    """The digests of these columns of a dataset. Formats that read columns whole read one at a time."""
    if contents.column_batches is not None:
        return digests_of_columns(contents.column_batches(names))
    return {name: digest for each in names for name, digest in digests_of_columns([contents.columns([each])]).items()}


def digests_of_columns(tables: Iterable[pa.Table]) -> dict[str, Digest]:
    """The digest of each column over consecutive tables, whose columns may differ: a column that a table lacks is null in it."""
    digests: dict[str, Digest] = {}
    first = 0
    for table in tables:
        for start in range(0, len(table), _BLOCK):
            block = table.slice(start, _BLOCK)
            for name, values in zip(block.column_names, block.columns, strict=True):
                digest = Digest.of(hashes_of(values), first + start)
                digests[name] = digests.get(name, Digest(0, 0)) + digest
        first += len(table)
    return digests


def hashes_of(values: pa.Array | pa.ChunkedArray, depth: int = 0) -> Hashes:
    """The hash of each value, uint64 ``(n,)``; 0 for null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(values, pa.ChunkedArray):  # pyarrow keeps a column that is too large for one array in chunks
        return np.concatenate([np.zeros(0, np.uint64), *(hashes_of(chunk, depth) for chunk in values.chunks)])
    kind, is_ = values.type, pa.types
    if not len(values) or is_.is_null(kind):
        return np.zeros(len(values), np.uint64)
    if isinstance(kind, pa.BaseExtensionType):
        return hashes_of(values.storage, depth)
    if is_.is_dictionary(kind):
        return hashes_of(values.dictionary_decode(), depth)
    if is_.is_run_end_encoded(kind):
        return hashes_of(pc.run_end_decode(values), depth)
    hashes = _hashes_of_plain(values, depth)
    # Not 0, which is null's.
    hashes = np.where(hashes == 0, np.uint64(1), hashes)
    return np.where(values.is_valid().to_numpy(zero_copy_only=False), hashes, np.uint64(0))


def _hashes_of_plain(values: pa.Array, depth: int) -> Hashes:
    import pyarrow as pa

    kind, is_ = values.type, pa.types
    if is_.is_boolean(kind):
        return _mixed(values.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint64), b"bool")
    if is_.is_integer(kind):
        return _mixed(_integers(values), b"number")
    if is_.is_floating(kind):
        return _of_floats(values.fill_null(0.0).to_numpy(zero_copy_only=False).astype(np.float64))
    if is_.is_temporal(kind) and kind.bit_width in (32, 64):
        return _mixed(_integers(values.view(pa.int64() if kind.bit_width == 64 else pa.int32())), b"time")
    if is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind):
        return _mixed(_of_bytes(values.cast(pa.large_string()).view(pa.large_binary())), b"text")
    if is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_binary_view(kind) or is_.is_fixed_size_binary(kind):
        return _mixed(_of_bytes(values.cast(pa.large_binary())), b"bytes")
    if depth < _FEW and is_.is_struct(kind):
        return _of_dicts(values, depth)
    if depth < _FEW and (is_list(kind) or is_.is_map(kind)):
        return _of_lists(values, depth)
    return _mixed(
        _of_bytes(pa.array(map(repr, values.to_pylist()), pa.large_string()).view(pa.large_binary())), b"other"
    )


def _integers(values: pa.Array) -> Hashes:
    """Bits of integers as int64. Those of uint64 from 2**63 on equal negative ones, which no integer column also holds."""
    integers: NDArray[np.int64] = values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return integers.view(np.uint64)


def _of_floats(values: NDArray[np.float64]) -> Hashes:
    """A whole number has the hash of the integer, because a column of both is one of floats."""
    with np.errstate(invalid="ignore"):
        integers = values.astype(np.int64)
        is_whole = (np.abs(values) < 2.0**63) & (integers == values) & ~((values == 0) & np.signbit(values))
    bits = np.where(np.isnan(values), np.nan, values).view(np.uint64)
    return np.where(is_whole, _mixed(integers.view(np.uint64), b"number"), _mixed(bits, b"float"))


def _of_bytes(values: pa.LargeBinaryArray) -> Hashes:
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + len(values) + 1]
    if values.null_count:  # the bytes of null values are not defined
        values = values.fill_null(b"")
        offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset : values.offset + len(values) + 1]
    data = values.buffers()[2]
    content = np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    return _native.hash_rows(content, None, np.diff(offsets))


def _of_lists(values: pa.Array, depth: int) -> Hashes:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_map(values.type):
        entries = pa.StructArray.from_arrays([values.keys, values.items], ["key", "value"])
        offsets = values.offsets.to_numpy()
        inner, counts = hashes_of(entries, depth + 1), np.diff(offsets).astype(np.int64)
        return _mixed(_native.hash_rows(inner[offsets[0] : offsets[-1]].view(np.uint8), 8, counts), b"dict")
    counts = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    inner = hashes_of(pc.list_flatten(values), depth + 1)  # without the values of null lists
    return _mixed(_native.hash_rows(inner.view(np.uint8), 8, counts), b"list")


def _of_dicts(values: pa.StructArray, depth: int) -> Hashes:
    """Without the order of fields, and those that are null: later examples may bring new fields."""
    import pyarrow.compute as pc

    hashes = np.ones(len(values), np.uint64)
    for number, field in enumerate(values.type):  # by number: two may share a name, and Arrow reads dots as paths
        inner = hashes_of(pc.struct_field(values, [number]), depth + 1)
        hashes += np.where(inner == 0, np.uint64(0), _mixed(inner, field.name.encode("utf-8", "surrogatepass")))
    return hashes


def _mixed(words: Hashes, kind: bytes) -> Hashes:
    """The finalizer of splitmix64, seeded by the kind of value. Public domain: prng.di.unimi.it/splitmix64.c."""
    with np.errstate(over="ignore"):
        mixed = words + np.uint64(0x9E3779B97F4A7C15 * (zlib.crc32(kind) | 1) % (1 << 64))
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
