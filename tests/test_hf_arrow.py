"""Arrow directories of ``datasets`` and SAELens: golden data read bit for bit, all list types, nulls, hostile and broken files."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import actshard
from arrow_files import enlarged, written
from conftest import GOLDEN, bits, refuses

FOLDERS = sorted(p.parent for p in (GOLDEN / "hf_arrow").glob("*/*/state.json"))
RAGGED = GOLDEN / "hf_arrow/hub_array2d_ragged_f32/dataset"
SAELENS = GOLDEN / "hf_arrow/saelens_f32_consolidated/cache"


def quietly(path: Path, io: str = "mmap") -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, io=io)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.parent.name)
def test_golden_directories_come_back(folder: Path, io: str) -> None:
    z = np.load(folder.parent / "expected.npz")
    store = actshard.open(folder, io=io)
    assert (store.format, store.warnings) == ("hf_arrow", ())
    assert store.token_counts.tolist() == z["lengths"].tolist()
    for layer in store.layers:
        key = "layer_" + re.findall(r"\d+", str(layer))[0]
        want = z[f"{key}_bits"] if f"{key}_bits" in z else bits(z[key])
        ends = np.cumsum(z["lengths"])
        for i, rows in enumerate(np.split(want, ends[:-1])):
            assert np.array_equal(bits(store.sequence(i, layer)), rows)
        assert np.array_equal(bits(store.last_tokens(layer)), want[ends - 1])
        streamed = [batch.activations for batch in store.stream(layer, 7)]
        assert np.array_equal(bits(np.concatenate(streamed)), want)
    ids = "token_ids" if "token_ids" in store.table.column_names else "input_ids"
    assert np.array_equal(np.concatenate(store.table[ids].to_pylist()), z["tokens"])
    expected = json.loads((folder.parent / "expected.json").read_text())
    for name, values in expected.get("columns", {}).items():
        assert store.table[name].to_pylist() == values
    assert actshard.verify(folder, deep=True).findings == []


def test_a_view_is_of_the_mapped_file() -> None:
    store = actshard.open(SAELENS, io="mmap")
    view = store.sequence(3, store.layers[0])
    want = view.copy()
    del store
    assert not view.flags.owndata
    assert np.array_equal(view, want)


KINDS = {
    "list of lists": lambda t: pa.list_(pa.list_(t)),
    "large list of lists": lambda t: pa.large_list(pa.large_list(t)),
    "list of large lists": lambda t: pa.list_(pa.large_list(t)),
    "list of fixed lists": lambda t: pa.list_(pa.list_(t, 4)),
    "fixed lists": lambda t: pa.list_(pa.list_(t, 4), 3),
    "fixed list of lists": lambda t: pa.list_(pa.list_(t), 3),
    "vectors": pa.list_,
    "large vectors": pa.large_list,
    "fixed vectors": lambda t: pa.list_(t, 4),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_kind_of_list_comes_back(kind: str, dtype: str, tmp_path: Path) -> None:
    """Sliced batches begin at offsets other than 0. The oracle is pyarrow's own reading of the file."""
    rng = np.random.default_rng(1)
    of = KINDS[kind](getattr(pa, dtype)())
    vectors = "vectors" in kind
    lengths = [1] * 9 if vectors else [3] * 9 if kind.startswith("fixed") else [2, 0, 5, 1, 3, 0, 4, 1, 2]
    values = [rng.standard_normal((n, 4)).astype(dtype) for n in lengths]
    rows = [v[0].tolist() if vectors else v.tolist() for v in values]
    batch = pa.record_batch({"text": [f"t{i}" for i in range(9)], "acts": pa.array(rows, of), "n": list(range(9))})
    folder = written(tmp_path / "d", [[batch.slice(0, 4), batch.slice(4, 0), batch.slice(4, 1)], [batch.slice(5)]])
    store = actshard.open(folder)
    assert (store.layers, store.d_model, store.dtype) == (("acts",), 4, np.dtype(dtype))
    assert store.token_counts.tolist() == lengths
    for i, want in enumerate(values):
        assert np.array_equal(bits(store.sequence(i, "acts")), bits(want))
    picks = rng.integers(0, 9, 50)
    picks = picks[np.array(lengths)[picks] > 0]
    assert np.array_equal(store.gather("acts", picks, -1), np.stack([values[i][-1] for i in picks]))
    assert store.table.to_pydict() == {"text": [f"t{i}" for i in range(9)], "n": list(range(9))}
    assert actshard.verify(folder, deep=True).ok


@pytest.mark.parametrize("first", [(1 << 31) - 6, (1 << 31) + 7, (1 << 32) - 6, (1 << 32) + 7])
def test_offsets_of_64_bits_are_not_wrapped(first: int, tmp_path: Path, io: str) -> None:
    """Vectors that begin past value 2^31 or 2^32 of a large_list, in a sparse file of up to 8 GiB."""
    rows, width = 1001, 7
    want = np.arange(rows * width, dtype=np.float16).reshape(rows, width)
    kind = pa.large_list(pa.float16())
    batch = pa.record_batch({"acts": pa.array(list(want), kind)})
    values, ends = rows * width, 8 * (rows + 1)
    padded = -(-2 * (first + values) // 8) * 8
    numbers = {values: first + values, 2 * values: 2 * (first + values), ends + -(-2 * values // 8) * 8: ends + padded}
    offsets = first + width * np.arange(rows + 1, dtype="<i8")
    body = {0: offsets.tobytes(), ends + 2 * first: want.tobytes()}
    store = actshard.open(enlarged(tmp_path / "d", batch, numbers, body, ends + padded), io=io)
    assert np.array_equal(store.gather("acts", np.arange(rows), 0), want)
    assert np.array_equal(store.sequence(rows - 1, "acts"), want[-1:])


def test_offsets_of_32_bits_reach_their_last_value(tmp_path: Path, io: str) -> None:
    """Array2D whose last value is number 2^31 - 2, 8 GiB into a sparse file."""
    rows, tokens, width = 101, 3, 7
    want = np.arange(rows * tokens * width, dtype=np.float32).reshape(rows, tokens, width)
    batch = pa.record_batch({"acts": pa.array(want.tolist(), pa.list_(pa.list_(pa.float32())))})
    values, ends = want.size, 4 * (rows + 1) + 4 * (rows * tokens + 1)
    first = (1 << 31) - 1 - values
    assert ends % 8 == 0
    padded = -(-4 * (first + values) // 8) * 8
    numbers = {values: first + values, 4 * values: 4 * (first + values), ends + -(-4 * values // 8) * 8: ends + padded}
    outer = tokens * np.arange(rows + 1, dtype="<i4")
    inner = (first + width * np.arange(rows * tokens + 1, dtype=np.int64)).astype("<i4")
    body = {0: outer.tobytes(), outer.nbytes: inner.tobytes(), ends + 4 * first: want.tobytes()}
    store = actshard.open(enlarged(tmp_path / "d", batch, numbers, body, ends + padded), io=io)
    picks = np.arange(rows)[::-1]
    assert np.array_equal(store.gather("acts", picks, -1), want[picks, -1])
    assert np.array_equal(store.sequence(rows - 1, "acts"), want[-1])


@pytest.mark.parametrize("values", [1 << 31, 1 << 32])
def test_rows_past_31_and_32_bits_of_values_are_theirs(values: int, tmp_path: Path, io: str) -> None:
    """Fixed-size lists: one batch of a sparse file of up to 8 GiB. Rows on both sides of the boundary."""
    few, width = 1001, 4096
    boundary = values // width
    rows = boundary + 5
    batch = pa.record_batch({"acts": pa.array([[0.0] * width] * few, pa.list_(pa.float16(), width))})
    numbers = {few: rows, few * width: rows * width, few * width * 2: rows * width * 2}
    want = np.arange(10 * width, dtype=np.uint16).view(np.float16).reshape(10, width)
    body = {(boundary - 5) * width * 2: want.tobytes()}
    store = actshard.open(enlarged(tmp_path / "d", batch, numbers, body, rows * width * 2), io=io)
    assert len(store) == rows
    for i in range(10):
        assert np.array_equal(bits(store.sequence(boundary - 5 + i, "acts")), bits(want[i : i + 1]))
    assert np.array_equal(bits(store.gather("acts", np.arange(boundary - 5, rows), 0)), bits(want))


@pytest.mark.parametrize("where", ["row", "vector", "element"])
def test_rows_with_nulls_have_no_tokens_and_are_named(where: str, tmp_path: Path) -> None:
    rows: list[Any] = np.arange(60, dtype=np.float32).reshape(5, 3, 4).tolist()
    if where == "row":
        rows[3] = None
    elif where == "vector":
        rows[3][1] = None
    else:
        rows[3][1][2] = None
    for of in (
        pa.list_(pa.list_(pa.float32(), 4), 3),
        pa.list_(pa.list_(pa.float32(), 4)),
        pa.list_(pa.list_(pa.float32())),
    ):
        if where == "vector" and pa.types.is_list(of.value_type):
            continue  # a null list has no values: its vectors are not evenly spaced
        batch = pa.record_batch({"acts": pa.array(rows, of), "n": list(range(5))})
        folder = written(
            tmp_path / f"{of}".replace("/", ""), [[batch.slice(1, 1), batch.slice(2)], [batch.slice(0, 1)]]
        )
        store = quietly(folder)
        assert store.token_counts.tolist() == [3, 3, 0, 3, 3]
        assert [w.code for w in store.warnings] == ["null-row"]
        assert "acts: 1 row with nulls, read as without tokens: 2" in store.warnings[0]
        assert np.array_equal(store.sequence(3, "acts"), np.array(rows[4], np.float32))
        assert len(store.sequence(2, "acts")) == 0
        with pytest.raises(actshard.ActshardError, match="example 2 has 0 stored tokens"):
            store.gather("acts", 2, 0)
        streamed = np.concatenate([batch.activations for batch in store.stream("acts", 2, shuffle="exact")])
        assert len(streamed) == 12
        assert actshard.verify(folder).codes() == {"null-row"}


def test_vectors_of_unequal_lengths_are_refused(tmp_path: Path) -> None:
    """Also behind the first row, whose length sets d_model: the batch is compared when it is first read."""
    rows = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0, 7.0], [8.0]]]
    batch = pa.record_batch({"acts": pa.array(rows, pa.list_(pa.list_(pa.float32())))})
    folder = written(tmp_path / "d", [[batch]])
    file = folder / "data-00000-of-00001.arrow"
    store = actshard.open(folder)
    with refuses(actshard.FormatError, file, "expected lists of 2 values each, so offset 3 to be 6, found 7"):
        store.gather("acts", 0, 0)
    assert "format" in actshard.verify(folder).codes()


def test_scores_per_token_are_a_column_and_columns_of_other_lengths_are_named(tmp_path: Path) -> None:
    two = pa.list_(pa.list_(pa.float32()))
    batch = pa.record_batch(
        {
            "a": pa.array([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], two),
            "b": pa.array([[[7.0, 8.0]], [[9.0, 1.0], [2.0, 3.0]]], two),
            "other": pa.array([[[7.0, 8.0]], [[9.0, 1.0]]], two),
            "logprobs": pa.array([[0.5], [0.1, 0.2]], pa.list_(pa.float32())),
        }
    )
    store = quietly(written(tmp_path / "d", [[batch]]))
    assert store.layers == ("a", "b")
    assert store.table.column_names == ["other", "logprobs"]
    assert "columns logprobs, other differ from a, b" in str(store.warnings[0])
    assert store.sequence(1, "b").tolist() == [[9.0, 1.0], [2.0, 3.0]]


def test_a_column_that_begins_with_an_empty_list_does_not_hide_the_layers(tmp_path: Path) -> None:
    lists = pa.list_(pa.float32())
    acts = pa.array([[[1.0, 2.0]], [[3.0, 4.0]]], pa.list_(lists))
    batch = pa.record_batch({"scores": pa.array([[], [1.0]], lists), "acts": acts})
    with pytest.warns(actshard.ActshardWarning, match="columns scores differ from acts"):
        store = actshard.open(written(tmp_path / "d", [[batch]]))
    assert (store.layers, store.d_model) == (("acts",), 2)
    assert store.table["scores"].to_pylist() == [[], [1.0]]
    batch = pa.record_batch({"scores": pa.array([[], [1.0]], lists), "acts": pa.array([[1.0, 2.0], [3.0, 4.0]], lists)})
    with pytest.warns(actshard.ActshardWarning, match="columns scores differ from acts"):
        assert actshard.open(written(tmp_path / "e", [[batch]])).layers == ("acts",)


def test_types_of_other_columns_come_back(tmp_path: Path) -> None:
    columns = {
        "acts": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        "b": pa.array([True, None]),
        "u": pa.array([1, 2], pa.uint8()),
        "t": pa.array([0, 1], pa.timestamp("us", "UTC")),
        "d": pa.array([None, "1.50"]).cast(pa.decimal128(9, 2)),
        "s": pa.array([{"x": 1, "y": "a"}, None]),
        "m": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
        "w": pa.array(["a", None], pa.large_string()),
        "x": pa.array([b"ab", b"cd"], pa.binary(2)),
        "n": pa.nulls(2),
        "l": pa.array([[[1], []], None], pa.list_(pa.large_list(pa.int64()))),
    }
    batch = pa.record_batch(columns)
    table = actshard.open(written(tmp_path / "d", [[batch]])).table
    want = pa.Table.from_batches([batch]).drop_columns(["acts"])
    assert table.equals(want)


def test_a_dataset_dict_lists_its_splits(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    shutil.copytree(SAELENS, tmp_path / "train")
    assert actshard.open(tmp_path).path == tmp_path / "train"
    shutil.copytree(RAGGED, tmp_path / "test")
    with pytest.raises(actshard.UnknownFormatError, match=r"Open one: test \(hf_arrow\), train \(hf_arrow\)"):
        actshard.open(tmp_path)


def test_conversion_keeps_rows_and_columns(tmp_path: Path) -> None:
    actshard.convert(RAGGED, tmp_path / "z", "zarr")
    before, after = actshard.open(RAGGED), actshard.open(tmp_path / "z")
    for layer in before.layers:
        for i in range(len(before)):
            assert np.array_equal(before.sequence(i, layer), after.sequence(i, layer))
    assert after.table["prompt"].to_pylist() == before.table["prompt"].to_pylist()
    assert after.table["input_ids"].to_pylist() == before.table["input_ids"].to_pylist()


# -- hostile and broken ------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAELENS, tmp_path / "cache"))


def test_an_unfinished_run_is_told(cache: Path) -> None:
    (cache / "state.json").unlink()
    for finding in actshard.verify(cache).findings:
        assert ".tmp_shards" not in str(finding)
        assert "Dataset.from_file(FILE)" in str(finding)
    with pytest.raises(actshard.UnknownFormatError, match=r"The cache of datasets has none: save its files"):
        actshard.open(cache)
    (cache / ".tmp_shards").mkdir()
    with refuses(actshard.UnfinishedError, cache, "has .tmp_shards and no state.json"):
        actshard.open(cache)


def test_without_state_json_the_error_names_what_is_looked_for(cache: Path) -> None:
    (cache / "state.json").unlink()
    with pytest.raises(actshard.UnknownFormatError, match=r"state\.json"):
        actshard.open(cache)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", ".", "a/b", "data-00000-of-00003.arrow"])
def test_names_of_files_stay_in_the_folder_and_differ(name: str, cache: Path) -> None:
    state = json.loads((cache / "state.json").read_text())
    state["_data_files"][1]["filename"] = name
    (cache / "state.json").write_text(json.dumps(state))
    with refuses(actshard.FormatError, cache / "state.json", "filename"):
        actshard.open(cache)


def test_a_file_that_is_missing_or_cut_is_named(cache: Path) -> None:
    file = cache / "data-00001-of-00003.arrow"
    whole = file.read_bytes()
    file.write_bytes(whole[:-200])
    with refuses(actshard.TruncatedFileError, file, "expected .* bytes of a message"):
        actshard.open(cache)
    file.unlink()
    with refuses(actshard.MissingFileError, file, "found nothing"):
        actshard.open(cache)
    file.write_bytes(whole[:-8])  # without the end marker: numbers of later examples are unknown
    with refuses(actshard.TruncatedFileError, file, 'expected an end marker, .*incomplete="skip"'):
        actshard.open(cache)
    assert not actshard.verify(cache).ok
    file.write_bytes(whole)
    last = cache / "data-00002-of-00003.arrow"
    last.write_bytes(last.read_bytes()[:-8])
    assert [w.code for w in quietly(cache).warnings] == ["end-marker"]


def test_compressed_batches_and_dictionaries_are_refused(tmp_path: Path) -> None:
    batch = pa.record_batch(
        {"acts": pa.array([[1.0, 2.0]], pa.list_(pa.float32())), "c": pa.array(["a"]).dictionary_encode()}
    )
    folder = written(tmp_path / "d", [[batch]])
    with refuses(actshard.UnsupportedError, folder / "data-00000-of-00001.arrow", "column 'c': .* found a dictionary"):
        actshard.open(folder)
    plain = batch.select(["acts"])
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    file = folder / "data-00000-of-00001.arrow"
    with pa.OSFile(str(file), "wb") as f, pa.ipc.new_stream(f, plain.schema, options=options) as stream:
        stream.write_batch(plain)
    with refuses(actshard.UnsupportedError, folder / "data-00000-of-00001.arrow", "found a compressed record batch"):
        actshard.open(folder)


@pytest.mark.slow
def test_no_damaged_byte_escapes_the_errors(cache: Path) -> None:
    """Every 3rd byte of a file, set to 0xff or flipped: what opens reads rows, and everything else raises an ActshardError."""
    file = cache / "data-00002-of-00003.arrow"
    whole = file.read_bytes()
    refused: list[str] = []
    for at in range(0, len(whole), 3):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (0xFF if at % 2 else 0x01)]) + whole[at + 1 :])
        try:
            store = quietly(cache)
            for layer in store.layers:
                store.gather(layer, np.arange(len(store)), 0)
            assert store.table.num_rows == len(store)
        except actshard.ActshardError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(len(message.splitlines()) == 1 for message in refused)


def test_the_count_of_dataset_info_is_compared(cache: Path) -> None:
    info = json.loads((cache / "dataset_info.json").read_text())
    info["splits"] = {"train": {"num_examples": 99}}
    (cache / "dataset_info.json").write_text(json.dumps(info))
    state = json.loads((cache / "state.json").read_text())
    (cache / "state.json").write_text(json.dumps({**state, "_split": "train"}))
    assert "count-claim" in actshard.verify(cache).codes()


@pytest.mark.peers
def test_datasets_reads_the_same_rows() -> None:
    datasets = pytest.importorskip("datasets")
    for folder in FOLDERS:
        theirs, ours = datasets.load_from_disk(str(folder)), actshard.open(folder)
        for layer in ours.layers:
            for i, row in enumerate(theirs[layer]):
                assert np.array_equal(np.asarray(row, ours.dtype), ours.sequence(i, layer))


def test_a_dataset_of_texts_is_none_of_activations(cache: Path) -> None:
    info = json.loads((cache / "dataset_info.json").read_text())
    info["features"] = {"text": {"dtype": "string", "_type": "Value"}, "score": {"dtype": "float32", "_type": "Value"}}
    (cache / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(actshard.UnknownFormatError, match="found a dataset without columns of vectors"):
        actshard.open(cache)


@pytest.mark.parametrize("dtype", [["float32"], {"float32": 1}, None, 3])
def test_a_dtype_that_is_no_text_is_none_of_vectors(dtype: Any, cache: Path) -> None:
    info = json.loads((cache / "dataset_info.json").read_text())
    info["features"] = {"x": {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "Sequence"}}
    (cache / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(actshard.UnknownFormatError, match="found a dataset without columns of vectors"):
        actshard.open(cache)
