"""HDF5 files of described folders, beside h5py: contiguous datasets are read in place, all others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from conftest import bits, refuses

pytestmark = pytest.mark.peers
h5py: Any = pytest.importorskip("h5py")

LAYOUT: dict[str, Any] = {
    "version": 1,
    "activations": {"files": "acts.h5", "tensor": ["model", "layer_{layer}"], "axes": ["example", "token", "dim"]},
    "lengths": {"tensor": "lengths"},
    "tokens": {"tensor": "ids"},
}
LENGTHS = np.array([3, 5, 0, 2])
VALUES = np.random.default_rng(0).standard_normal((2, 4, 5, 6))


def written(folder: Path, dtype: str, **options: Any) -> Path:
    with h5py.File(folder / "acts.h5", "w", **options) as file:
        group = file.create_group("model")
        for layer in (2, 11):
            group.create_dataset(f"layer_{layer}", data=VALUES[int(layer > 2)].astype(dtype))
        file["lengths"] = LENGTHS
        file["ids"] = np.arange(20, dtype=np.int32).reshape(4, 5)
    return folder


@pytest.mark.parametrize("options", [{}, {"userblock_size": 512}, {"libver": "latest"}], ids=str)
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", ">f4"])
def test_contiguous_datasets_come_back(dtype: str, options: dict[str, Any], io: str, tmp_path: Path) -> None:
    store = actshard.open(written(tmp_path, dtype, **options), layout=LAYOUT, io=io)
    assert (store.layers, store.dtype) == ((2, 11), np.dtype(dtype).newbyteorder("="))
    assert store.token_counts.tolist() == LENGTHS.tolist()
    for layer in store.layers:
        with h5py.File(tmp_path / "acts.h5") as file:
            want = file["model"][f"layer_{layer}"][:].astype(store.dtype)
        for i, n in enumerate(LENGTHS):
            assert np.array_equal(bits(store.sequence(i, layer)), bits(want[i, :n]))
        rows = np.concatenate([batch.activations for batch in store.stream(layer, 3)])
        assert np.array_equal(bits(rows), bits(np.concatenate([want[i, :n] for i, n in enumerate(LENGTHS)])))
    assert store.table["token_ids"].to_pylist() == [[0, 1, 2], [5, 6, 7, 8, 9], [], [15, 16]]
    assert actshard.verify(tmp_path, layout=LAYOUT, deep=True).ok


def test_bfloat16_stored_as_integers_comes_back(tmp_path: Path) -> None:
    raw = np.arange(24, dtype=np.uint16).reshape(4, 6) + 0x3F80
    with h5py.File(tmp_path / "acts.h5", "w") as file:
        file["data"] = raw
    layout = {
        "version": 1,
        "activations": {"files": "acts.h5", "tensor": "data", "axes": ["row", "dim"], "dtype": "bfloat16"},
    }
    store = actshard.open(tmp_path, layout=layout)
    assert str(store.dtype) == "bfloat16"
    assert np.array_equal(bits(store.gather(0, np.arange(4), 0)), raw)


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "chunked": {"data": np.ones((4, 6), np.float32), "chunks": (2, 6)},
    "compressed": {"data": np.ones((4, 6), np.float32), "compression": "gzip"},
    "without data": {"shape": (4, 6), "dtype": "f4"},
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_other_datasets_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "acts.h5", "w") as file:
        file.create_dataset("data", **UNSUPPORTED[kind])
    layout = {"version": 1, "activations": {"files": "acts.h5", "tensor": "data", "axes": ["row", "dim"]}}
    with refuses(actshard.UnsupportedError, tmp_path / "acts.h5", "data: a chunked or empty dataset"):
        actshard.open(tmp_path, layout=layout)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "acts.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(40))
    with refuses(actshard.FormatError, tmp_path / "acts.h5", "expected an HDF5 file"):
        actshard.open(tmp_path, layout=LAYOUT)
    assert not actshard.verify(tmp_path, layout=LAYOUT).ok


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "<f4") / "acts.h5"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(actshard.ActshardError) as caught:
        actshard.open(tmp_path, layout=LAYOUT).gather(11, [0, 1, 3], -1)
    assert str(path) in str(caught.value)


def test_a_wrong_name_lists_what_there_is(tmp_path: Path) -> None:
    written(tmp_path, "<f4")
    layout = LAYOUT | {"activations": LAYOUT["activations"] | {"tensor": ["model", "x"]}, "tokens": {"tensor": "ids"}}
    with refuses(actshard.FormatError, tmp_path / "acts.h5", "expected a dataset 'model/x', found"):
        actshard.open(tmp_path, layout=layout)
