"""Layers as arrays in scikit-learn, dask, xarray, faiss, torch and JAX; tables in polars and pandas."""

from __future__ import annotations

import contextlib
import warnings
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


def test_xarray_faiss_and_tables_take_what_a_store_gives(store: actshard.Store, flat: np.ndarray) -> None:
    xarray: Any = pytest.importorskip("xarray")
    faiss: Any = pytest.importorskip("faiss")
    polars: Any = pytest.importorskip("polars")
    pytest.importorskip("pandas")
    acts = store.layer(store.layers[0])
    named = xarray.DataArray(np.asarray(acts), dims=("example", "token", "element"))
    assert np.array_equal(named.isel(token=1).values, flat.reshape(acts.shape)[:, 1], equal_nan=True)
    rows, clean = acts.rows(), np.flatnonzero(np.isfinite(flat).all(axis=1))
    index = faiss.IndexFlatL2(store.d_model)
    index.add(rows[clean])
    distances, found = index.search(rows[clean[5:8]], 1)
    assert np.array_equal(flat[clean[found[:, 0]]], flat[clean[5:8]])
    assert not distances.any()
    assert polars.from_arrow(store.table).rows() == [tuple(row.values()) for row in store.table.to_pylist()]
    assert store.table.to_pandas().to_dict("list") == store.table.to_pydict()


def test_views_and_copies_go_on_without_a_copy_where_the_library_allows_it(tmp_path: Any) -> None:
    torch: Any = pytest.importorskip("torch")
    jax: Any = pytest.importorskip("jax")
    with actshard.create(tmp_path / "saev", "saev", layers=[0], d_model=16) as writer:
        writer.append(np.random.default_rng(0).random((8, 1, 4, 16), np.float32))
    acts = actshard.open(tmp_path / "saev", io="mmap").layer(0)
    view, copy = acts[2], acts[[1, 5], -1]
    for x in (view, copy):
        assert np.shares_memory(np.from_dlpack(x), x)
        with pytest.warns(UserWarning, match="not writable") if x is view else warnings.catch_warnings():
            tensor = torch.from_numpy(x)
        assert tensor.data_ptr() == x.ctypes.data
        moved = jax.device_put(x)
        assert np.array_equal(np.asarray(moved), x)
        if x.ctypes.data % 64 == 0:
            assert moved.unsafe_buffer_pointer() == x.ctypes.data
    with contextlib.suppress(BufferError):  # older versions of torch ask for a DLPack without read-only arrays
        assert torch.from_dlpack(view).data_ptr() == view.ctypes.data
    with pytest.raises(BufferError, match="readonly"):
        jax.dlpack.from_dlpack(view)
    assert torch.from_dlpack(copy).data_ptr() == copy.ctypes.data
    assert np.array_equal(np.asarray(jax.dlpack.from_dlpack(copy)), copy)
