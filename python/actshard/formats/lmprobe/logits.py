"""Writes logits and router tensors of lmprobe datasets, in separate files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import actshard._native as _native
from actshard.base._arguments import name_of
from actshard.base.errors import ArgumentError
from actshard.base.work import rename
from actshard.formats.target import LOGITS, ROUTER, AllExamples, arrays_in

if TYPE_CHECKING:
    import pyarrow as pa


def is_router(name: str) -> bool:
    """Whether a column contains the router logits of a layer."""
    return name.startswith(ROUTER) and name.removeprefix(ROUTER).lstrip("-").isdigit()


def write_logits(
    root: Path, limit: int, examples: AllExamples, columns: dict[str, pa.Array | pa.ChunkedArray]
) -> dict[str, Any]:
    """Writes logits and router tensors to files and removes them from the columns. Returns their descriptors.

    Args:
        root: the dataset's folder.
        limit: largest size of a file in bytes.
        examples: all examples.
        columns: the index's columns by name. Address columns are added.
    """
    import pyarrow as pa

    n = len(examples)
    descriptors: dict[str, object] = {}
    if any(name in columns for name in LOGITS):
        if not all(name in columns for name in LOGITS):
            raise ArgumentError(f"columns: expected {LOGITS[0]} and {LOGITS[1]}, found only one of them")
        assert examples.columns is not None
        values, indices = (arrays_in(examples.columns, name) for name in LOGITS)
        per = max(1, limit // (12 * values.shape[1]))
        shards = []
        for i, first in enumerate(range(0, n, per)):
            file = f"tensors/logits_topk_{i:03d}.safetensors"
            part = slice(first, first + per)
            tensors = {"logits_topk.values": values[part], "logits_topk.indices": indices[part].astype(np.int32)}
            _write_tensors(root / file, tensors)
            shards.append({"file": file, "num_prompts": len(values[part])})
        descriptors["logits_topk"] = {
            "type": "logits_topk",
            "k": values.shape[1],
            "dtype": str(values.dtype),
            "pooling": "last_token",
            "file_pattern": "tensors/logits_topk_{shard:03d}.safetensors",
            "row_bytes": values.shape[1] * (values.dtype.itemsize + 4),
            "shards": shards,
        }
        shard, row = np.divmod(np.arange(n), per)
        columns["shard_index_logits"] = pa.array(shard.astype(np.int32))
        columns["row_offset_logits"] = pa.array(row.astype(np.int32))
    routers = sorted(int(name.removeprefix(ROUTER)) for name in columns if is_router(name))
    if routers:
        assert examples.columns is not None
        router_arrays = {layer: arrays_in(examples.columns, f"{ROUTER}{layer}") for layer in routers}
        first_of = router_arrays[routers[0]]
        if any(a.shape != first_of.shape or a.dtype != first_of.dtype for a in router_arrays.values()):
            raise ArgumentError("router: expected the same number of experts and dtype in every layer")
        per = max(1, limit // (first_of.shape[1] * first_of.dtype.itemsize * len(routers)))
        shards = []
        for i, first in enumerate(range(0, n, per)):
            file = f"tensors/router_logits_{i:03d}.safetensors"
            _write_tensors(
                root / file, {f"router.layer_{la}": a[first : first + per] for la, a in router_arrays.items()}
            )
            shards.append({"file": file, "num_prompts": len(first_of[first : first + per])})
        descriptors["router_logits"] = {
            "type": "router",
            "layers": routers,
            "num_experts": first_of.shape[1],
            "dtype": str(first_of.dtype),
            "pooling": "last_token",
            "file_pattern": "tensors/router_logits_{shard:03d}.safetensors",
            "row_bytes": first_of.shape[1] * first_of.dtype.itemsize * len(routers),
            "shards": shards,
        }
    for name in [name for name in columns if name in LOGITS or is_router(name)]:
        del columns[name]
    return descriptors


def _write_tensors(path: Path, tensors: dict[str, NDArray[np.generic]]) -> None:
    """Writes a safetensors file: a JSON header padded to a multiple of 8 bytes, then the tensors."""
    offset, header = 0, {}
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": name_of(array.dtype), "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    working = path.with_name(f".{path.name}.part")
    body = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in tensors.values()]
    _native.write_segments(working, [head, *body])
    _native.sync_files([working])
    rename(working, path)
