"""Helpers for lmprobe tests: golden values, and functions that change an index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import actshard
from conftest import GOLDEN, bits

Copy = Callable[..., Path]
Meta = dict[str, Any]
PART = "index/train-00000-of-00001.parquet"
LISTS = ("token_shard_ids", "token_shard_offsets")


def golden(variant: str) -> Any:
    return np.load(GOLDEN / "lmprobe" / variant / "expected.npz")


def check(store: actshard.Store, variant: str, layers: tuple[int, ...] | None = None) -> None:
    """Compares every row of these layers with the golden values."""
    want = golden(variant)
    n = store.num_examples

    def stored(name: str) -> np.ndarray:
        return want[f"{name}_bits"].view(store.dtype) if f"{name}_bits" in want else want[name]

    for layer in layers or store.layers:
        last = stored(f"layer_{layer}")
        full = f"layer_{layer}_tokens" in want
        tokens = stored(f"layer_{layer}_tokens") if full else last
        lengths = want["lengths"] if full else np.ones(n, int)
        assert store.token_counts.tolist() == lengths.tolist()
        assert np.array_equal(bits(store.last_tokens(layer)), bits(last))
        assert np.array_equal(bits(np.concatenate(store.sequences(range(n), layer))), bits(tokens))
        e, t = np.repeat(np.arange(n), lengths), np.concatenate([np.arange(x) for x in lengths])
        assert np.array_equal(bits(store.gather(layer, e, t)), bits(tokens))
        start = np.cumsum(lengths) - lengths
        for x in (0, n // 2, n - 1):
            assert np.array_equal(bits(store.sequence(x, layer)), bits(tokens[start[x] : start[x] + lengths[x]]))


def put(table: pa.Table, name: str, values: Any, type: Any = None) -> pa.Table:
    """The table with a column replaced or added."""
    array = values if isinstance(values, pa.ChunkedArray | pa.Array) else pa.array(values, type)
    at = table.column_names.index(name) if name in table.column_names else None
    return table.append_column(name, array) if at is None else table.set_column(at, name, array)


def changed(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    """The table with one value of a column replaced."""
    values = table[name].to_pylist()
    values[row] = value
    return put(table, name, values, table.schema.field(name).type)


def hidden(**fields: Any) -> Callable[[pa.Table, Meta], pa.Table]:
    """Returns a change of the hidden descriptor. None removes a field."""

    def change(table: pa.Table, meta: Meta) -> pa.Table:
        descriptor = meta["tensors"]["hidden_layers"]
        descriptor.update(fields)
        for name in [k for k, v in fields.items() if v is None]:
            del descriptor[name]
        return table

    return change


def shard(path: Path, layer: int, index: int) -> Path:
    return path / f"tensors/hidden_layer{layer:03d}_shard{index:03d}.safetensors"
