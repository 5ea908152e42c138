"""Every container ends where its file ends: bytes behind the end are an error with their offset, when opened and in ``verify``."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.errors import ActshardError
from actshard.formats.torch_zip import torch_bytes

ROWS = np.arange(24, dtype=np.float32).reshape(3, 8)
REST = {"one byte": b"\x00", "zeros": bytes(64), "text": b"appended\n"}


def described(files: str, tensor: str = "") -> dict[str, Any]:
    return {
        "version": 1,
        "activations": {"files": files, "axes": ["row", "dim"]} | ({"tensor": tensor} if tensor else {}),
    }


def npy(folder: Path) -> tuple[Path, Any]:
    np.save(folder / "a.npy", ROWS)
    return folder / "a.npy", described("a.npy")


def safetensors(folder: Path) -> tuple[Path, Any]:
    header = json.dumps({"h": {"dtype": "F32", "shape": [3, 8], "data_offsets": [0, ROWS.nbytes]}}).encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + ROWS.tobytes())
    return folder / "a.safetensors", described("a.safetensors", "h")


def torch(folder: Path) -> tuple[Path, Any]:
    (folder / "a.pt").write_bytes(torch_bytes(ROWS))
    return folder / "a.pt", described("a.pt")


def npz(folder: Path) -> tuple[Path, Any]:
    np.savez(folder / "a.npz", h=ROWS)
    return folder / "a.npz", described("a.npz", "h")


def raw(folder: Path) -> tuple[Path, Any]:
    (folder / "a.bin").write_bytes(ROWS.tobytes())
    layout = described("a.bin")
    layout["activations"] |= {"dtype": "float32", "shape": [3, 8]}
    return folder / "a.bin", layout


def arrow(folder: Path) -> tuple[Path, Any]:
    import pyarrow as pa

    table = pa.table({"hidden": pa.FixedSizeListArray.from_arrays(pa.array(ROWS.reshape(-1)), 8)})
    with pa.ipc.new_stream(folder / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    (folder / "dataset_info.json").write_text("{}")
    return folder / "a.arrow", None


def parquet(folder: Path) -> tuple[Path, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"hidden": pa.FixedSizeListArray.from_arrays(pa.array(ROWS.reshape(-1)), 8)})
    pq.write_table(table, folder / "a.parquet")
    return folder / "a.parquet", None


def shard(folder: Path, suffix: str, write: Callable[[bytes], bytes]) -> tuple[Path, Any]:
    with actshard.create(folder, "pickle", layers=[0], d_model=8) as writer:
        writer.append(ROWS.reshape(3, 1, 1, 8))
    (path,) = folder.glob("shard_*")
    data = path.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    path.unlink()
    path = folder / f"shard_0000{suffix}"
    path.write_bytes(write(data))
    meta = json.loads((folder / "metadata.json").read_text())
    for entry in meta["shards"]:
        entry |= {"filename": path.name, "compressed": suffix.endswith("gz")}
        for key in ("checksum", "size_bytes"):
            entry.pop(key, None)
    (folder / "metadata.json").write_text(json.dumps(meta))
    return path, None


def pickled(folder: Path) -> tuple[Path, Any]:
    return shard(folder, ".pkl", lambda data: data)


def pickled_gz(folder: Path) -> tuple[Path, Any]:
    return shard(folder, ".pkl.gz", gzip.compress)


def hdf5(folder: Path) -> tuple[Path, Any]:
    h5py: Any = pytest.importorskip("h5py")
    with h5py.File(folder / "a.h5", "w") as file:
        file["h"] = ROWS
    return folder / "a.h5", described("a.h5", "h")


def hdf5_latest(folder: Path) -> tuple[Path, Any]:
    h5py: Any = pytest.importorskip("h5py")
    with h5py.File(folder / "a.h5", "w", libver="latest", userblock_size=512) as file:
        file["h"] = ROWS
    return folder / "a.h5", described("a.h5", "h")


CONTAINERS = [npy, npz, safetensors, torch, raw, arrow, parquet, pickled, pickled_gz]
CONTAINERS += [pytest.param(make, marks=pytest.mark.peers) for make in (hdf5, hdf5_latest)]


@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
@pytest.mark.parametrize("rest", REST)
@pytest.mark.parametrize("make", CONTAINERS)
def test_bytes_after_the_end_are_an_error_with_their_offset(
    make: Callable[[Path], tuple[Path, Any]], rest: str, tmp_path: Path
) -> None:
    path, layout = make(tmp_path)
    if make is pickled_gz and not REST[rest].strip(b"\0"):
        pytest.skip("gzip files may be padded with zeros")
    assert actshard.verify(tmp_path, layout=layout, deep=True).ok
    end = path.stat().st_size
    with path.open("ab") as file:
        file.write(REST[rest])
    with pytest.raises(ActshardError) as caught:
        actshard.open(tmp_path, layout=layout)
    if make in (npy, arrow, hdf5, hdf5_latest, pickled):
        assert caught.value.offset == end
        assert f"{len(REST[rest])} more bytes" in str(caught.value)
    assert not actshard.verify(tmp_path, layout=layout).ok


@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
@pytest.mark.parametrize("make", [npy, torch, arrow, pickled, pickled_gz, safetensors, npz])
def test_a_second_object_in_a_file_is_no_part_of_the_first(
    make: Callable[[Path], tuple[Path, Any]], tmp_path: Path
) -> None:
    path, layout = make(tmp_path)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ActshardError):
        actshard.open(tmp_path, layout=layout)
    assert not actshard.verify(tmp_path, layout=layout).ok


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_of_npz_ends_where_its_array_ends(method: int, tmp_path: Path) -> None:
    path, _ = npy(tmp_path)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.writestr("h.npy", path.read_bytes() * 2)
    with pytest.raises(ActshardError, match=r"'h': expected the end of the array, found 224 more bytes"):
        actshard.open(tmp_path, layout=described("a.npz", "h"))


def test_several_dumps_of_pickle_are_refused_with_advice(tmp_path: Path) -> None:
    from actshard._native import load_pickle

    with pytest.raises(ActshardError, match="dump all samples as one object"):
        load_pickle(pickle.dumps([1], 4) + pickle.dumps([2], 4))
