"""Datasets of the benchmarks, created once in benches/data (or ``$ACTSHARD_BENCH_DATA``)."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

import actshard
from benches.sizes import TINY, size

if TYPE_CHECKING:
    import pyarrow as pa

ROOT = Path(os.environ.get("ACTSHARD_BENCH_DATA", Path(__file__).parent / "data")) / ("tiny" if TINY else "")

SAEV = {"examples": size(2_000, 100), "layers": [2, 7, 11], "content": size(196, 15), "d_model": 768, "shards": 4}
ZARR = {
    "samples": size(40, 4),
    "layers": size(11, 3),
    "tokens": size(512, 64),
    "hidden": size(4_096, 256),
    "chunk": size(128, 16),
}
PICKLES = {"tokens": size(512, 16), "hidden": size(1_024, 64), "samples": size(25, 4), "layers": 2}
CODED = {"shape": size((50, 4, 640, 768), (4, 2, 40, 96)), "chunk": size((1, 1, 128, 768), (1, 1, 8, 96))}
POOLED = {"prompts": size(6_000, 60), "dim": 4_096, "shards": 3}
FULL = {"prompts": size(500, 20), "dim": size(1_024, 64), "low": size(64, 4), "high": size(192, 12), "rest_shards": 3}
INDEX = size((1_000_000, 100), (1_000, 10))
"""Prompts, and tokens of each."""


def saev() -> Path:
    """2,000 examples x 3 layers x 197 tokens x 768 float32 in 4 shards: 3.6 GB."""
    n, layers, t, d = SAEV["examples"], SAEV["layers"], SAEV["content"] + 1, SAEV["d_model"]
    eps = n // SAEV["shards"]
    folder = ROOT / "saev" / "shards" / "bench"
    if (folder / "shards.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for shard in range(SAEV["shards"]):
        with (folder / f"acts{shard:06}.bin").open("wb") as file:
            for _ in range(eps):
                file.write(rng.standard_normal((len(layers), t, d), np.float32).tobytes())
    metadata = {
        "family": "clip", "ckpt": "bench", "layers": layers, "content_tokens_per_example": t - 1, "cls_token": True,
        "d_model": d, "n_examples": n, "max_tokens_per_shard": eps * len(layers) * t, "data": "", "dataset": "/none",
        "pixel_agg": "majority", "dtype": "float32", "protocol": "2.1",
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2))
    listed = [{"name": f"acts{s:06}.bin", "n_examples": eps} for s in range(SAEV["shards"])]
    (folder / "shards.json").write_text(json.dumps(listed))
    return folder


def _write_index(folder: Path, columns: dict[str, pa.Array], hidden: dict[str, object]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    meta = {
        "format_version": "2.0",
        # lmprobe caches by model and text within a process, so datasets must not share both.
        "model": {"name": f"bench/{folder.name}", "revision": None},
        "num_prompts": len(columns["text"]),
        "prompt_ordering": "random",
        "tensors": {"hidden_layers": hidden},
        "provenance": {"lmprobe_version": "0.10.3", "created_at": "2026-01-01T00:00:00+00:00"},
    }
    encoded = {f"lmprobe:{k}": json.dumps(v) for k, v in meta.items()}
    (folder / "index").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns).replace_schema_metadata(encoded), folder / "index/train-00000-of-00001.parquet")


def _hidden(dim: int, dtype: str, storage: str, shards: list[dict[str, int]]) -> dict[str, object]:
    return {
        "type": "hidden", "layers": [7], "dim": dim, "dtype": "float32", "layout": "per_layer",
        "file_pattern": "tensors/hidden_layer{layer:03d}_shard{shard:03d}.safetensors",
        "key_pattern": "hidden.layer_{layer}", "storage": storage, "shards": shards,
    }  # fmt: skip


def pooled(dtype: str = "float32") -> Path:
    """lmprobe pooled: 6,000 prompts x 4,096 in 3 shards, one layer."""
    import pyarrow as pa

    folder = ROOT / f"lmprobe-pooled-{dtype}"
    if (folder / "index").exists():
        return folder
    n, dim = POOLED["prompts"], POOLED["dim"]
    per = n // POOLED["shards"]
    (folder / "tensors").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for s in range(POOLED["shards"]):
        rows = rng.standard_normal((per, dim), np.float32).astype(dtype)
        save_file({"hidden.layer_7": rows}, folder / f"tensors/hidden_layer007_shard{s:03}.safetensors")
    i = np.arange(n)
    columns = {
        "text": pa.array([f"prompt number {x}" for x in i]),
        "label": pa.array((i % 2).astype(np.int32)),
        "num_tokens": pa.nulls(n, pa.int32()),
        "shard_index": pa.array((i // per).astype(np.int32)),
        "row_offset": pa.array((i % per).astype(np.int32)),
    }
    hidden = _hidden(dim, dtype, "pooled", [{"num_prompts": per}] * POOLED["shards"])
    _write_index(folder, columns, {**hidden, "pooling": "last_token", "row_bytes": dim * 4})
    return folder


def full_sequence() -> Path:
    """lmprobe full-sequence: 500 prompts of 64 to 192 tokens x 1,024 float32."""
    import pyarrow as pa

    folder = ROOT / "lmprobe-full"
    if (folder / "index").exists():
        return folder
    n, dim, rest_shards = FULL["prompts"], FULL["dim"], FULL["rest_shards"]
    (folder / "tensors").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(2)
    lengths = rng.integers(FULL["low"], FULL["high"] + 1, n)
    path = "tensors/hidden_layer007_shard{:03}.safetensors"
    save_file({"hidden.layer_7": rng.standard_normal((n, dim), np.float32)}, folder / path.format(0))
    shards = [{"num_prompts": n, "num_tokens": n}]
    ids: list[list[int]] = []
    offsets: list[list[int]] = []
    for s, prompts in enumerate(np.array_split(np.arange(n), rest_shards), start=1):
        row = 0
        for p in prompts:
            rest = int(lengths[p]) - 1
            ids.append([s] * rest + [0])
            offsets.append([*range(row, row + rest), int(p)])
            row += rest
        save_file({"hidden.layer_7": rng.standard_normal((row, dim), np.float32)}, folder / path.format(s))
        shards.append({"num_prompts": len(prompts), "num_tokens": row})
    i = np.arange(n)
    columns = {
        "text": pa.array([f"prompt number {x}" for x in i]),
        "label": pa.array((i % 2).astype(np.int32)),
        "num_tokens": pa.array(lengths.astype(np.int32)),
        "shard_index": pa.array(np.zeros(n, np.int32)),
        "row_offset": pa.array(i.astype(np.int32)),
        "token_offset": pa.array(i),
        "token_shard_ids": pa.array(ids, pa.list_(pa.int64())),
        "token_shard_offsets": pa.array(offsets, pa.list_(pa.int64())),
    }
    _write_index(folder, columns, {**_hidden(dim, "float32", "full_sequence", shards), "last_token_shards": 1})
    return folder


def large_index(prompts: int = INDEX[0], tokens: int = INDEX[1]) -> Path:
    """An lmprobe index of a million prompts with a hundred tokens each, and the fewest tensor files that open."""
    import pyarrow as pa

    folder = ROOT / f"lmprobe-index-{prompts}x{tokens}"
    if (folder / "index").exists():
        return folder
    (folder / "tensors").mkdir(parents=True, exist_ok=True)
    for s in range(2):
        save_file(
            {"hidden.layer_7": np.zeros((1, 8), np.float32)},
            folder / f"tensors/hidden_layer007_shard{s:03}.safetensors",
        )
    i = np.arange(prompts)
    ends = pa.array(np.arange(prompts + 1, dtype=np.int32) * tokens)
    ids = np.ones((prompts, tokens), np.int64)
    ids[:, -1] = 0
    offsets = (i[:, None] * (tokens - 1) + np.arange(tokens)).astype(np.int64)
    offsets[:, -1] = i
    columns = {
        "text": pa.array([f"prompt number {x}" for x in i]),
        "label": pa.array((i % 2).astype(np.int32)),
        "num_tokens": pa.array(np.full(prompts, tokens, np.int32)),
        "shard_index": pa.array(np.zeros(prompts, np.int32)),
        "row_offset": pa.array(i.astype(np.int32)),
        "token_offset": pa.array(i),
        "token_shard_ids": pa.ListArray.from_arrays(ends, pa.array(ids.ravel())),
        "token_shard_offsets": pa.ListArray.from_arrays(ends, pa.array(offsets.ravel())),
    }
    shards = [
        {"num_prompts": prompts, "num_tokens": prompts},
        {"num_prompts": prompts, "num_tokens": prompts * (tokens - 1)},
    ]
    _write_index(folder, columns, {**_hidden(8, "float32", "full_sequence", shards), "last_token_shards": 1})
    return folder


def zarr() -> Path:
    """40 samples x 11 layers x up to 512 tokens x 4,096 float16 in chunks of 1 MiB: 1.4 GB."""
    n, layers, t, h, chunk = ZARR["samples"], ZARR["layers"], ZARR["tokens"], ZARR["hidden"], ZARR["chunk"]
    store = ROOT / "zarr" / "bench.zarr"
    if (store / ".zattrs").exists():
        return store
    rng = np.random.default_rng(0)
    lengths = rng.integers(t // 4, t + 1, n).astype("<i4")
    block = rng.standard_normal((chunk, h)).astype("<f2")
    arrays: dict[str, tuple[list[int], list[int], str]] = {
        "activations": ([n, layers, t, h], [1, 1, chunk, h], "<f2"),
        "seq_len": ([n], [n], "<i4"),
    }
    for name, (shape, chunks, dtype) in arrays.items():
        folder = store / "arrays" / name
        folder.mkdir(parents=True, exist_ok=True)
        about = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": dtype, "compressor": None, "filters": None,
                 "fill_value": 0, "order": "C"}  # fmt: skip
        (folder / ".zarray").write_text(json.dumps(about))
    lengths.tofile(store / "arrays/seq_len/0")
    for i in range(n):
        for layer in range(layers):
            for c in range(-(-int(lengths[i]) // chunk)):
                (block + np.float16(i + layer / 16 + c)).astype("<f2").tofile(
                    store / f"arrays/activations/{i}.{layer}.{c}.0"
                )
    for group in (store, store / "arrays"):
        (group / ".zgroup").write_text(json.dumps({"zarr_format": 2}))
    (store / ".zattrs").write_text(json.dumps({"schema_version": "1.0", "model_id": "bench"}))
    return store


def pickles(name: str) -> Path:
    """Folders of 105 MB shards: gz1, gz1r (values rounded to 1/64), gz4, plain20."""
    count = {"gz1": 1, "gz1r": 1, "gz4": 4, "plain20": 20}[name]
    gz, per = name.startswith("gz"), PICKLES["samples"]
    folder = ROOT / "pickle" / name
    if (folder / "metadata.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    listed = []
    for shard in range(count):
        ids = range(shard * per, shard * per + per)
        layers: dict[str, list[dict[str, object]]] = {f"layer_{k}": [] for k in range(PICKLES["layers"])}
        for items in layers.values():
            for i in ids:
                values = rng.standard_normal((PICKLES["tokens"], PICKLES["hidden"]), np.float32)
                values = (np.round(values * 64) / 64).astype(np.float32) if name == "gz1r" else values
                items.append({"sample_idx": i, "activation": values, "shape": values.shape, "text_preview": "x" * 200,
                              "metadata": {"token_count": len(values), "dataset_idx": i, "machine_id": 0}})  # fmt: skip
        raw = pickle.dumps(layers, protocol=4)
        stored = gzip.compress(raw, 1) if gz else raw
        file = f"shard_{shard + 1:04}.pkl{'.gz' if gz else ''}"
        (folder / file).write_bytes(stored)
        listed.append({"shard_id": shard + 1, "filename": file, "size_bytes": len(stored), "num_samples": per,
                       "layers": list(range(PICKLES["layers"])), "sample_id_range": [ids[0], ids[-1]], "compressed": gz,
                       "checksum": "sha256:" + hashlib.sha256(stored).hexdigest()})  # fmt: skip
    config = {"model_name": "bench", "model_params": {"hidden_size": PICKLES["hidden"]}, "max_seq_length": PICKLES["tokens"],
              "layers_extracted": list(range(PICKLES["layers"]))}  # fmt: skip
    metadata = {"version": "1.0", "created_at": "2026-01-01T00:00:00Z", "extraction_config": config, "shards": listed,
                "statistics": {"total_shards": count, "total_samples": count * per}}  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


def rows_of(dtype: str, count: int = 100_000, dim: int = 768) -> Path:
    """lmprobe pooled: rows of one layer in a dtype, written by actshard: 154 MB for 100,000 of 16 bits."""
    folder = ROOT / f"rows-{dtype}-{count}x{dim}"
    if (folder / "index").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    rng = np.random.default_rng(4)
    with actshard.create(folder, "lmprobe", layers=[7], d_model=dim, dtype=dtype) as writer:
        for first in range(0, count, 10_000):
            some = min(10_000, count - first)
            writer.append(
                rng.standard_normal((some, 1, dim), np.float32), columns={"text": [f"{first + i}" for i in range(some)]}
            )
    return folder


def zarr_version_3(kind: str) -> Path:
    """50 samples x 4 layers x 640 tokens x 768 float32, values rounded to 1/64, in 1,000 chunks of 393 KB, written by zarr.

    Kinds: "plain", "sharded" (five chunks a file, not compressed), "coded" (zstd).
    """
    import zarr
    from zarr.codecs import ZstdCodec

    store = ROOT / "zarr3" / f"{kind}.zarr"
    shape, chunk = CODED["shape"], CODED["chunk"]
    if (store / "done").exists():
        return store
    shutil.rmtree(store, ignore_errors=True)
    group = zarr.open_group(str(store), mode="w", zarr_format=3)
    group.attrs.update({"schema_version": "1.0", "model_id": "bench"})
    more: dict[str, object] = {"shards": (1, 1, shape[2], shape[3])} if kind == "sharded" else {}
    made = group.create_array(
        "arrays/activations", shape=shape, chunks=chunk, dtype="f4",
        compressors=[ZstdCodec(level=1)] if kind == "coded" else None, **more,
    )  # fmt: skip
    lengths = group.create_array("arrays/seq_len", shape=shape[:1], chunks=shape[:1], dtype="i4", compressors=None)
    lengths[:] = shape[2]
    rng = np.random.default_rng(5)
    for i in range(shape[0]):
        values = rng.standard_normal(shape[1:], np.float32)
        made[i] = np.round(values * 64) / 64
    (store / "done").touch()
    return store


def many_stores(count: int = size(1_000, 20)) -> list[Path]:
    """Small saev dumps of 2 examples."""
    folder = ROOT / "many"
    paths = [folder / f"{i:04}" / "saev" / "shards" / "small" for i in range(count)]
    if paths[-1].exists():
        return paths
    metadata = {
        "family": "clip", "ckpt": "bench", "layers": [2, 7], "content_tokens_per_example": 4, "cls_token": True,
        "d_model": 768, "n_examples": 2, "max_tokens_per_shard": 20, "data": "", "dataset": "/none",
        "pixel_agg": "majority", "dtype": "float32", "protocol": "2.1",
    }  # fmt: skip
    rows = np.random.default_rng(6).standard_normal((2, 2, 5, 768), np.float32).tobytes()
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
        (path / "acts000000.bin").write_bytes(rows)
        (path / "metadata.json").write_text(json.dumps(metadata))
        (path / "shards.json").write_text(json.dumps([{"name": "acts000000.bin", "n_examples": 2}]))
    return paths
