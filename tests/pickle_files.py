"""Small datasets of pickle shards, written with the standard pickler."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import actshard


def opened(path: Any, io: str = "mmap", **options: Any) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, io=io, **options)


def item(sample: int, array: np.ndarray, **more: Any) -> dict[str, Any]:
    return {"sample_idx": sample, "activation": array, "shape": array.shape, "text_preview": f"text {sample}", **more}


def write(
    folder: Path, shards: list[dict[str, list[dict[str, Any]]]], *, gz: bool = True, protocol: int = 4, machine: int = 0
) -> Path:
    """A folder of shards, as in the published text."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for i, layers in enumerate(shards, 1):
        data = pickle.dumps(layers, protocol=protocol)
        stored = gzip.compress(data, 1) if gz else data
        name = f"shard_{i:04}.pkl{'.gz' if gz else ''}"
        (folder / name).write_bytes(stored)
        ids = [x["sample_idx"] for items in layers.values() for x in items]
        listed.append({
            "shard_id": i, "filename": name, "size_bytes": len(stored), "num_samples": len(set(ids)),
            "layers": [int(k[6:]) for k in layers], "sample_id_range": [min(ids), max(ids)], "compressed": gz,
            "checksum": "sha256:" + hashlib.sha256(stored).hexdigest(),
        })  # fmt: skip
    layers_extracted = sorted({x for s in listed for x in s["layers"]})
    metadata = {
        "version": "1.0",
        "created_at": "2026-01-01T00:00:00Z",
        "extraction_config": {"model_name": "test/model", "layers_extracted": layers_extracted},
        "distributed_config": {"machine_id": machine},
        "shards": listed,
        "statistics": {"total_shards": len(listed), "total_samples": sum(s["num_samples"] for s in listed)},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


def change(folder: Path, function: Any) -> None:
    value = json.loads((folder / "metadata.json").read_text())
    function(value)
    (folder / "metadata.json").write_text(json.dumps(value))


def values(sample: int, layer: int, tokens: int | None = None, d: int = 8) -> np.ndarray:
    return np.random.default_rng([sample, layer]).standard_normal(
        (sample % 5 if tokens is None else tokens, d), np.float32
    )


def dataset(folder: Path, shards: int = 4, per: int = 6, **options: Any) -> Path:
    made = [
        {f"layer_{k}": [item(s, values(s, k)) for s in range(i * per, i * per + per)] for k in (3, 9)}
        for i in range(shards)
    ]
    return write(folder, made, **options)


def mixed(folder: Path, kinds: list[str], *, gz: bool, protocol: int, per: int = 3) -> tuple[Path, list[np.ndarray]]:
    """Samples of several dtypes and byte orders, within and between shards; some in Fortran order, some empty."""
    rows = []
    for i, kind in enumerate(kinds):
        rng = np.random.default_rng(i)
        made = (rng.standard_normal((i % 4, 5)) * 10.0 ** rng.integers(-6, 4, (i % 4, 5))).astype(kind)
        rows.append(np.asfortranarray(made) if i % 3 == 2 else made)
    shards = [
        {"layer_0": [item(k, rows[k]) for k in range(i, min(i + per, len(rows)))]} for i in range(0, len(rows), per)
    ]
    return write(folder, shards, gz=gz, protocol=protocol), rows
