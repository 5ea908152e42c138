"""Samples of a Zarr store whose chunks are missing or not whole, for ``Options.skip_incomplete``.

The specification defines a missing chunk as fill values. A store that grows, or that lost files, has missing chunks, too, and its
files do not distinguish the two. With ``skip_incomplete``, a sample counts as left out if a chunk of its stored tokens has no file.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base.location import Location
from actshard.formats.zarr.meta import ArrayMeta

MISSING = np.iinfo(np.uint64).max
"""Offset and bytes of a missing inner chunk."""
MOST_INDEX = 1 << 28
"""Bytes of an index that is read whole."""
_NAMED = 1 << 16
"""Files that are named at most."""
Coords = tuple[int, ...]


@dataclass(frozen=True)
class WholeChunks:
    """The chunks of an array that are whole.

    Attributes:
        places: their positions in the grid of chunks (of inner chunks, for shards), ``(n, 4)``.
        broken: files that are not whole.
    """

    places: NDArray[np.int64]
    broken: list[Location]

    @classmethod
    def of(cls, array: ArrayMeta) -> WholeChunks:
        """Looks at the size of each file, and at the index of each local shard."""
        files = {coords: size for coords, size in array.chunk_files().items() if _is_inside(coords, array.grid)}
        assert array.dtype is not None
        full = math.prod(array.outer) * array.dtype.itemsize
        broken = {coords for coords, size in files.items() if size == 0 or (not array.how and size != full)}
        complete = {coords: size for coords, size in files.items() if coords not in broken}
        places: list[NDArray[np.int64]] = [np.zeros((0, len(array.shape)), np.int64)]
        per_shard = np.array([outer // inner for outer, inner in zip(array.outer, array.chunks, strict=True)])
        for coords, size in complete.items():
            entries = np.ones(per_shard, np.bool_) if not array.inner else inner_chunks(array, coords, size)
            if entries is None:
                broken.add(coords)
            else:
                places.append(np.argwhere(entries) + np.array(coords) * per_shard)
        return cls(np.concatenate(places), [array.path_of(coords) for coords in sorted(broken)])

    def absent(self, array: ArrayMeta, lengths: NDArray[np.int64]) -> tuple[NDArray[np.bool_], list[Location]]:
        """Flags of samples of which a chunk is missing, and files without one. ``lengths``: tokens of each sample."""
        samples, layers, stretch, width = array.chunks
        across, wide = math.ceil(array.shape[1] / layers), math.ceil(array.shape[3] / width)
        blocks, stretches = -(-len(lengths) // samples), max(1, math.ceil(array.shape[2] / stretch))
        places = self.places[(self.places[:, 0] < blocks) & (self.places[:, 2] < stretches)]
        keys, counts = np.unique(places[:, 0] * stretches + places[:, 2], return_counts=True)
        block, t = np.divmod(keys[counts == across * wide], stretches)
        # Keys are sorted: a stretch has the number of its position in its block, unless one before it is missing.
        is_leading = t == np.arange(len(t)) - np.searchsorted(block, block)
        leading = np.bincount(block[is_leading], minlength=blocks)
        sample_blocks = np.arange(len(lengths)) // samples
        needed = -(-lengths // stretch)
        absent = needed > leading[sample_blocks]
        per_shard = [outer // inner for outer, inner in zip(array.outer, array.chunks, strict=True)]
        existing = set(map(tuple, places.tolist()))
        lacking = (
            tuple(n // size for n, size in zip(coords, per_shard, strict=True))
            for sample in np.flatnonzero(absent).tolist()
            for coords in itertools.product(
                (sample // samples,),
                range(across),
                range(int(leading[sample // samples]), int(needed[sample])),
                range(wide),
            )
            if coords not in existing
        )
        names = dict.fromkeys(itertools.islice(lacking, _NAMED))
        return absent, [array.path_of(coords) for coords in names]


def _is_inside(coords: Coords, grid: Coords) -> bool:
    return all(n < size for n, size in zip(coords, grid, strict=True))


def is_usual_index(array: ArrayMeta) -> bool:
    """Whether the index of shards is little-endian numbers and their checksum, at the end."""
    sharding = json.loads(array.json)["codecs"][0]["configuration"]
    codecs = [codec if isinstance(codec, dict) else {"name": codec} for codec in sharding["index_codecs"]]
    if [codec.get("name") for codec in codecs] != ["bytes", "crc32c"]:
        return False
    bytes_of = codecs[0].get("configuration")
    is_little = not isinstance(bytes_of, Mapping) or bytes_of.get("endian", "little") == "little"
    return is_little and bool(sharding.get("index_location", "end") == "end")


def inner_chunks(array: ArrayMeta, coords: Coords, size: int) -> NDArray[np.bool_] | None:
    """Flags of the inner chunks that a shard of ``size`` bytes has; None if its index is damaged.

    All of a shard with an index of an unusual form, and of a remote one: it is read when the shard is.
    """
    per_shard = [outer // inner for outer, inner in zip(array.outer, array.chunks, strict=True)]
    index_size = 16 * math.prod(per_shard) + 4
    if array.folder.is_remote or index_size > MOST_INDEX or not is_usual_index(array):
        return np.ones(per_shard, np.bool_)
    if size < index_size:
        return None
    index = np.frombuffer(array.path_of(coords).read(size - index_size, index_size), np.uint8)
    entries = index[:-4].view("<u8").reshape(*per_shard, 2)
    if not np.array_equal(_native.encode_shard_index(np.ascontiguousarray(entries.reshape(-1, 2), np.uint64)), index):
        return None
    begins, lengths = entries[..., 0], entries[..., 1]
    is_absent = (begins == MISSING) & (lengths == MISSING)
    is_outside = (begins > size) | (lengths > size - np.minimum(begins, size))
    flags: NDArray[np.bool_] = ~is_absent & ~is_outside
    return flags
