"""Compressed inner chunks: shards whose chunks have different sizes.

The sizes do not follow from the lengths, so a commit records those of its chunks. A resumed writer therefore knows where committed
chunks end and reads no chunk again. Chunks end with a crc32c, which every reader of Zarr 3 compares.

Sources: the codecs ``zstd``, ``blosc`` and ``crc32c`` of the registry of Zarr extensions.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base.errors import ArgumentError
from actshard.formats.target import Block
from actshard.formats.zarr.chunks import ChunkWrites, Codec, ShardChunks, ShardedChunks, longest_chunk, plain_codec
from actshard.formats.zarr.meta import PLANES

PACKS = ("lossless", "zstd", "blosc")
"""Values of the option ``pack``."""
_PACKED_BYTES = 64 << 10
"""Bytes of rows of an inner chunk, within the following numbers of rows. A random row costs the decoding of a whole chunk."""
_LEAST_ROWS, _MOST_ROWS = 16, 256
_PADDING = 1
"""Rows per row of padding: zeros take almost no space, but time."""


def pack_of(options: Mapping[str, object]) -> str | None:
    """The option ``pack``; None for plain chunks."""
    pack = options.get("pack")
    if pack is not None and pack not in PACKS:
        raise ArgumentError(f"pack: expected {' or '.join(map(repr, PACKS))}, found {pack!r}")
    return pack


def codec_name(pack: str) -> str:
    """The name of a compressor in metadata."""
    return _compressor(pack, 1, 1)[0]


def _compressor(pack: str, itemsize: int, width: int) -> tuple[str, dict[str, int | str | bool]]:
    """The name of a compressor, and its configuration for rows of ``width`` elements."""
    if pack == "lossless":
        return PLANES, {"typesize": itemsize, "width": width}
    if pack == "zstd":
        return "zstd", {"level": 1, "checksum": False}
    return "blosc", {"cname": "zstd", "clevel": 1, "shuffle": "bitshuffle", "typesize": itemsize, "blocksize": 0}


class PackedChunks(ShardedChunks):
    """Version 3: shards of one layer with compressed inner chunks."""

    def __init__(self, layers: int, chunk: int | None, shard_bytes: int | None, pack: str) -> None:
        super().__init__(layers, chunk, shard_bytes)
        self._pack = pack
        self._chunk_sizes: list[NDArray[np.uint32]] = []
        """Bytes of the chunks of each block, ``(layers, chunks)``, in the order of samples and tokens."""
        self._recorded = 0
        """Number of blocks in commits."""
        self._ends: NDArray[np.int64] = np.zeros((layers, 0), np.int64)
        """Bytes so far in the shards of the next example, ``(layers, ranges)``."""

    def codecs(self, dtype: np.dtype[np.generic], width: int) -> list[Codec]:
        name, configuration = _compressor(self._pack, dtype.itemsize, width)
        return [plain_codec(dtype), {"name": name, "configuration": configuration}, {"name": "crc32c"}]

    def _chunk_for(self, lengths: NDArray[np.int64], row_bytes: int) -> int:
        most = min(max(_PACKED_BYTES // row_bytes, _LEAST_ROWS), _MOST_ROWS)
        return longest_chunk(lengths, most, _LEAST_ROWS, _PADDING)

    # -- commits ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, object]:
        sizes = self._joined(self._chunk_sizes[self._recorded :])
        return {**super().state(), "sizes": base64.b64encode(sizes.astype("<u4").tobytes()).decode()}

    def committed(self) -> None:
        self._recorded = len(self._chunk_sizes)

    def begin(self, states: Sequence[Mapping[str, Any]], lengths: NDArray[np.int64]) -> None:
        super().begin(states, lengths)
        raw = [base64.b64decode(state["sizes"], validate=True) for state in states]
        self._chunk_sizes = [np.frombuffer(data, "<u4").astype(np.uint32).reshape(self.layers, -1) for data in raw]
        self._recorded = len(self._chunk_sizes)
        self._ends = np.zeros((self.layers, 0), np.int64)
        if self.samples is None:  # no example was written
            return
        recorded, expected = sum(sizes.shape[1] for sizes in self._chunk_sizes), int((-(-lengths // self.tokens)).sum())
        if recorded != expected:
            raise ValueError(f"{recorded} sizes of chunks, expected {expected}")
        if within := len(lengths) % self.samples:
            counts = self._counts(lengths[-within:])
            self._ends = np.zeros((self.layers, counts.shape[1]), np.int64)
            for layer, stretch, sizes in self._parts(counts, recorded - int(counts.sum()), self._joined()):
                self._ends[layer, stretch] = sizes.sum()

    def begin_at(self, first: int) -> None:
        super().begin_at(first)
        self._ends = np.zeros((self.layers, 0), np.int64)

    def _joined(self, blocks: Sequence[NDArray[np.uint32]] | None = None) -> NDArray[np.uint32]:
        """Bytes of the chunks of all blocks, ``(layers, chunks)``."""
        empty = np.zeros((self.layers, 0), np.uint32)
        return np.concatenate([empty, *(self._chunk_sizes if blocks is None else blocks)], axis=1)

    # -- places ----------------------------------------------------------------------------------------------------

    def _parts(
        self, counts: NDArray[np.int64], position: int, sizes: NDArray[np.uint32]
    ) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """The layer, the range of tokens and the bytes of chunks of each shard of a group, whose chunks begin at ``position``."""
        stretch_of_chunk = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.reshape(-1))
        of_group = sizes[:, position : position + len(stretch_of_chunk)].astype(np.int64)
        for stretch in range(counts.shape[1]):
            is_here = stretch_of_chunk == stretch
            for layer in range(self.layers):
                yield layer, stretch, of_group[layer, is_here]

    def _shards(self, lengths: NDArray[np.int64], row_bytes: int) -> Iterator[ShardChunks]:
        if self.samples is None:  # no example was written
            return
        sizes, position = self._joined(), 0
        for group, counts in self._per_shard(lengths):
            for layer, stretch, shard_sizes in self._parts(counts, position, sizes):
                if len(shard_sizes):
                    yield ShardChunks(f"c.{group}.{layer}.{stretch}.0", counts[:, stretch], shard_sizes)
            position += int(counts.sum())

    def place(self, folder: Path, first: int, tokens: NDArray[np.int64], block: Block) -> ChunkWrites:
        """Encodes the chunks of a block. Those of a shard follow each other in the returned memory."""
        assert self.samples is not None
        assert self.slots is not None
        # In the order of layers, samples and tokens.
        per_sample = -(-tokens // self.tokens)
        sample = np.repeat(np.arange(len(tokens)), per_sample)
        number = np.arange(len(sample)) - np.repeat(np.cumsum(per_sample) - per_sample, per_sample)
        begins = (block.starts.T[:, sample] + number * self.tokens) * block.row_bytes
        lengths = np.minimum(self.tokens, tokens[sample] - number * self.tokens) * block.row_bytes
        places = np.stack([begins, np.broadcast_to(lengths, begins.shape)], axis=-1).reshape(-1, 2)
        codecs = json.dumps(self.codecs(block.memory.dtype, block.memory.shape[1])).encode()
        memory, packed_sizes = _native.pack_chunks(block.bytes, places, self.tokens * block.row_bytes, codecs)
        sizes = packed_sizes.astype(np.int64)
        self._chunk_sizes.append(sizes.reshape(begins.shape).astype(np.uint32))

        shard, stretch = (first + sample) // self.samples - first // self.samples, number // self.slots
        ranges = max(int(stretch.max(initial=0)) + 1, self._ends.shape[1])
        layer = np.arange(self.layers)[:, None]
        key = ((shard * self.layers + layer) * ranges + stretch).reshape(-1)
        keys, file = np.unique(key, return_inverse=True)
        groups, layers, stretches = keys // (ranges * self.layers), keys // ranges % self.layers, keys % ranges
        ends = np.pad(self._ends, ((0, 0), (0, ranges - self._ends.shape[1])))
        begins_of_file = np.where(groups == 0, ends[layers, stretches], 0)

        # One piece per run of chunks of the same shard.
        runs = np.flatnonzero(np.diff(key, prepend=-1))
        run_bytes = np.add.reduceat(sizes, runs) if len(runs) else sizes
        run_file = file[runs]
        order = np.argsort(run_file, kind="stable")
        before = np.cumsum(run_bytes[order]) - run_bytes[order]
        firsts = np.searchsorted(run_file[order], np.arange(len(keys)))
        offsets = np.empty(len(runs), np.int64)
        offsets[order] = before - before[firsts][run_file[order]] + begins_of_file[run_file[order]]
        sources = (np.cumsum(sizes) - sizes)[runs]
        table = np.stack([np.zeros_like(runs), sources, run_bytes, run_file, offsets], axis=1)
        file_ends = begins_of_file.copy()
        np.maximum.at(file_ends, run_file, offsets + run_bytes)

        self._next = first + len(tokens)
        group = self._next // self.samples - first // self.samples
        self._ends = ends if group == 0 else np.zeros_like(ends)
        is_next = groups == group
        self._ends[layers[is_next], stretches[is_next]] = file_ends[is_next]
        names = self._names(keys, first // self.samples, ranges)
        return memory, [(folder / name, end) for name, end in zip(names, file_ends.tolist(), strict=True)], table
