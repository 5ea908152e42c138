"""Study: how small rows of activations become without loss, and how fast one core decodes them.

python -m benches.packing PATH [--layer NAME] [--rows 64] [--dtype bfloat16] [--megabytes 32]

PATH is any dataset that actshard opens. Rows of one layer are packed in blocks of ``--rows`` rows, as a store with random access
would: each block alone, and rows that repeat only once. Each way must return the same bits, and is then timed on one thread: the
median of nine passes, in bytes of rows per second of processor time. Ways whose package is not installed (numcodecs for blosc,
pcodec) are left out.

Ways: actshard.planes, the codec that this study led to (docs/formats/planes.md); zstd on the rows; on the bytes of each position
(shuffle); on the plane of exponents alone, with sign and mantissa unpacked ("exponents"); blosc with shuffled bytes and bits;
pcodec. The bound is the entropy of the exponents with all other bits raw. zstd at level 1 encodes such a plane nearly without
matches, with Huffman codes in four interleaved streams (huff0).
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import actshard
import actshard._native as _native

Bytes = NDArray[np.uint8]
EXPONENT = {"bfloat16": (7, 8), "float16": (10, 5), "float32": (23, 8)}
"""Position and number of the bits of the exponent."""


@dataclass(frozen=True)
class Way:
    """A way to pack a block."""

    name: str
    pack: Callable[[Bytes], tuple[Any, int]]
    """Returns the packed block, and its bytes."""
    unpack: Callable[[Any, int], Bytes]
    """Returns the block, given its bytes."""


def zstd(level: int) -> pa.Codec:
    """zstd, which pyarrow contains."""
    return pa.Codec("zstd", compression_level=level)


def whole(level: int) -> Way:
    """zstd on the rows as they are."""
    codec = zstd(level)

    def pack(block: Bytes) -> tuple[Any, int]:
        packed = codec.compress(block, asbytes=True)
        return packed, len(packed)

    return Way(f"zstd {level}", pack, lambda packed, size: np.frombuffer(codec.decompress(packed, size), np.uint8))


def shuffled(level: int, item: int) -> Way:
    """zstd on the first bytes of all elements, then on the second, and so on."""
    codec = zstd(level)

    def pack(block: Bytes) -> tuple[Any, int]:
        packed = codec.compress(np.ascontiguousarray(block.reshape(-1, item).T), asbytes=True)
        return packed, len(packed)

    def unpack(packed: Any, size: int) -> Bytes:
        planes = np.frombuffer(codec.decompress(packed, size), np.uint8).reshape(item, -1)
        return np.ascontiguousarray(planes.T).reshape(-1)

    return Way(f"byte shuffle, zstd {level}", pack, unpack)


def exponents(level: int, dtype: str, item: int) -> Way:
    """zstd on the exponents; sign and mantissa raw, in as many bytes as hold them."""
    codec = zstd(level)
    shift, bits = EXPONENT[dtype]
    word = np.dtype(f"u{item}")
    low, sign = (1 << shift) - 1, 8 * item - 1
    rest_bits = 8 * item - bits

    def pack(block: Bytes) -> tuple[Any, int]:
        words = block.view(word)
        plane = (words >> shift & ((1 << bits) - 1)).astype(np.uint8)
        rest = words & low | words >> sign << shift
        packed = codec.compress(plane, asbytes=True)
        # Stored in whole words here, and counted as bits: unpacking odd widths is not what is timed.
        mantissas = rest.astype(np.uint8) if rest_bits <= 8 else rest
        return (packed, mantissas), len(packed) + -(-len(words) * rest_bits // 8)

    def unpack(packed: Any, size: int) -> Bytes:
        plane = np.frombuffer(codec.decompress(packed[0], size // item), np.uint8).astype(word)
        rest = packed[1].astype(word, copy=False)
        return (plane << shift | rest & low | rest >> shift << sign).astype(word, copy=False).view(np.uint8)

    return Way(f"exponents, zstd {level}", pack, unpack)


def planes(item: int, width: int) -> Way:
    """The codec actshard.planes."""

    def pack(block: Bytes) -> tuple[Any, int]:
        packed = _native.encode_planes(block.tobytes(), item, width)
        return packed, len(packed)

    def unpack(packed: Any, size: int) -> Bytes:
        return np.frombuffer(_native.decode_planes(packed, size), np.uint8)

    return Way("actshard.planes", pack, unpack)


def blosc_ways(item: int) -> list[Way]:
    """blosc with shuffled bytes and with shuffled bits."""
    blosc = importlib.import_module("numcodecs.blosc")
    blosc.use_threads = False
    ways = []
    for name, shuffle in (("byte", blosc.SHUFFLE), ("bit", blosc.BITSHUFFLE)):
        codec = blosc.Blosc("zstd", 1, shuffle, typesize=item)

        def pack(block: Bytes, codec: Any = codec) -> tuple[Any, int]:
            packed = codec.encode(block)
            return packed, len(packed)

        def unpack(packed: Any, size: int, codec: Any = codec) -> Bytes:
            return np.frombuffer(codec.decode(packed), np.uint8)

        ways.append(Way(f"blosc {name}shuffle, zstd 1", pack, unpack))
    return ways


def pcodec_ways(dtype: str) -> list[Way]:
    """pcodec, which has no bfloat16: such rows are packed as 16-bit integers."""
    standalone = importlib.import_module("pcodec.standalone")
    config = importlib.import_module("pcodec").ChunkConfig(compression_level=8)
    number = np.dtype("u2" if dtype == "bfloat16" else dtype)

    def pack(block: Bytes) -> tuple[Any, int]:
        packed = standalone.simple_compress(block.view(number), config)
        return packed, len(packed)

    return [Way("pcodec 8", pack, lambda packed, size: np.asarray(standalone.simple_decompress(packed)).view(np.uint8))]


def ways_for(dtype: str, item: int, width: int) -> list[Way]:
    """All ways whose packages are installed."""
    ways = [planes(item, width), whole(1), shuffled(1, item), *(exponents(level, dtype, item) for level in (1, 3))]
    for more in (lambda: blosc_ways(item), lambda: pcodec_ways(dtype)):
        try:
            ways += more()
        except ImportError as error:
            print(f"left out: {error}")
    return ways


def rows_of(path: str, layer: str | None, dtype: str | None, most: int) -> tuple[NDArray[Any], str]:
    """The first distinct rows of a layer, up to ``most`` bytes, and their dtype."""
    store = actshard.open(path)
    name = next((x for x in store.layers if str(x) == layer), None) if layer is not None else store.layers[0]
    if name is None:
        raise SystemExit(f"--layer: expected one of {list(store.layers)}, found {layer}")
    parts, size = [], 0
    for example in range(len(store)):
        parts.append(np.asarray(store.sequence(example, name)))
        size += parts[-1].nbytes
        if size >= most:
            break
    rows = np.concatenate(parts)
    if dtype is not None:
        rows = rows.astype(np.dtype(getattr(importlib.import_module("ml_dtypes"), dtype, dtype)))
    rows = distinct(rows)
    if rows.dtype.name not in EXPONENT:
        raise SystemExit(f"--dtype: expected one of {', '.join(EXPONENT)}, found {rows.dtype.name}")
    return rows, rows.dtype.name


def distinct(rows: NDArray[Any]) -> NDArray[Any]:
    """Each row once, in stored order: padding and repeated tokens of a first layer would pack to nothing."""
    words = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1] * rows.dtype.itemsize))).reshape(-1)
    return rows[np.sort(np.unique(words, return_index=True)[1])]


def bound(rows: NDArray[Any], dtype: str) -> float:
    """Bits of sign, mantissa and of the entropy of the exponent, per bit of a row."""
    shift, bits = EXPONENT[dtype]
    words = rows.view(f"u{rows.dtype.itemsize}")
    counts = np.bincount((words >> shift & ((1 << bits) - 1)).reshape(-1).astype(np.int64))
    shares = counts[counts > 0] / counts.sum()
    all_bits = 8 * rows.dtype.itemsize
    return float((all_bits - bits - (shares * np.log2(shares)).sum()) / all_bits)


def measure(way: Way, blocks: list[Bytes]) -> tuple[float, float, float]:
    """Ratio, and bytes of rows per second of packing and unpacking. Raises AssertionError unless all bits return."""
    size = sum(block.size for block in blocks)
    start_time = time.process_time()
    packed = [way.pack(block) for block in blocks]
    packing = time.process_time() - start_time
    for (contents, _), block in zip(packed, blocks, strict=True):
        assert np.array_equal(way.unpack(contents, block.size), block), f"{way.name}: other bits"
    seconds = []
    for _ in range(9):
        start_time = time.process_time()
        for (contents, _), block in zip(packed, blocks, strict=True):
            way.unpack(contents, block.size)
        seconds.append(time.process_time() - start_time)
    return sum(count for _, count in packed) / size, size / packing, size / statistics.median(seconds)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benches.packing")
    parser.add_argument("path")
    parser.add_argument("--layer", help="name of the layer (default: the first)")
    parser.add_argument("--rows", type=int, default=64, help="rows of a block (default: 64)")
    parser.add_argument("--dtype", choices=list(EXPONENT), help="converts the rows first (default: as stored)")
    parser.add_argument("--megabytes", type=int, default=32, help="most megabytes of rows (default: 32)")
    given = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows, dtype = rows_of(given.path, given.layer, given.dtype, given.megabytes << 20)
    step = max(given.rows, 1)
    blocks = [rows[first : first + step].reshape(-1).view(np.uint8) for first in range(0, len(rows), step)]
    print(f"{len(rows):,} rows of {rows.shape[1]} {dtype}, blocks of {step} rows; bound {bound(rows, dtype):.3f}\n")
    print("| way | size | pack GB/s | unpack GB/s |\n|---|---|---|---|")
    for way in ways_for(dtype, rows.dtype.itemsize, rows.shape[1]):
        ratio, packing, unpacking = measure(way, blocks)
        print(f"| {way.name} | {ratio:.3f} | {packing / 1e9:.2f} | {unpacking / 1e9:.2f} |")


if __name__ == "__main__":
    main()
