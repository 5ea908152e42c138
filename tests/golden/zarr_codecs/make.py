"""Writes the stores in this folder with zarr-python, and records what zarr-python reads from damaged copies.

    python tests/golden/zarr_codecs/make.py        # zarr 3.1.6, numcodecs 0.16.6, numpy 2.4.6

Each folder is a store of shape (3, 2, 8, 4), a chunk (a shard) or more per example and layer. Values are those of
`values()`. `verdicts.json` holds, for each store and each damage of `chunk_damage.damaged`, what zarr-python gives for the
damaged sample and layer: "refused", or the CRC-32 of its bytes.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from torture.chunk_damage import DAMAGES, chunk_files, damaged, values  # noqa: E402

warnings.simplefilter("ignore")
SHARD = (1, 2, 8, 4)


def sharded(codecs: list[Any], index: str = "end", index_codecs: Any = None) -> dict[str, Any]:
    options = {} if index_codecs is None else {"index_codecs": index_codecs}
    return {
        "chunks": SHARD,
        "serializer": ShardingCodec(chunk_shape=(1, 1, 4, 4), codecs=codecs, index_location=index, **options),
        "compressors": None,
    }


V2: dict[str, dict[str, Any]] = {
    "v2_gzip": {"compressors": numcodecs.GZip(5)},
    "v2_zlib": {"compressors": numcodecs.Zlib(5)},
    "v2_bz2": {"compressors": numcodecs.BZ2(5)},
    "v2_zstd": {"compressors": numcodecs.Zstd(3)},
    "v2_zstd_checksum": {"compressors": numcodecs.Zstd(3, checksum=True)},
    "v2_blosc_lz4": {"compressors": numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE)},
    "v2_blosc_zstd_bits": {"compressors": numcodecs.Blosc("zstd", 5, numcodecs.Blosc.BITSHUFFLE)},
    "v2_blosc_blosclz": {"compressors": numcodecs.Blosc("blosclz", 9, numcodecs.Blosc.NOSHUFFLE)},
    "v2_zlib_f_order": {"compressors": numcodecs.Zlib(1), "order": "F"},
    "v2_lzma": {"compressors": numcodecs.LZMA()},
    "v2_delta_gzip": {"compressors": numcodecs.GZip(1), "filters": [numcodecs.Delta("<f4")]},
}
V3: dict[str, dict[str, Any]] = {
    "v3_gzip": {"compressors": GzipCodec(level=5)},
    "v3_zstd": {"compressors": ZstdCodec(level=3)},
    "v3_blosc": {"compressors": BloscCodec(cname="lz4", typesize=4, shuffle="shuffle")},
    "v3_crc32c": {"compressors": Crc32cCodec()},
    "v3_zstd_crc32c": {"compressors": [ZstdCodec(level=3), Crc32cCodec()]},
    "v3_transpose_gzip": {"filters": TransposeCodec(order=(3, 1, 2, 0)), "compressors": GzipCodec(level=1)},
    "v3_shards": sharded([BytesCodec()]),
    "v3_shards_crc32c": sharded([BytesCodec(), Crc32cCodec()]),
    "v3_shards_zstd_start": sharded([BytesCodec(), ZstdCodec(level=1)], "start"),
    "v3_shards_zstd_crc32c": sharded([BytesCodec(), ZstdCodec(level=1), Crc32cCodec()]),
    "v3_shards_plain_index": sharded([BytesCodec(), ZstdCodec(level=1)], "start", [BytesCodec()]),
    "v3_shards_gzip_start": sharded([TransposeCodec(order=(0, 1, 3, 2)), BytesCodec(), GzipCodec(level=1)], "start"),
}


def write(name: str, options: dict[str, Any]) -> Path:
    path = HERE / f"{name}.zarr"
    shutil.rmtree(path, ignore_errors=True)
    acts = values()
    group = zarr.create_group(store=path, zarr_format=int(name[1]))
    group.create_group("arrays")
    array = group.create_array(
        "arrays/activations", shape=acts.shape, dtype="f4", fill_value=0, **{"chunks": (1, 1, 8, 4), **options}
    )
    array[...] = acts
    lengths = group.create_array("arrays/seq_len", shape=(3,), chunks=(3,), dtype="i4", compressors=None)
    lengths[...] = 8
    return path


def verdicts(path: Path) -> list[str]:
    found = []
    for seed in range(DAMAGES):
        copy = path.with_name("damaged.zarr")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        victim = random.Random(seed).choice(chunk_files(copy))
        victim.write_bytes(damaged(victim.read_bytes(), seed))
        try:
            read = zarr.open_group(copy, mode="r")["arrays/activations"][...]
            found.append(str(zlib.crc32(np.ascontiguousarray(read).tobytes())))
        except Exception:
            found.append("refused")
        shutil.rmtree(copy)
    return found


if __name__ == "__main__":
    made = {name: verdicts(write(name, options)) for name, options in {**V2, **V3}.items()}
    (HERE / "verdicts.json").write_text(json.dumps(made, indent=0) + "\n")
