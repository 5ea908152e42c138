"""The files of chunks that a writer makes: a file per chunk in version 2, shards of many chunks in version 3.

Version 3: ``arrays/activations/c.<group>.<layer>.<stretch>.0`` contains inner chunks ``(1, 1, T_chunk, H)`` of ``samples``
samples, ``slots`` of each, then the index of the shard. Inner chunks without stored tokens are left out; the others are in the
order of samples and tokens. Their places follow from the lengths, so that a writer appends them, and a resumed writer cuts what
follows the committed ones. All indexes are written at the end, when the shape of the array is known.

Source: Zarr core specification 3.0, and the codec "sharding_indexed" (Zarr enhancement proposal 2).
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base.errors import FormatError
from actshard.formats.target import Block

CHUNK_BYTES = 1 << 20
"""Within the 0.5 to 2 MB of the specification."""
SHARD_BYTES = 256 << 20
"""Default size of a shard's chunks."""
_PADDING = 8
"""Rows per row of padding, at least, in the last inner chunks of the examples that the writer knows."""
_BYTES_PER_SLOT = 1 << 10
"""Bytes of rows per entry of 16 bytes in a shard's index, if the longest examples need as many: 1/64 of the shard."""
_MOST_SLOTS = 1 << 18
"""Entries of a shard's index. A reader holds it in memory: 4 MiB."""
_FILE_COST = 1 << 18
"""Bytes of indexes that one file less is worth."""
_ABSENT = np.iinfo(np.uint64).max

Codec = dict[str, object]
"""A codec in the words of the metadata."""
ChunkPieces = NDArray[np.int64]
"""ChunkPieces of :meth:`Target.put`."""
ChunkWrites = tuple[NDArray[np.uint8], list[tuple[Path, int]], ChunkPieces]
"""Memory to write, the files with their sizes, and the pieces."""
Put = Callable[
    [Sequence[NDArray[np.uint8]], Sequence[tuple[Path, int]], Sequence[tuple[int, int, int, int, int]]], None
]
"""The type of :meth:`Target.put`, for a few pieces."""


_CHUNK = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)\.0", re.ASCII)
"""The names that a writer gives its chunks. Other files in their folder, such as ``9.notes.txt``, are not its own."""


class Chunks(ABC):
    """Where the chunks of activations are stored. All layers of an example have the same tokens."""

    version: ClassVar[int]
    """The version of Zarr."""
    dtypes: ClassVar[tuple[str, ...]]
    keys_are_arrays: ClassVar[bool]
    """Whether the version has a standard dtype for bytes of a fixed length."""
    needs_all_lengths: ClassVar[bool]
    """Whether :meth:`choose` takes the lengths of all examples, where they are known, in place of those of the first block."""

    def __init__(self, layers: int, chunk: int | None) -> None:
        self.layers = layers
        self.chunk = chunk
        """T_chunk: tokens per chunk; None before it is chosen."""

    @property
    def tokens(self) -> int:
        """T_chunk, once it is chosen."""
        assert self.chunk is not None
        return self.chunk

    def config(self) -> dict[str, object]:
        """Settings that must match when a writer resumes."""
        return {"chunk": self.chunk}

    def adopt(self, config: Mapping[str, object]) -> None:
        """Adopts the settings that an earlier writer chose."""
        self.chunk = size_in(config, "chunk")

    @abstractmethod
    def choose(self, lengths: NDArray[np.int64], row_bytes: int, t_max: int | None, *, is_all: bool) -> None:
        """Chooses what is not given, from the tokens of the first examples, or of all (``is_all``)."""

    def state(self) -> dict[str, object]:
        """What a commit records of the examples since the last one, to continue after them."""
        return {"chunk": self.chunk}

    def committed(self) -> None:  # noqa: B027 -- a file per chunk needs no state
        """Called when :meth:`state` is recorded."""

    def begin(self, states: Sequence[Mapping[str, object]], lengths: NDArray[np.int64]) -> None:
        """Continues after commits with these states, of examples with these tokens."""
        if self.chunk is None and states:
            self.chunk = size_in(states[-1], "chunk")

    def begin_at(self, first: int) -> None:  # noqa: B027 -- as above
        """Begins with an example of :meth:`borders`, in a task of a plan; other tasks write the examples before."""

    @abstractmethod
    def place(self, folder: Path, first: int, tokens: NDArray[np.int64], block: Block) -> ChunkWrites:
        """Returns what to write for the next examples.

        Args:
            folder: the array's folder.
            first: number of the first example.
            tokens: ``(n,)``.
            block: the examples.
        """

    @abstractmethod
    def forget(self, folder: Path, lengths: NDArray[np.int64], row_bytes: int) -> None:
        """Removes what was written after examples with these tokens."""

    def close(self, folder: Path, lengths: NDArray[np.int64], row_bytes: int, put: Put) -> None:  # noqa: B027 -- as above
        """Completes the files, after all examples. May be called again after a crash."""

    @abstractmethod
    def meta(self, shape: Sequence[int], lengths: NDArray[np.int64], dtype: np.dtype[np.generic]) -> dict[str, object]:
        """Metadata of the array of activations."""

    @abstractmethod
    def estimate(self, lengths: NDArray[np.int64], row_bytes: int) -> tuple[int, int]:
        """Number of files and bytes."""

    def borders(self, n: int) -> NDArray[np.int64] | None:
        """Examples that begin a file, of n; None: every example."""
        return None


class PlainChunks(Chunks):
    """Version 2: ``<sample>.<layer>.<stretch>.0``, full-size files with a hole where no row was written."""

    version: ClassVar[int] = 2
    dtypes: ClassVar[tuple[str, ...]] = ("F64", "F32", "F16")
    keys_are_arrays: ClassVar[bool] = True
    needs_all_lengths: ClassVar[bool] = False  # the bytes of conversions stay what they were

    def choose(self, lengths: NDArray[np.int64], row_bytes: int, t_max: int | None, *, is_all: bool) -> None:
        """A power of two for chunks of 0.5 to 1 MiB, so that it divides usual values of T_max. Shorter arrays have one chunk."""
        if self.chunk is None:
            fits = max(1, CHUNK_BYTES // row_bytes)
            self.chunk = min(1 << (fits.bit_length() - 1), t_max or max(int(lengths.max(initial=0)), 1))

    def place(self, folder: Path, first: int, tokens: NDArray[np.int64], block: Block) -> ChunkWrites:
        chunk, starts, row_bytes = self.tokens, block.starts, block.row_bytes
        stretches = -(-tokens // chunk)
        # One entry per (sample, layer, stretch), in memory order.
        per = np.repeat(stretches, self.layers)
        pair = np.repeat(np.arange(len(per)), per)
        k = np.arange(len(pair)) - np.repeat(np.cumsum(per) - per, per)
        rows = np.minimum(chunk, np.repeat(tokens, self.layers)[pair] - k * chunk)
        start = starts.reshape(-1)[pair] + k * chunk
        zeros = np.zeros_like(k)
        table = np.stack([zeros, start * row_bytes, rows * row_bytes, np.arange(len(k)), zeros], axis=1)
        sample, layer = np.divmod(pair, self.layers)
        names = zip((sample + first).tolist(), layer.tolist(), k.tolist(), strict=True)
        return block.bytes, [(folder / f"{i}.{la}.{t}.0", chunk * row_bytes) for i, la, t in names], table

    def forget(self, folder: Path, lengths: NDArray[np.int64], row_bytes: int) -> None:
        if folder.is_dir():
            with os.scandir(folder) as entries:
                matches = ((_CHUNK.fullmatch(e.name), e.path) for e in entries)
                late_chunks = [path for match, path in matches if match is not None and int(match[1]) >= len(lengths)]
            for path in late_chunks:
                Path(path).unlink()

    def meta(self, shape: Sequence[int], lengths: NDArray[np.int64], dtype: np.dtype[np.generic]) -> dict[str, object]:
        return array_meta(2, shape, (1, 1, self.tokens, shape[3]), dtype)

    def estimate(self, lengths: NDArray[np.int64], row_bytes: int) -> tuple[int, int]:
        chunks = int((-(-lengths // self.tokens)).sum()) * self.layers
        return chunks, chunks * self.tokens * row_bytes


@dataclass(frozen=True)
class ShardChunks:
    """The inner chunks of a shard."""

    name: str
    """The file's name."""
    counts: NDArray[np.int64]
    """``(samples,)``: number of inner chunks of each sample."""
    sizes: NDArray[np.int64]
    """Bytes of each inner chunk, in the order of samples and tokens."""

    @property
    def size(self) -> int:
        """Bytes of all inner chunks."""
        return int(self.sizes.sum())

    def entries(self, samples: int, slots: int) -> NDArray[np.uint64]:
        """The index of a shard of so many samples and inner chunks of each, ``(samples * slots, 2)``."""
        entries = np.full((samples, slots, 2), _ABSENT, np.uint64)
        sample = np.repeat(np.arange(len(self.counts)), self.counts)
        slot = np.arange(len(sample)) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        entries[sample, slot] = np.stack([np.cumsum(self.sizes) - self.sizes, self.sizes], axis=1)
        return entries.reshape(-1, 2)


class ShardedChunks(Chunks):
    """Version 3: shards of one layer."""

    version: ClassVar[int] = 3
    dtypes: ClassVar[tuple[str, ...]] = ("F64", "F32", "F16", "BF16")
    keys_are_arrays: ClassVar[bool] = False
    needs_all_lengths: ClassVar[bool] = True

    def __init__(self, layers: int, chunk: int | None, shard_bytes: int | None) -> None:
        super().__init__(layers, chunk)
        self._bytes = SHARD_BYTES if shard_bytes is None else shard_bytes
        self.samples: int | None = None
        """Samples per shard."""
        self.slots: int | None = None
        """Inner chunks per sample and shard. The others of a longer sample are in further shards."""
        self._next = 0
        """Number of the next example."""
        self._chunks: NDArray[np.int64] = np.zeros(0, np.int64)
        """Chunks so far in the shards of the next example, one for each range of its tokens."""

    def config(self) -> dict[str, object]:
        return {**super().config(), "samples": self.samples, "slots": self.slots, "shard_bytes": self._bytes}

    def adopt(self, config: Mapping[str, object]) -> None:
        super().adopt(config)
        self.samples, self.slots = size_in(config, "samples"), size_in(config, "slots")

    @property
    def _sizes(self) -> tuple[int, int]:
        """Samples per shard, and tokens per sample and shard."""
        assert self.samples is not None
        assert self.slots is not None
        return self.samples, self.slots * self.tokens

    def choose(self, lengths: NDArray[np.int64], row_bytes: int, t_max: int | None, *, is_all: bool) -> None:
        """The longest inner chunks with little padding; samples for shards of the given size."""
        if self.samples is not None:
            return
        longest = max(int(lengths.max(initial=0)), 1) if is_all else t_max
        if self.chunk is None:
            self.chunk = self._chunk_for(lengths, row_bytes)
        elif longest is not None:  # longer chunks would have zeros only
            self.chunk = min(self.chunk, longest)
        chunks = -(-lengths // self.chunk)
        mean = max(int(chunks.sum()), 1) * self.chunk * row_bytes / max(len(lengths), 1)
        most = min(_MOST_SLOTS, max(1, self._bytes // (self.chunk * row_bytes)))
        if is_all:
            file_cost = min(_FILE_COST, self._bytes // 64)
            self.samples, self.slots = _cheapest_shape(chunks, max(1, int(self._bytes / mean)), most, file_cost)
        else:
            # Later examples may be longer. Slots that no example needs are left out of the finished index.
            slots = max(2 * int(chunks.max(initial=1)), 2, int(mean) // _BYTES_PER_SLOT)
            self.slots = min(slots, most, slots if t_max is None else -(-t_max // self.chunk))
            self.samples = max(1, min(int(self._bytes / mean), _MOST_SLOTS // self.slots))

    def _chunk_for(self, lengths: NDArray[np.int64], row_bytes: int) -> int:
        """T_chunk for examples with these tokens."""
        return longest_chunk(lengths, max(1, CHUNK_BYTES // row_bytes), 1, _PADDING)

    def _counts(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """``(n, ranges)``: inner chunks of samples in each range of tokens."""
        span = self._sizes[1]
        begins = span * np.arange(max(1, -(-int(tokens.max(initial=0)) // span)))
        counts: NDArray[np.int64] = -(-np.clip(tokens[:, None] - begins, 0, span) // self.tokens)
        return counts

    def _per_shard(self, lengths: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The number of each group of samples, and their counts as of :meth:`_counts`."""
        samples = self._sizes[0]
        for first in range(0, len(lengths), samples):
            yield first // samples, self._counts(lengths[first : first + samples])

    def begin(self, states: Sequence[Mapping[str, object]], lengths: NDArray[np.int64]) -> None:
        super().begin(states, lengths)
        self._next = len(lengths)
        if self.samples is None:  # no example was written
            return
        self._chunks = self._counts(lengths[len(lengths) - len(lengths) % self.samples :]).sum(axis=0)

    def begin_at(self, first: int) -> None:
        if first % self._sizes[0]:
            raise FormatError(f"a task begins with example {first}, within a shard; make the plan again")
        self._next, self._chunks = first, np.zeros(0, np.int64)

    def place(self, folder: Path, first: int, tokens: NDArray[np.int64], block: Block) -> ChunkWrites:
        samples, span = self._sizes
        starts, row_bytes = block.starts, block.row_bytes
        if not len(tokens):
            return block.bytes, [], np.zeros((0, 5), np.int64)
        counts = self._counts(tokens)
        ranges = max(counts.shape[1], len(self._chunks))
        counts = np.pad(counts, ((0, 0), (0, ranges - counts.shape[1])))
        shard = (first + np.arange(len(tokens))) // samples
        before = np.cumsum(counts, axis=0) - counts
        # Each shard counts from its own first example.
        shard_starts = np.searchsorted(shard, shard, "left")
        before -= before[shard_starts]
        before[shard == shard[0]] += np.pad(self._chunks, (0, ranges - len(self._chunks)))
        self._next = first + len(tokens)
        after = before[-1] + counts[-1]
        self._chunks = after if self._next % samples else np.zeros(0, np.int64)

        # One entry per (sample, layer, range) with tokens, in memory order.
        sample, layer, k = np.nonzero(np.broadcast_to(counts[:, None] > 0, (len(tokens), self.layers, ranges)))
        rows = np.minimum(span, tokens[sample] - k * span)
        start = starts[sample, layer] + k * span
        chunk_bytes = self.tokens * row_bytes
        key = ((shard[sample] - shard[0]) * self.layers + layer) * ranges + k
        keys, file = np.unique(key, return_inverse=True)
        ends = np.zeros(len(keys), np.int64)
        np.maximum.at(ends, file, (before + counts)[sample, k] * chunk_bytes)
        offsets = before[sample, k] * chunk_bytes
        table = np.stack([np.zeros_like(k), start * row_bytes, rows * row_bytes, file, offsets], axis=1)
        names = self._names(keys, int(shard[0]), ranges)
        return block.bytes, [(folder / name, end) for name, end in zip(names, ends.tolist(), strict=True)], table

    def _names(self, keys: NDArray[np.int64], shard: int, ranges: int) -> list[str]:
        """Names of the shards with these keys: ``(group * layers + layer) * ranges + range``, groups counted from ``shard``."""
        pairs, stretches = np.divmod(keys, ranges)
        groups, layers = np.divmod(pairs, self.layers)
        names = zip((groups + shard).tolist(), layers.tolist(), stretches.tolist(), strict=True)
        return [f"c.{group}.{layer}.{stretch}.0" for group, layer, stretch in names]

    def _shards(self, lengths: NDArray[np.int64], row_bytes: int) -> Iterator[ShardChunks]:
        """The shards that contain inner chunks of examples with these tokens."""
        if self.samples is None:  # no example was written
            return
        for group, counts in self._per_shard(lengths):
            for stretch, of_sample in enumerate(counts.T):
                sizes = np.full(int(of_sample.sum()), self.tokens * row_bytes)
                for layer in range(self.layers if len(sizes) else 0):
                    yield ShardChunks(f"c.{group}.{layer}.{stretch}.0", of_sample, sizes)

    def forget(self, folder: Path, lengths: NDArray[np.int64], row_bytes: int) -> None:
        if not folder.is_dir():
            return
        sizes = {shard.name: shard.size for shard in self._shards(lengths, row_bytes)}
        with os.scandir(folder) as entries:
            present = [(e.name, e.path, e.stat().st_size) for e in entries if is_shard(e.name)]
        for name, path, size in present:
            if name not in sizes:
                Path(path).unlink()
            elif size > sizes[name]:
                os.truncate(path, sizes[name])

    def close(self, folder: Path, lengths: NDArray[np.int64], row_bytes: int, put: Put) -> None:
        samples, slots = self._final(lengths)
        written: list[str | os.PathLike[str]] = []
        for shard in self._shards(lengths, row_bytes):
            path, end = folder / shard.name, shard.size
            size = path.stat().st_size if path.exists() else 0
            if size < end:
                raise FormatError(f"expected {end} bytes of chunks, found {size}", path=path, offset=size)
            index = _native.encode_shard_index(shard.entries(samples, slots))
            put([index], [(path, end + index.size)], [(0, 0, index.size, 0, end)])
            os.truncate(path, end + index.size)
            written.append(path)
        _native.sync_files(written)

    def _final(self, lengths: NDArray[np.int64]) -> tuple[int, int]:
        """Samples and inner chunks per sample of the finished shards: no more than the array has."""
        assert self.samples is not None
        assert self.slots is not None
        chunks = -(-max(int(lengths.max(initial=0)), 1) // self.tokens)
        return max(1, min(self.samples, len(lengths))), min(self.slots, chunks)

    def meta(self, shape: Sequence[int], lengths: NDArray[np.int64], dtype: np.dtype[np.generic]) -> dict[str, object]:
        samples, slots = self._final(lengths)
        inner = (1, 1, self.tokens, shape[3])
        return array_meta(
            3, shape, (samples, 1, slots * self.tokens, shape[3]), dtype, inner, self.codecs(dtype, shape[3])
        )

    def codecs(self, dtype: np.dtype[np.generic], width: int) -> list[Codec]:
        """Codecs of inner chunks of rows of ``width`` elements, in the words of the metadata."""
        return [plain_codec(dtype)]

    def estimate(self, lengths: NDArray[np.int64], row_bytes: int) -> tuple[int, int]:
        samples, slots = self._final(lengths)
        shards = sum(int(counts.any(axis=0).sum()) for _, counts in self._per_shard(lengths)) * self.layers
        chunks = int((-(-lengths // self.tokens)).sum()) * self.layers
        return shards, chunks * self.tokens * row_bytes + shards * (16 * samples * slots + 4)

    def borders(self, n: int) -> NDArray[np.int64] | None:
        return np.arange(0, n, self._sizes[0])


def is_shard(name: str) -> bool:
    """Whether a file has the name of a shard."""
    return name.startswith("c.") and _CHUNK.fullmatch(name[2:]) is not None


def longest_chunk(lengths: NDArray[np.int64], most: int, least: int, padding: int) -> int:
    """The longest inner chunk of at most ``most`` tokens with at least ``padding`` rows of these examples per row of padding.

    A power of two, or an equal division of the longest example or of one of the most common length. ``least``, or the longest
    example, if all have more padding.
    """
    longest = max(int(lengths.max(initial=0)), 1)
    lengths = lengths[lengths > 0]
    values, counts = np.unique(lengths, return_counts=True)
    common = int(values[counts.argmax()]) if len(values) else longest
    chunks = {1 << k for k in range(min(most, longest).bit_length())}
    chunks |= {-(-n // -(-n // most)) for n in (longest, common)}
    rows = int(lengths.sum())
    for chunk in sorted(chunks, reverse=True):
        if int((-lengths % chunk).sum()) * padding <= rows:
            return chunk
    return min(least, longest)


def _cheapest_shape(chunks: NDArray[np.int64], most_samples: int, most_slots: int, file_cost: int) -> tuple[int, int]:
    """Samples, and inner chunks of each, of a shard, with few files and small indexes.

    The index of a shard has an entry for each of ``samples * slots`` inner chunks, and each further shard of a long sample has such
    an index, too.

    Args:
        chunks: numbers of inner chunks of all samples.
        most_samples: samples that fill a shard.
        most_slots: inner chunks that fill a shard.
        file_cost: bytes that one file less is worth.
    """
    costs = {}
    for samples in _powers(min(most_samples, max(len(chunks), 1))):
        group_chunks = np.maximum.reduceat(chunks, np.arange(0, len(chunks), samples)) if len(chunks) else chunks
        for slots in _powers(min(max(int(chunks.max(initial=1)), 1), most_slots, max(_MOST_SLOTS // samples, 1))):
            files = int((-(-group_chunks // slots)).sum())
            costs[samples, slots] = files * (16 * samples * slots + file_cost)
    return min(costs, key=lambda shape: (costs[shape], shape))


def _powers(most: int) -> list[int]:
    """Powers of two up to ``most``, and ``most``."""
    return sorted({most, *(1 << k for k in range(most.bit_length()))})


def plain_codec(dtype: np.dtype[np.generic]) -> Codec:
    """The codec of numbers in C order."""
    return {"name": "bytes", **({"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {})}


def size_in(values: Mapping[str, object], name: str) -> int | None:
    """A number of tokens, chunks or samples in a journal; None before it is chosen."""
    size = values[name]
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(f"{name} {size!r}")
    return size


def array_meta(
    version: int,
    shape: Sequence[int],
    chunks: Sequence[int],
    dtype: np.dtype[np.generic],
    inner: Sequence[int] | None = None,
    inner_codecs: Sequence[Codec] = (),
) -> dict[str, object]:
    """Contents of a ``.zarray``, or of an array's ``zarr.json``, for plain chunks in C order.

    ``inner``: version 3: ``chunks`` are shards of inner chunks of this shape, with the codecs ``inner_codecs``.
    """
    fill = {"b": False, "f": 0.0, "V": 0.0, "S": ""}.get(dtype.kind, 0)
    if version == 2:
        return {
            "chunks": [int(n) for n in chunks],
            "compressor": None,
            "dimension_separator": ".",
            "dtype": dtype.str,
            "fill_value": fill,
            "filters": None,
            "order": "C",
            "shape": [int(n) for n in shape],
            "zarr_format": 2,
        }
    codecs = [plain_codec(dtype)]
    if inner is not None:
        configuration = {
            "chunk_shape": [int(n) for n in inner],
            "codecs": list(inner_codecs),
            "index_codecs": [plain_codec(np.dtype(np.uint64)), {"name": "crc32c"}],
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": configuration}]
    return {
        "attributes": {},
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [int(n) for n in chunks]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": codecs,
        "data_type": dtype.name,
        "fill_value": fill,
        "node_type": "array",
        "shape": [int(n) for n in shape],
        "storage_transformers": [],
        "zarr_format": 3,
    }
