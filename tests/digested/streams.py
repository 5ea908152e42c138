"""Batches of streams: for each layout, shuffle and setting, digests of row ids batch by batch, and of the bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from digested.datasets import LAYOUTS, opened

SHUFFLES = (None, "window", "exact")


def rows(batches: Iterable[actshard.Batch]) -> str:
    """Digests of examples, tokens, layers and batch sizes; and of activations and labels."""
    names, values = hashlib.sha256(), hashlib.sha256()
    for batch in batches:
        names.update(np.int64(len(batch)).tobytes())
        for part in (batch.examples, batch.tokens, batch.layers):
            names.update(part.astype("<i8").tobytes())
        values.update(f"{batch.activations.dtype.name}{batch.activations.shape}".encode())
        values.update(batch.activations.tobytes())
        if batch.labels is not None:
            values.update(f"{batch.labels.dtype.name}".encode() + batch.labels.tobytes())
    return f"{names.hexdigest()[:16]} {values.hexdigest()[:16]}"


def settings(store: actshard.Store, shuffle: str | None) -> dict[str, dict[str, Any]]:
    """Stream options by recorded name. The first are the defaults."""
    first, many = store.layers[0], int(store.token_counts.sum()) > 1000
    size = 4096 if many else 16
    made: dict[str, dict[str, Any]] = {"default": {}, "seed 7": {"seed": 7}, "epoch 5": {"epoch": 5}}
    made["seed 2**63 - 1, batch 1"] = {"seed": 2**63 - 1, "batch_size": 4999 if many else 1}
    if shuffle == "window":
        row = store.d_model * store.dtype.itemsize + 28
        for n in (3, 7, 20, 61) if not many else (20_000, 69_999):
            made[f"memory of {n} rows"] = {"memory": n * row}
        few = {"memory": (20_000 if many else 20) * row}
    else:
        few = {}
    for rank in range(3):
        made[f"rank {rank} of 3"] = {"rank": rank, "world_size": 3, **few}
        made[f"rank {rank} of 3, drop_last"] = {"rank": rank, "world_size": 3, "drop_last": True, **few}
    if many:
        return _with(made, first, size)
    made["drop_last"] = {"drop_last": True, **few}
    for tokens in ("all", "last", "special"):
        made[f"tokens {tokens}"] = {"tokens": tokens, **few}
    if store.labels is not None:
        made["ignore_labels"] = {"ignore_labels": [0, 2], **few}
        made["ignore_labels, tokens all"] = {"ignore_labels": [0, 2], "tokens": "all", **few}
    rng = np.random.RandomState(15)
    flags = rng.randint(0, 2, store.num_examples).astype(bool)
    made["keep examples"] = {"keep": flags, **few}
    made["keep rows"] = {
        "keep": [rng.randint(0, 2, n).astype(bool) for n in store.token_counts],
        "tokens": "all",
        **few,
    }
    made["float16"] = {"dtype": "float16", **few}
    made["float64, centered"] = {"dtype": "float64", "center": 1.0, "scale": 2.0, **few}
    if len(store.layers) > 1:
        made["all layers"] = {"layer": "all", **few}
        made["all layers backwards"] = {"layer": store.layers[::-1], **few}
        made["one layer of a list"] = {"layer": [store.layers[-1]], **few}
        made["interleaved"] = {"layer": "all", "interleave": True, **few}
        for rank in range(3):
            made[f"interleaved, rank {rank} of 3"] = {
                **{"layer": "all", "interleave": True, "rank": rank, "world_size": 3},
                **{"drop_last": True, **few},
            }
    return _with(made, first, size)


def _with(made: dict[str, dict[str, Any]], layer: int, size: int) -> dict[str, dict[str, Any]]:
    return {name: {"layer": layer, "batch_size": size, **options} for name, options in made.items()}


def of(store: actshard.Store, shuffle: str | None, options: dict[str, Any]) -> str:
    """Digests of two epochs, or the kind of the error."""
    options = dict(options)
    layer, size = options.pop("layer"), options.pop("batch_size")
    try:
        stream = store.stream(layer, size, shuffle=shuffle, **options)
        return rows(batch for _ in range(2) for batch in stream)
    except actshard.ActshardError as error:
        return f"refused: {error.kind}"


def found(folder: Path, layouts: Iterable[str] = LAYOUTS, shuffles: Iterable[str | None] = SHUFFLES) -> dict[str, Any]:
    """Digests by layout, shuffle and setting, of some layouts and shuffles."""
    made: dict[str, Any] = {}
    for layout in layouts:
        path = LAYOUTS[layout](folder / layout.replace(" ", "_"))
        mapped, read = opened(path, io="mmap"), opened(path, io="pread")
        for shuffle in shuffles:
            group = made[f"{layout}, {shuffle}"] = {}
            for name, options in settings(mapped, shuffle).items():
                group[name] = of(mapped, shuffle, options)
            stream = mapped.stream(mapped.layers[0], 64, shuffle=shuffle, memory="20KiB")
            group["batches(1, 3)"] = rows(stream.batches(1, 3))
            assert of(read, shuffle, settings(read, shuffle)["default"]) == group["default"], (layout, shuffle)
    return made
