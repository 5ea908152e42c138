"""Parquet files with vectors: golden data read bit for bit, one decoding per row group, nulls, hostile and broken files."""

from __future__ import annotations

import json
import mmap
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import actshard
from actshard.base.location import Location
from actshard.formats.parquet_vectors import files as rooms
from conftest import GOLDEN, bits, refuses

FOLDERS = sorted(
    {p.parent for p in (GOLDEN / "hf_arrow").glob("*/*.parquet")} | {GOLDEN / "hf_arrow/hub_parquet_array2d_f32"}
)
NLA = GOLDEN / "hf_arrow/nla_base_merged_f32"


def written(path: Path, rows: Any, of: pa.DataType, group: int = 4, **columns: Any) -> Path:
    pq.write_table(pa.table({"vector": pa.array(rows, of), **columns}), path, row_group_size=group)
    return path


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_golden_files_come_back(folder: Path, io: str) -> None:
    z = np.load(folder / "expected.npz")
    store = actshard.open(folder, io=io)
    assert (store.format, store.warnings) == ("parquet_vectors", ())
    assert store.token_counts.tolist() == z["lengths"].tolist()
    keys = [key for key in z if re.fullmatch(r"layer_\d+", key)]
    for layer in store.layers:
        named = re.findall(r"\d+", str(layer))
        key = f"layer_{named[0]}" if named else keys[0]
        want = z[f"{key}_bits"] if f"{key}_bits" in z else bits(z[key])
        ends = np.cumsum(z["lengths"])
        assert np.array_equal(bits(np.concatenate([store.sequence(i, layer) for i in range(len(store))])), want)
        assert np.array_equal(bits(store.last_tokens(layer)), want[ends - 1])
        for shuffle in (None, "window", "exact"):
            got = bits(np.concatenate([b.activations for b in store.stream(layer, 3, shuffle=shuffle)]))
            assert np.array_equal(
                got if shuffle is None else np.sort(got, axis=0), want if shuffle is None else np.sort(want, axis=0)
            )
    expected = json.loads((folder / "expected.json").read_text())
    for name, values in expected.get("columns", {}).items():
        assert store.table[name].to_pylist() == values
    for name in ("doc_id", "response"):
        if name in expected:
            assert store.table[name].to_pylist() == expected[name]
    if "n_raw_tokens" in z:
        assert store.table["n_raw_tokens"].to_pylist() == z["n_raw_tokens"].tolist()
    assert actshard.verify(folder, deep=True).findings == []


def test_a_row_group_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By random rows, and by a stream that reads windows: each row group once."""
    values = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    path = written(tmp_path / "a.parquet", values.tolist(), pa.list_(pa.float32(), 3), group=8)
    decoded: list[int] = []
    original = rooms.ParquetFile.decode

    def counted(self: rooms.ParquetFile, group: int, *rest: Any) -> Any:
        decoded.append(group)
        return original(self, group, *rest)

    monkeypatch.setattr(rooms.ParquetFile, "decode", counted)
    store = actshard.open(path)
    picks = np.random.default_rng(1).integers(0, 40, 200)
    assert np.array_equal(store.gather("vector", picks, 0), values[picks])
    assert np.array_equal(store.gather("vector", picks[::-1], 0), values[picks[::-1]])
    assert sorted(decoded) == [0, 1, 2, 3, 4]
    decoded.clear()
    rows = np.concatenate([batch.activations for batch in actshard.open(path).stream("vector", 8, shuffle="window")])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, values.tolist()))
    assert sorted(decoded) == [0, 1, 2, 3, 4]


KINDS = {
    "list of lists": lambda t: pa.list_(pa.list_(t)),
    "large list of fixed lists": lambda t: pa.large_list(pa.list_(t, 4)),
    "fixed lists": lambda t: pa.list_(pa.list_(t, 4), 3),
    "vectors": pa.list_,
    "large vectors": pa.large_list,
    "fixed vectors": lambda t: pa.list_(t, 4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_kind_of_list_comes_back(kind: str, dtype: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    vectors = "vectors" in kind
    lengths = [1] * 9 if vectors else [3] * 9 if kind.startswith("fixed") else [2, 0, 5, 1, 3, 0, 4, 1, 2]
    values = [rng.standard_normal((n, 4)).astype(dtype) for n in lengths]
    rows = [v[0].tolist() if vectors else v.tolist() for v in values]
    path = written(tmp_path / "a.parquet", rows, KINDS[kind](getattr(pa, dtype)()), group=2, n=list(range(9)))
    store = actshard.open(path)
    assert (store.layers, store.d_model, store.dtype) == (("vector",), 4, np.dtype(dtype))
    assert store.token_counts.tolist() == lengths
    for i, want in enumerate(values):
        assert np.array_equal(bits(store.sequence(i, "vector")), bits(want))
    assert store.table.to_pydict() == {"n": list(range(9))}


@pytest.mark.parametrize("first", [(1 << 31) - 6, (1 << 31) + 7, (1 << 32) - 6, (1 << 32) + 7])
def test_offsets_beyond_32_bits_are_not_wrapped(first: int, tmp_path: Path) -> None:
    """A large_list whose vectors begin past element 2^31 or 2^32 of its values, which are a sparse file of up to 8 GiB."""
    width, rows = 5, 6
    size = (first + rows * width) * 2
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    flat = np.frombuffer(memory, np.float16)
    want = np.arange(rows * width, dtype=np.float16).reshape(rows, width)
    flat[first:] = want.reshape(-1)
    values = pa.Array.from_buffers(pa.float16(), len(flat), [None, pa.py_buffer(memory)])
    offsets = pa.array(first + width * np.arange(rows + 1, dtype=np.int64))
    chunk = pa.LargeListArray.from_arrays(offsets, values)
    column = rooms.VectorColumn("vector", "v.list.element", 0, 1, "halffloat", width, 1)
    made = np.empty((rows, 1, width), np.float16)
    rooms.fill(made, np.ones(rows, np.int64), chunk, column, 0, Location.at("/x"))
    assert np.array_equal(made[:, 0], want)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0, 2.0], None, [3.0, 4.0]], "row 1: column 'vector': expected vectors, found null"),
        ([[1.0, 2.0], [1.0, None], [3.0, 4.0]], "row 1: column 'vector': expected numbers, found null"),
    ],
)
def test_nulls_are_errors_with_their_row(rows: Any, message: str, tmp_path: Path) -> None:
    for of in (pa.list_(pa.float32()), pa.list_(pa.float32(), 2)):
        path = written(tmp_path / "a.parquet", [[9.0, 9.0], *rows], of, group=2)
        store = actshard.open(path)
        assert store.gather("vector", 0, 0).tolist() == [[9.0, 9.0]]
        with refuses(actshard.FormatError, path, message.replace("row 1", "row 2")):
            store.gather("vector", 3, 0)
        assert not actshard.verify(path).ok


def test_vectors_of_unequal_lengths_are_errors_with_their_row(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.parquet", [[1.0, 2.0], [3.0, 4.0], [5.0], [6.0, 7.0, 8.0]], pa.list_(pa.float32()), group=2
    )
    with refuses(actshard.FormatError, path, "row 2: column 'vector': expected vectors of 2 values, found 1"):
        actshard.open(path).gather("vector", 3, 0)


def test_splits_and_described_files_are_opened_one_by_one(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"):
        written(tmp_path / name, [[1.0, 2.0]], pa.list_(pa.float32()))
    with pytest.raises(actshard.UnknownFormatError, match=r"several splits \(test, train\)"):
        actshard.open(tmp_path)
    assert len(actshard.open(tmp_path / "test-00000-of-00001.parquet")) == 1
    with pytest.raises(actshard.UnknownFormatError, match=r"separate descriptions. Open one: base_0.parquet"):
        actshard.open(NLA / "parts")
    assert (
        len(actshard.open(NLA / "parts/base_0.parquet"))
        == json.loads((NLA / "expected.json").read_text())["rows_of_base_0"]
    )


def test_the_description_is_compared_with_the_file(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(NLA, tmp_path / "d", ignore=shutil.ignore_patterns("parts")))
    beside = folder / "base.parquet.nla_meta.yaml"
    text = beside.read_text()
    beside.write_text(re.sub(r"row_count: \d+", "row_count: 99", re.sub(r"d_model: \d+", "d_model: 7", text)))
    assert actshard.verify(folder).codes() == {"count-claim", "claim"}
    beside.write_text("a: [")
    with refuses(actshard.FormatError, beside, "expected YAML"):
        actshard.open(folder)


DETECTED = {
    "activations": pa.list_(pa.float32()),
    "Hidden_3": pa.list_(pa.float64()),
    "blocks.3.hook_resid_pre": pa.large_list(pa.float32()),
    "text_embedding": pa.list_(pa.float32()),
    "x": pa.list_(pa.float32(), 2),
    "y": pa.list_(pa.list_(pa.float32())),
}


@pytest.mark.parametrize("name", DETECTED)
def test_vectors_are_detected_by_type_or_name(name: str, tmp_path: Path) -> None:
    rows: Any = [[1.0, 2.0], [3.0, 4.0]]
    values = pa.array([rows, rows] if name == "y" else rows, DETECTED[name])
    scores = pa.array([[0.5] * 9] * 2, pa.list_(pa.float64()))
    pq.write_table(pa.table({"scores": scores, name: values}), tmp_path / "a.parquet")
    store = actshard.open(tmp_path)
    assert (store.layers, store.d_model, store.table.column_names) == ((name,), 2, ["scores"])


def test_lists_of_floats_without_a_sign_of_vectors_need_a_format(tmp_path: Path) -> None:
    """Scores and loss weights are such lists too."""
    path = tmp_path / "a.parquet"
    lists = pa.array([[0.5, 1.0]] * 3, pa.list_(pa.float64()))
    pq.write_table(pa.table({"x": lists}), path)
    with pytest.raises(
        actshard.UnknownFormatError, match=r"in x, which may be scores or weights \(format= reads them\)"
    ):
        actshard.open(tmp_path)
    assert actshard.open(tmp_path, format="parquet_vectors").gather("x", 2, 0).tolist() == [[0.5, 1.0]]
    pq.write_table(pa.table({"scores": lists}), path)
    layout = {"layers": ["scores"]}
    with pytest.raises(actshard.UnknownFormatError, match=r"\(format= and layout={'layers': \['scores'\]} read them\)"):
        actshard.open(tmp_path)
    store = actshard.open(tmp_path, format="parquet_vectors", layout=layout)
    assert store.gather("scores", 2, 0).tolist() == [[0.5, 1.0]]
    (tmp_path / "a.parquet.nla_meta.yaml").write_text("kind: nla_dataset")
    assert actshard.open(tmp_path).layers == ("scores",)
    for other in (GOLDEN / "levanter/prebuilt_weights", GOLDEN / "lmprobe/pooled_f16"):
        assert not actshard.formats.get("parquet_vectors").detect(other).matches


def test_a_folder_of_two_formats_is_ambiguous(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "hf_arrow/saelens_f32_consolidated/cache", tmp_path / "d")
    written(tmp_path / "d/a.parquet", [[1.0, 2.0]], pa.list_(pa.float32(), 2))
    with pytest.raises(
        actshard.UnknownFormatError, match=r"matches the formats hf_arrow and parquet_vectors. Choose one"
    ):
        actshard.open(tmp_path / "d")


def test_a_broken_file_is_named_by_the_error(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(40) + b"PAR1")
    with pytest.raises(actshard.UnknownFormatError, match=r"a.parquet, whose schema cannot be read"):
        actshard.open(tmp_path)


def test_a_file_replaced_after_opening_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", [[1.0, 2.0]] * 5, pa.list_(pa.float32()))
    store = actshard.open(path)
    written(tmp_path / "b.parquet", [[3.0, 4.0]] * 50, pa.list_(pa.float32())).rename(path)
    with refuses(actshard.FormatError, path, "it was replaced"):
        store.gather("vector", 0, 0)


def test_no_damaged_byte_escapes_the_errors(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", np.arange(24.0).reshape(6, 4).tolist(), pa.list_(pa.float32()))
    whole = path.read_bytes()
    refused: list[str] = []
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                store = actshard.open(path, "parquet_vectors")
            store.gather(store.layers[0], np.arange(len(store)), 0)
        except actshard.ActshardError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(len(message.splitlines()) == 1 for message in refused)


def test_conversion_keeps_rows_and_columns(tmp_path: Path) -> None:
    source = GOLDEN / "hf_arrow/parquet_fixed_halffloat"
    actshard.convert(source, tmp_path / "z", "zarr")
    before, after = actshard.open(source), actshard.open(tmp_path / "z")
    assert np.array_equal(
        bits(after.gather(after.layers[0], np.arange(10), 0)), bits(before.gather("vector", np.arange(10), 0))
    )
    assert after.table["pos"].to_pylist() == before.table["pos"].to_pylist()


SEQUENCES = pa.list_(pa.list_(pa.float32()))


def test_layers_with_other_lengths_are_errors_not_zeros(tmp_path: Path) -> None:
    """The lengths of examples are those of the first layer: rows of others were padded or cut to them."""
    first = [[[1.0, 1.0], [2.0, 2.0]], [[3.0, 3.0]]]
    table = {"hidden_a": pa.array(first, SEQUENCES), "hidden_b": pa.array(first[::-1], SEQUENCES)}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    store = actshard.open(tmp_path / "a.parquet")
    assert store.sequence(example=0, layer="hidden_a").tolist() == first[0]
    for example in (0, 1):
        with refuses(
            actshard.FormatError, tmp_path / "a.parquet", "row 0: column 'hidden_b': expected 2 vectors, found 1"
        ):
            store.sequence(example=example, layer="hidden_b")
    assert actshard.verify(tmp_path / "a.parquet").errors


@pytest.mark.parametrize("kind", ["sequences", "vectors"])
@pytest.mark.parametrize("first", [None, []], ids=["null", "empty"])
def test_a_first_row_without_values_hides_no_other(kind: str, first: Any, tmp_path: Path) -> None:
    """d_model is that of the first vector of any row group: layers disappeared, or all rows were refused."""
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    whole = [first, *([[row] for row in rows] if kind == "sequences" else rows)]
    values = pa.array(whole, SEQUENCES if kind == "sequences" else pa.list_(pa.float32()))
    for size in (1, 3):
        path = tmp_path / f"{size}.parquet"
        pq.write_table(pa.table({"activation": values}), path, row_group_size=size)
        store = actshard.open(path)
        assert (store.layers, store.d_model) == (("activation",), 3)
        if size == 1:
            assert [store.sequence(example=i, layer="activation").tolist() for i in (1, 2)] == [[row] for row in rows]


@pytest.mark.parametrize("shape", [[1 << 70, 2], [1 << 40, 1 << 40], [1, 1 << 62], [True, "2"], [2, 1 << 70], [1, 3]])
def test_sizes_of_features_are_hints(shape: Any, tmp_path: Path) -> None:
    values = pa.array([[[1.0, 2.0]], [[3.0, 4.0]]], SEQUENCES)
    features = {"info": {"features": {"v": {"shape": shape}}}}
    table = pa.table({"v": values}).replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, tmp_path / "a.parquet")
    store = actshard.open(tmp_path / "a.parquet")
    if shape == [1, 3]:
        with refuses(actshard.FormatError, tmp_path / "a.parquet", "expected vectors of 3 values, found 2"):
            store.sequence(example=1, layer="v")
    else:
        assert store.sequence(example=1, layer="v").tolist() == [[3.0, 4.0]]


def test_tensors_of_two_axes_are_sequences(tmp_path: Path) -> None:
    """An example of (T, d_model) was read as one vector of T * d_model."""
    values = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    pq.write_table(pa.table({"x": array}), tmp_path / "a.parquet", row_group_size=1)
    store = actshard.open(tmp_path / "a.parquet")
    assert (store.d_model, store.sequence(example=1, layer="x").tolist()) == (3, values[1].tolist())
    turned = pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=[1, 0])
    other = pa.ExtensionArray.from_storage(turned, array.storage)
    pq.write_table(pa.table({"x": other}), tmp_path / "b.parquet")
    with pytest.raises(actshard.UnknownFormatError, match=r"b\.parquet without such a column"):
        actshard.open(tmp_path / "b.parquet")


UPLOADS = {
    "train.parquet test.parquet": "several splits \\(test, train\\)",
    "acts_val.parquet acts_training.parquet": "several splits \\(train, valid\\)",
    "train-00000-of-00001-01ab.parquet train-00000-of-00001-02ab.parquet": "several uploads",
    "train-00000-of-00001.parquet train-00001-of-00002.parquet": "several uploads",
}


@pytest.mark.parametrize("names", UPLOADS)
def test_files_that_are_not_one_dataset_are_refused(names: str, tmp_path: Path) -> None:
    for name in names.split():
        written(tmp_path / name, [[1.0, 2.0]], pa.list_(pa.float32(), 2))
    with pytest.raises(actshard.UnknownFormatError, match=UPLOADS[names]):
        actshard.open(tmp_path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    for number in (0, 3):
        written(tmp_path / f"train-{number:05}-of-00004.parquet", [[1.0, 2.0]], pa.list_(pa.float32(), 2))
    (tmp_path / "._train-00000-of-00004.parquet").write_bytes(bytes(64))  # of macOS
    with pytest.warns(
        actshard.ActshardWarning, match=r"2 of 4 files are missing: train-00001-of-00004.parquet, train-00002-of-"
    ):
        assert len(actshard.open(tmp_path)) == 2
    assert [found.code for found in actshard.verify(tmp_path).errors] == ["missing-file"]


@pytest.mark.parametrize("layer", [-1, 1 << 40])
def test_a_layer_that_is_no_layer_is_no_name(layer: int, tmp_path: Path) -> None:
    values = pa.array([[1.0, 2.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"activation_layer": [layer], "activation": values}), tmp_path / "a.parquet")
    assert actshard.open(tmp_path / "a.parquet").layers == ("activation",)
