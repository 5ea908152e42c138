"""HDF5 files of described folders, compared with h5py: contiguous datasets are read in place, chunks are decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.formats import registry
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


def test_groups_of_several_datasets_are_one_group_each(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "acts.h5", "w") as file:
        for layer in (0, 1):
            file[f"layer_{layer}/inputs"] = VALUES[layer, :, 0]
            file[f"layer_{layer}/targets"] = VALUES[layer, :, 1]
    activations = {"files": "acts.h5", "tensor": ["layer_{layer}", "inputs"], "axes": ["example", "dim"]}
    store = actshard.open(tmp_path, layout={"version": 1, "activations": activations})
    assert [np.array_equal(store.layer(layer).rows(), VALUES[layer, :, 0]) for layer in (0, 1)] == [True, True]
    draft = registry.get("layout_toml").guess(tmp_path).text
    assert 'tensor = ["layer_{layer}", "targets"]' in draft or 'tensor = ["layer_{layer}", "inputs"]' in draft
    assert actshard.open(tmp_path, layout=draft).layers == (0, 1)


def test_the_number_of_an_extension_is_no_layer(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "acts.h5", "w") as file:
        file["hidden"] = VALUES[0]
    proposal = registry.get("layout_toml").guess(tmp_path)
    assert "layers = [0]" in proposal.text
    assert any("do not contain the layer's number" in reason for reason in proposal.unsure)


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


CHUNKS: dict[str, dict[str, Any]] = {
    "chunks": {"chunks": (3, 2, 4)},
    "one chunk": {"chunks": (4, 5, 6)},
    "chunks of an element": {"chunks": (1, 1, 1)},
    "chunks larger than the array": {"chunks": (8, 8, 8), "maxshape": (None, None, None)},
    "gzip": {"chunks": (3, 2, 4), "compression": "gzip"},
    "shuffle": {"chunks": (3, 2, 4), "shuffle": True},
    "gzip and shuffle": {"chunks": (2, 5, 6), "compression": "gzip", "shuffle": True},
    "checksum": {"chunks": (2, 5, 6), "fletcher32": True},
    "all filters": {"chunks": (2, 3, 5), "compression": 9, "shuffle": True, "fletcher32": True},
}


@pytest.mark.parametrize("options", [{}, {"userblock_size": 1024}, {"libver": "latest"}], ids=str)
@pytest.mark.parametrize("dtype", ["<f4", "<f2", ">f8"])
@pytest.mark.parametrize("kind", CHUNKS)
def test_chunks_are_read_as_h5py_reads_them(
    kind: str, dtype: str, options: dict[str, Any], io: str, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "acts.h5", "w", **options) as file:
        for layer in (2, 11):
            file.create_dataset(f"model/layer_{layer}", data=VALUES[int(layer > 2)].astype(dtype), **CHUNKS[kind])
        file.create_dataset("lengths", data=LENGTHS, chunks=(3,), compression="gzip")
        file["ids"] = np.arange(20, dtype=np.int32).reshape(4, 5)
    store = actshard.open(tmp_path, layout=LAYOUT, io=io)
    for layer in (2, 11):
        want = VALUES[int(layer > 2)].astype(store.dtype)
        for i, n in enumerate(LENGTHS):
            assert np.array_equal(bits(store.sequence(i, layer)), bits(want[i, :n]))
    assert actshard.verify(tmp_path, layout=LAYOUT, deep=True).ok


def test_chunks_that_were_never_written_are_zeros_or_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "acts.h5", "w") as file:
        for name, fill in (("zeros", 0.0), ("ones", 1.0)):
            data = file.create_dataset(name, (4, 6), "f4", chunks=(2, 6), fillvalue=fill)
            data[2:] = VALUES[0, 0, :2]
    layout = {"version": 1, "activations": {"files": "acts.h5", "tensor": "zeros", "axes": ["row", "dim"]}}
    rows = actshard.open(tmp_path, layout=layout).gather(0, np.arange(4), 0)
    assert np.array_equal(rows, np.concatenate([np.zeros((2, 6)), VALUES[0, 0, :2]]).astype(np.float32))
    layout["activations"]["tensor"] = "ones"  # type: ignore[index]  # a dict
    with refuses(actshard.UnsupportedError, tmp_path / "acts.h5", "ones: 1 of 2 chunks were never written"):
        actshard.open(tmp_path, layout=layout)


def test_damaged_chunks_are_refused_at_their_offset(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "acts.h5", "w") as file:
        data = file.create_dataset("data", data=VALUES[0, 0], chunks=(5, 6), compression="gzip")
        chunk = data.id.get_chunk_info(0)
    raw = bytearray((tmp_path / "acts.h5").read_bytes())
    raw[chunk.byte_offset + 8 : chunk.byte_offset + 40] = bytes(32)
    (tmp_path / "acts.h5").write_bytes(raw)
    layout = {"version": 1, "activations": {"files": "acts.h5", "tensor": "data", "axes": ["row", "dim"]}}
    store = actshard.open(tmp_path, layout=layout)
    with pytest.raises(actshard.ActshardError):
        store.gather(0, np.arange(5), 0)
    assert not actshard.verify(tmp_path, layout=layout, deep=True).ok


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "another compression": (
        {"data": np.ones((4, 6), np.float32), "compression": "lzf"},
        "data: chunks with the filter",
    ),
    "without data": ({"shape": (4, 6), "dtype": "f4"}, "data: an empty or external dataset"),
    "texts": ({"data": np.array([b"a", b"b"])}, "data: unsupported dtype"),
    "records": ({"data": np.zeros(3, [("a", "<f4")])}, "data: unsupported dtype"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_other_datasets_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    options, text = UNSUPPORTED[kind]
    with h5py.File(tmp_path / "acts.h5", "w") as file:
        file.create_dataset("data", **options)
    layout = {"version": 1, "activations": {"files": "acts.h5", "tensor": "data", "axes": ["row", "dim"]}}
    with refuses(actshard.UnsupportedError, tmp_path / "acts.h5", text):
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
