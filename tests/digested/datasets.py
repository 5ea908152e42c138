"""Small datasets with fixed seeds in every layout: written here if actshard writes the format, else golden data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from digested import GOLDEN

N, LAYERS, TOKENS, WIDTH = 23, (2, 5), 9, 6
FORMATS = ("saev", "lmprobe", "zarr", "pickle")


def equal() -> np.ndarray:
    """Examples of equal lengths: ``(examples, layers, tokens, d_model)``."""
    return np.random.RandomState(11).standard_normal((N, len(LAYERS), TOKENS, WIDTH)).astype(np.float32)


def ragged() -> list[np.ndarray]:
    """Examples of 1 to 14 tokens."""
    rng = np.random.RandomState(12)
    return [rng.standard_normal((len(LAYERS), n, WIDTH)).astype(np.float32) for n in rng.randint(1, 15, N)]


def patch_labels(cls: bool = False) -> np.ndarray:
    """saev's labels: one per content token."""
    return np.random.RandomState(13).randint(0, 4, (N, TOKENS - cls)).astype(np.uint8)


def columns(format: str) -> dict[str, Any]:
    """A text, a number and a list per example."""
    text = {"lmprobe": "text", "zarr": "prompt", "pickle": "text_preview"}[format]
    return {text: [f"text {i}, ünïcode" for i in range(N)], "label": [i % 3 for i in range(N)]}


def write(folder: Path, format: str, examples: Any, more: dict[str, Any] | None = None, **options: Any) -> Path:
    """Writes a dataset, with examples appended in batches of 5."""
    options = {"layers": LAYERS, "d_model": WIDTH, **options}
    more = more or {}
    with actshard.create(folder, format, **options) as writer:
        for at in range(0, len(examples), 5):
            part = slice(at, at + 5)
            writer.append(examples[part], **{name: _cut(value, part) for name, value in more.items()})
    return writer.path


def _cut(value: Any, part: slice) -> Any:
    if isinstance(value, dict):
        return {name: _cut(each, part) for name, each in value.items()}
    return tuple(each[part] for each in value) if isinstance(value, tuple) else value[part]


def opened(path: Path, **options: Any) -> actshard.Store:
    """Opens a store without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, **options)


def wide(folder: Path) -> Path:
    """Examples of 200 KiB, larger than the units of a window."""
    values = np.random.RandomState(14).standard_normal((5, 1, 100, 512)).astype(np.float32)
    return write(folder, "saev", values, layers=[0], d_model=512)


def many(folder: Path) -> Path:
    """70,000 rows: too many for a shuffled table."""
    values = np.arange(70_000, dtype=np.float32).reshape(350, 1, 200, 1)
    with actshard.create(folder, "lmprobe", layers=[0], d_model=1) as writer:
        writer.append(values)
    return writer.path


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "strided": lambda f: write(
        f, "saev", equal(), {"labels": patch_labels(True)}, cls_token=True, max_tokens_per_shard=80
    ),
    "table": lambda f: write(f, "lmprobe", ragged(), {"columns": columns("lmprobe")}, shard_bytes=2048),
    "pooled table": lambda f: write(f, "lmprobe", equal()[:, :, 0], {"columns": columns("lmprobe")}),
    "chunked": lambda f: write(f, "zarr", ragged(), {"columns": columns("zarr")}, chunk_tokens=4),
    "coded": lambda _: GOLDEN / "zarr/zstd/activations.zarr",
    "coded shards": lambda _: GOLDEN / "zarr/v3_sharded/activations.zarr",
    "plain pickle": lambda f: write(f, "pickle", ragged(), compress=False, shard_bytes=2048),
    "gzip pickle": lambda f: write(f, "pickle", ragged(), shard_bytes=2048),
    "wide": wide,
    "many": many,
}
"""Datasets by the core's name of their layout."""
