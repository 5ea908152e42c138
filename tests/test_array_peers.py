"""Layers as arrays in scikit-learn and dask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import actshard
from conftest import GOLDEN, saev_dump

pytestmark = pytest.mark.peers


@pytest.fixture
def store() -> actshard.Store:
    return actshard.open(saev_dump(GOLDEN / "saev/v21_cls_labels_multishard"))


@pytest.fixture
def flat(store: actshard.Store) -> np.ndarray:
    return np.concatenate(store.sequences(range(len(store)), store.layers[0]))


def test_scikit_learn_takes_rows(store: actshard.Store, flat: np.ndarray) -> None:
    sklearn: Any = pytest.importorskip("sklearn")
    from sklearn.decomposition import IncrementalPCA

    rows = store.layer(store.layers[0]).rows()
    assert np.array_equal(sklearn.utils.check_array(rows, ensure_all_finite=False), flat, equal_nan=True)
    clean = np.flatnonzero(np.isfinite(flat).all(axis=1))
    ours, theirs = IncrementalPCA(2), IncrementalPCA(2)
    for i in range(0, len(clean), 16):
        if len(clean[i : i + 16]) >= 2:
            ours.partial_fit(rows[clean[i : i + 16]])
            theirs.partial_fit(flat[clean[i : i + 16]])
    assert np.array_equal(ours.components_, theirs.components_)


def test_dask_reads_chunks_of_rows(store: actshard.Store, flat: np.ndarray) -> None:
    dask: Any = pytest.importorskip("dask.array")
    rows = store.layer(store.layers[0]).rows()
    lazy = dask.from_array(rows, chunks=(7, -1))
    assert (lazy.shape, lazy.dtype) == (flat.shape, flat.dtype)
    assert np.array_equal(lazy.compute(), flat, equal_nan=True)
    assert np.array_equal(lazy[5:9].compute(), flat[5:9], equal_nan=True)
