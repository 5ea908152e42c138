"""Golden draft-model caches: what each must read as, and copies of them to damage."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import actshard
from conftest import GOLDEN

DRAFT = GOLDEN / "draft"
PER_TOKEN = ("input_ids", "attention_mask", "loss_mask")


def caches(prefix: str) -> list[Path]:
    """Golden caches whose names begin with a prefix."""
    return sorted(p.parent for p in DRAFT.glob(f"{prefix}*/expected.npz"))


def broken(prefix: str) -> list[Path]:
    """Damaged caches whose names begin with a prefix."""
    return sorted((DRAFT / "errors").glob(f"{prefix}*"))


def opened(path: Path, io: str = "mmap", format: str | None = None) -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, format, io)


def copied(path: Path, to: Path) -> Path:
    """A copy of a cache's own files."""
    ignored = shutil.ignore_patterns("expected.*", "README.md")
    return Path(shutil.copytree(path, to, ignore=ignored))


def edit_json(path: Path, **fields: Any) -> None:
    """Sets fields of a JSON file; None removes one."""
    value = json.loads(path.read_text())
    value.update(fields)
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


class Expected:
    """``expected.npz`` of a golden cache, by the names of a store's layers."""

    def __init__(self, golden: Path) -> None:
        self.arrays = dict(np.load(golden / "expected.npz"))

    @property
    def lengths(self) -> np.ndarray:
        return self.arrays["lengths"]

    def bits(self, layer: int | str) -> np.ndarray:
        """Rows of all examples as 16-bit patterns."""
        names = (f"layer_{layer}_bits", f"aux_{layer}_bits", f"{layer}_bits")
        return next(self.arrays[name] for name in names if name in self.arrays)

    def each(self, layer: int | str) -> list[np.ndarray]:
        return np.split(self.bits(layer), np.cumsum(self.lengths)[:-1])


def check_reads(store: actshard.Store, expected: Expected) -> None:
    """Every way of reading gives the expected rows and columns, bit for bit."""
    assert store.token_counts.tolist() == expected.lengths.tolist()
    ends = np.concatenate([[0], np.cumsum(expected.lengths)])
    n = len(store)
    for layer in store.layers:
        want, each = expected.bits(layer), expected.each(layer)
        for i in range(n):
            assert np.array_equal(store.sequence(i, layer).view(np.uint16), each[i])
        assert all(
            np.array_equal(a.view(np.uint16), b) for a, b in zip(store.sequences(range(n), layer), each, strict=True)
        )
        assert np.array_equal(store.last_tokens(layer).view(np.uint16), want[ends[1:] - 1])
        assert np.array_equal(store.gather(layer, range(n), 0).view(np.uint16), want[ends[:-1]])
        for shuffle in (None, "window", "exact"):
            seen = []
            for batch in store.stream(layer, 7, shuffle=shuffle):
                at = ends[batch.examples] + batch.tokens
                seen.append(at)
                assert np.array_equal(batch.activations.view(np.uint16), want[at])
            assert sorted(np.concatenate(seen).tolist()) == list(range(len(want)))
    for batch in store.stream("all", 5, shuffle="window"):
        at = ends[batch.examples] + batch.tokens
        assert batch.layers.tolist() == list(store.layers)
        assert str(store.layers[0]) in repr(batch)
        for k, layer in enumerate(store.layers):
            assert np.array_equal(batch.activations[:, k].view(np.uint16), expected.bits(layer)[at])
    for name in PER_TOKEN:
        assert (name in store.table.column_names) == (name in expected.arrays)
        if name in expected.arrays:
            column = store.table[name].combine_chunks()
            assert np.array_equal(column.flatten().to_numpy(), expected.arrays[name])
            assert np.array_equal(np.diff(column.offsets.to_numpy()), expected.lengths)
