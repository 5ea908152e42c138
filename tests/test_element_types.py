"""Every spelling of every element type in every container: the dtype, or a refusal that names the type."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import actshard
from actshard.base.errors import ActshardError, DtypeError, FormatError, UnsupportedError
from actshard.base.location import Location

FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
FLOATS += ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
NAMED = (*FLOATS, *INTEGERS, "complex64")
UNREAD = (
    "float8_e3m4",
    "float8_e4m3b11fnuz",
    "float8_e4m3",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
    "int4",
    "uint4",
)
UNREAD += ("int2", "uint2", "complex128", "float128")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or getattr(np, name))


CODES = {dtype_of(name).str: name for name in NAMED if dtype_of(name).kind not in "V"} | {"<f1": "float8_e5m2"}
"""Codes of numpy, as in .npy files, pickles and Zarr 2."""
SWAPPED = {f">{code[1:]}": name for code, name in CODES.items() if code[0] == "<" and dtype_of(name).itemsize > 1}
SPELLINGS = {name: name for name in NAMED} | CODES | SWAPPED
RAW = np.arange(1, 25, dtype=np.uint8).repeat(8)
"""Bytes of three rows of eight elements."""


def elements(name: str) -> np.ndarray:
    dtype = dtype_of(name)
    raw = RAW % 2 if name == "bool" else RAW
    return raw[: 24 * dtype.itemsize].view(dtype).reshape(3, 8)


def stored_bytes(spelling: str, name: str) -> bytes:
    array = elements(name)
    if not spelling.startswith(">"):
        return array.tobytes()
    part = array.view(np.float32) if name == "complex64" else array
    return part.byteswap().tobytes()


def npy(descr: str, data: bytes) -> bytes:
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': (3, 8), }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


def described(file: str, tensor: str = "", dtype: str | None = None) -> dict[str, Any]:
    table: dict[str, Any] = {"files": file, "axes": ["row", "dim"]}
    table |= {"tensor": tensor} if tensor else {}
    table |= {"dtype": dtype} if dtype else {}
    return {"version": 1, "activations": table}


def rows_of(store: actshard.Store) -> np.ndarray:
    return store.gather(store.layers[0], np.arange(3), 0)


def check(store: actshard.Store, name: str) -> None:
    assert store.dtype == dtype_of(name)
    assert rows_of(store).tobytes() == elements(name).tobytes()
    assert ("integer-rows" in {warning.code for warning in store.warnings}) == (name in ("int16", "uint16"))


pytestmark = pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")

Put = Callable[[Path, str, str], dict[str, Any]]


def put_npy(folder: Path, spelling: str, name: str) -> dict[str, Any]:
    (folder / "a.npy").write_bytes(npy(spelling, stored_bytes(spelling, name)))
    return described("a.npy")


def put_npz(folder: Path, spelling: str, name: str) -> dict[str, Any]:
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("h.npy", npy(spelling, stored_bytes(spelling, name)))
    return described("a.npz", "h")


@pytest.mark.parametrize("put", [put_npy, put_npz])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_in_npy_and_npz_is_read(put: Put, spelling: str, tmp_path: Path) -> None:
    name = SPELLINGS[spelling]
    check(actshard.open(tmp_path, layout=put(tmp_path, spelling, name)), name)


@pytest.mark.parametrize("code", ["<V1", "|V1", "<V2", "|V2", ">V2"])
def test_bits_without_a_type_in_npy_are_read_only_as_a_named_type(code: str, tmp_path: Path) -> None:
    name = "bfloat16" if code.endswith("2") else "float8_e4m3fn"
    (tmp_path / "a.npy").write_bytes(npy(code, stored_bytes(code, name)))
    with pytest.raises(FormatError, match=f"expected 'dtype', such as {name}"):
        actshard.open(tmp_path, layout=described("a.npy"))
    check(actshard.open(tmp_path, layout=described("a.npy", dtype=name)), name)


@pytest.mark.parametrize("spelling", [*UNREAD, "<f16", "<c16", "<W4", "<M8[s]", "|O", "|V4"])
def test_other_types_in_npy_are_refused_by_name(spelling: str, tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy(spelling, bytes(24 * 16)))
    with pytest.raises(UnsupportedError) as caught:
        actshard.open(tmp_path, layout=described("a.npy"))
    assert spelling in str(caught.value)
    assert "another dtype" not in str(caught.value)
    (finding,) = actshard.verify(tmp_path, layout=described("a.npy")).findings
    assert finding.code == "unsupported"


def put_safetensors(folder: Path, spelling: str) -> dict[str, Any]:
    size = {"F4": 12, "F6_E2M3": 18, "F6_E3M2": 18}.get(spelling, 24 * 8)
    data = RAW.tobytes()[:size]
    header = json.dumps({"h": {"dtype": spelling, "shape": [3, 8], "data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    return described("a.safetensors", "h")


@pytest.mark.parametrize("name", NAMED)
def test_each_type_of_safetensors_is_read(name: str, tmp_path: Path) -> None:
    from actshard.base._arguments import name_of

    data = elements(name).tobytes()
    header = json.dumps(
        {"h": {"dtype": name_of(dtype_of(name)), "shape": [3, 8], "data_offsets": [0, len(data)]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    check(actshard.open(tmp_path, layout=described("a.safetensors", "h")), name)


@pytest.mark.parametrize("spelling", ["F4", "F6_E2M3", "F6_E3M2"])
def test_types_of_less_than_a_byte_in_safetensors_are_refused_by_name(spelling: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"h: elements of {spelling} are smaller than a byte"):
        actshard.open(tmp_path, layout=put_safetensors(tmp_path, spelling))


def zarr_meta(version: int, spelling: str) -> tuple[str, dict[str, Any]]:
    if version == 2:
        fields = {"chunks": [3, 1, 1, 8], "compressor": None, "filters": None, "order": "C", "dtype": spelling}
        return ".zarray", {"zarr_format": 2, "shape": [3, 1, 1, 8], "fill_value": 0, **fields}
    return "zarr.json", {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [3, 1, 1, 8],
        "data_type": spelling,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 1, 1, 8]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": False if spelling == "bool" else [0, 0] if spelling.startswith("complex") else 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }


def put_zarr(folder: Path, version: int, spelling: str, data: bytes) -> Path:
    array = folder / "arrays/activations"
    array.mkdir(parents=True)
    name, meta = zarr_meta(version, spelling)
    (array / name).write_text(json.dumps(meta))
    for group in (folder, folder / "arrays"):
        text = {"zarr_format": version} | ({"node_type": "group"} if version == 3 else {})
        (group / (".zgroup" if version == 2 else "zarr.json")).write_text(json.dumps(text))
    chunk = array / ("0.0.0.0" if version == 2 else "c/0/0/0/0")
    chunk.parent.mkdir(parents=True, exist_ok=True)
    chunk.write_bytes(data)
    return folder


ZARR = [(2, s, n) for s, n in (CODES | SWAPPED | {n: n for n in ("bfloat16", "float8_e4m3fn")}).items()]
ZARR += [(3, name, name) for name in NAMED]
ROWS = {*FLOATS, *INTEGERS} - {"bool"}


@pytest.mark.parametrize(("version", "spelling", "name"), [entry for entry in ZARR if entry[2] in ROWS])
def test_each_spelling_in_zarr_is_read(version: int, spelling: str, name: str, tmp_path: Path) -> None:
    path = put_zarr(tmp_path / "d", version, spelling, stored_bytes(spelling, name))
    check(actshard.open(path), name)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("spelling", UNREAD)
def test_other_types_in_zarr_are_refused_by_name(version: int, spelling: str, tmp_path: Path) -> None:
    path = put_zarr(tmp_path / "d", version, spelling, bytes(24 * 16))
    with pytest.raises(UnsupportedError, match=f"are not read, found.*{spelling}"):
        actshard.open(path)


@pytest.mark.parametrize("code", ["<V2", "|V2", "|V1"])
def test_bits_without_a_type_in_zarr_2_are_refused_with_the_way_to_name_it(code: str, tmp_path: Path) -> None:
    path = put_zarr(tmp_path / "d", 2, code, bytes(48))
    with pytest.raises(UnsupportedError, match="write the name of the type"):
        actshard.open(path)


@pytest.mark.parametrize("spelling", [*(name for name in NAMED if name not in ("bool",)), *CODES])
def test_arrays_in_pickles_have_their_types(spelling: str) -> None:
    from actshard._native import load_pickle

    name = SPELLINGS[spelling]
    for protocol in range(6):
        found = load_pickle(pickle.dumps(elements(name), protocol))
        assert found.dtype == dtype_of(name)
        assert found.tobytes() == elements(name).tobytes()


@pytest.mark.parametrize("name", [name for name in UNREAD if name != "float128"])
def test_other_types_in_pickles_are_refused_by_name(name: str) -> None:
    from actshard._native import load_pickle

    with pytest.raises(ActshardError, match=r"ml_dtypes|c16"):
        load_pickle(pickle.dumps(np.zeros(3, dtype_of(name)), 4))


TORCH = {"double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32", "short": "int16"}
TORCH |= {name: name for name in NAMED if name != "complex64"}


def put_torch(folder: Path, dtype: str, data: bytes) -> dict[str, Any]:
    text = f"c{'torch._utils'}\n_rebuild_tensor_v3\n".encode()
    text += b"((X\x07\x00\x00\x00storagectorch.storage\nUntypedStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    text += (
        b"M" + struct.pack("<H", len(data)) + b"tQK\x00K\x03K\x08\x86K\x08K\x01\x86\x89ccollections\nOrderedDict\n)R"
    )
    text += f"ctorch\n{dtype}\ntR.".encode()
    with zipfile.ZipFile(folder / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + text)
        archive.writestr("a/data/0", data)
    return described("a.pt")


@pytest.mark.parametrize("spelling", TORCH)
def test_each_type_of_torch_is_read(spelling: str, tmp_path: Path) -> None:
    name = TORCH[spelling]
    check(actshard.open(tmp_path, layout=put_torch(tmp_path, spelling, elements(name).tobytes())), name)


@pytest.mark.parametrize("name", ["complex128", "qint8", "float4_e2m1fn_x2", "complex32"])
def test_other_types_of_torch_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ActshardError, match=name):
        actshard.open(tmp_path, layout=put_torch(tmp_path, name, bytes(96)))


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS])
def test_raw_files_have_the_described_type(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(elements(name).tobytes())
    layout = described("a.bin", dtype=name)
    layout["activations"]["shape"] = [3, 8]
    check(actshard.open(tmp_path, layout=layout), name)


ARROW = ("float16", "float32", "float64")


@pytest.mark.parametrize("name", ARROW)
@pytest.mark.parametrize("container", ["parquet", "arrow"])
def test_vectors_of_arrow_and_parquet_have_their_types(name: str, container: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.FixedSizeListArray.from_arrays(pa.array(elements(name).reshape(-1)), 8)
    table = pa.table({"hidden": column})
    if container == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
            stream.write_table(table)
        (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
        (tmp_path / "dataset_info.json").write_text("{}")
    check(actshard.open(tmp_path), name)


HDF5 = ("float16", "float32", "float64", *INTEGERS)


@pytest.mark.peers
@pytest.mark.parametrize("name", HDF5)
@pytest.mark.parametrize("order", "<>")
def test_datasets_of_hdf5_have_their_types(name: str, order: str, tmp_path: Path) -> None:
    h5py: Any = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["h"] = elements(name).astype(dtype_of(name).newbyteorder(order))
    check(actshard.open(tmp_path, layout=described("a.h5", "h")), name)


MATRIX: dict[str, set[str]] = {
    "`.npy`, `.npz`": set(SPELLINGS.values()),
    "pickle": set(SPELLINGS.values()),
    "torch": set(TORCH.values()),
    "safetensors": set(NAMED),
    "Zarr 2": {name for version, _, name in ZARR if version == 2} & ROWS,
    "Zarr 3": {name for version, _, name in ZARR if version == 3} & ROWS,
    "HDF5": set(HDF5),
    "raw": {*FLOATS, *INTEGERS},
    "Arrow, parquet": set(ARROW),
}
"""The types that the tests above read, by container."""


def test_the_matrix_of_the_docs_is_that_of_these_tests() -> None:
    page = (Path(__file__).parents[1] / "docs/formats/index.md").read_text()
    lines = page.partition("## Element types")[2].partition("\n## ")[0].splitlines()
    head, _, *rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("|")
    ]
    assert head == ["dtype", *MATRIX]
    documented = {container: set[str]() for container in MATRIX}
    for names, *cells in rows:
        assert len(cells) == len(MATRIX)
        for container, cell in zip(MATRIX, cells, strict=True):
            assert cell in ("yes", "-")
            documented[container] |= set(names.split(", ")) if cell == "yes" else set()
    assert documented == MATRIX


@pytest.mark.parametrize("name", ["uint16", "int16", "int8", "uint8", "int32"])
@pytest.mark.parametrize("format", ["safetensors", "saev", "lmprobe"])
def test_advice_never_casts_integers(name: str, format: str, tmp_path: Path) -> None:
    path = put_zarr(tmp_path / "d", 2, dtype_of(name).str, elements(name).tobytes())
    with pytest.raises(ActshardError) as caught:
        actshard.convert(path, tmp_path / "out", format)
    assert isinstance(caught.value, DtypeError)
    assert "pass dtype=" not in str(caught.value)
    assert "ml_dtypes.bfloat16" in str(caught.value)


def test_verify_tells_that_rows_may_be_bits(tmp_path: Path) -> None:
    path = put_zarr(tmp_path / "d", 2, "<u2", elements("uint16").tobytes())
    report = actshard.verify(Location.at(path).place)
    assert "integer-rows" in report.codes()
    assert io.StringIO(str(report.findings)).read().count("bfloat16") > 0
