"""speculators' training data and vLLM's request files: golden data read bit for bit; unusable states are never another row's."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save_file

import actshard
from draft_files import DRAFT, Expected, check_reads, copied, edit_json, opened

ROWS, REQUESTS, FLOAT8 = (DRAFT / f"speculators_{name}" for name in ("bf16", "vllm_requests", "fp8"))
ERRORS = DRAFT / "errors"


@pytest.mark.parametrize("golden", [ROWS, REQUESTS, FLOAT8], ids=lambda p: p.name)
def test_golden_data_read_bit_for_bit(golden: Path, io: str) -> None:
    store = opened(golden, io)
    assert store.format == "speculators"
    assert store.warnings == ()
    assert store.layers == ((0, 1, "last") if golden == REQUESTS else (0, 1, 2, "last"))
    assert store.dtype == ml_dtypes.bfloat16
    assert store.info()["provenance"].get("stored_dtype") == ("F8_E4M3" if golden == FLOAT8 else None)
    check_reads(store, Expected(golden))
    assert actshard.verify(golden, deep=True).ok


@pytest.mark.parametrize("unfinished", [0, -1])
@pytest.mark.parametrize("size", [0, 5, 60])
def test_a_request_that_is_being_written_hides_no_others(unfinished: int, size: int, tmp_path: Path) -> None:
    folder = copied(REQUESTS, tmp_path / "d")
    files = sorted(folder.glob("*.safetensors"))
    files[unfinished].write_bytes(files[unfinished].read_bytes()[:size])
    with pytest.warns(actshard.ActshardWarning):
        store = actshard.open(folder)
    assert store.format == "speculators"
    assert len(store) == len(files)


def edit_states(path: Path, **tensors: np.ndarray) -> None:
    """Replaces tensors of a file of hidden states."""
    write(path, read_tensors(path) | tensors)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a file; float8 ones as bytes."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    numpy = {"F8_E4M3": "u1", "F32": "<f4", "I64": "<i8", "BF16": "<u2"}
    return {
        name: np.frombuffer(data[8 + size :][slice(*entry["data_offsets"])], numpy[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in json.loads(data[8 : 8 + size]).items()
        if name != "__metadata__"
    }


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    names = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "bfloat16": "BF16"}
    names |= {"uint8": "F8_E4M3", "float32": "F32", "int64": "I64", "uint16": "BF16", "float64": "F64"}
    header, body = {}, b""
    for name, array in tensors.items():
        end = len(body) + array.nbytes
        header[name] = {"dtype": names[str(array.dtype)], "shape": list(array.shape), "data_offsets": [len(body), end]}
        body += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize(
    "ones", [(), (1,), (0, 1, 1), (1, 4, 1), (1, 1, 8), (1, 4, 8), (0, 4, 1), (0, 4, 8), (0, 1, 8)]
)
def test_states_with_scales_are_products_in_bfloat16(
    tmp_path: Path, dtype: str, ones: tuple[int, ...], io: str
) -> None:
    """All codes; the scale is rounded to bfloat16 first, as speculators does. 0 stands for the number of tokens."""
    path = copied(ROWS, tmp_path / "rows")
    codes = np.arange(256, dtype=np.uint8)
    wanted = {}
    with np.errstate(invalid="ignore", over="ignore"):
        for i, ids in enumerate(opened(ROWS).table["input_ids"].to_pylist()):
            random = np.random.default_rng(i)
            states = (
                random.permutation(np.resize(codes, len(ids) * 4 * 8)).reshape(len(ids), 4, 8).view(np.dtype(dtype))
            )
            scales = np.exp(random.normal(0, 20, tuple(n or len(ids) for n in ones))).astype(np.float32)
            wanted[i] = states.astype(ml_dtypes.bfloat16) * np.broadcast_to(scales, states.shape).astype(
                ml_dtypes.bfloat16
            )
            tensors = {"hidden_states": states, "hidden_states_scales": scales, "token_ids": np.array(ids, np.int64)}
            write(path / f"hidden_states/hs_{i}.safetensors", tensors)
    store = opened(path, io)
    for i, rows in wanted.items():
        for k, layer in enumerate(store.layers):
            found, want = store.sequence(i, layer), rows[:, k]
            bits = found.view(np.uint16) == want.view(np.uint16)
            assert np.all(bits | (np.isnan(found) & np.isnan(want)))
            wide = store.gather(layer, i, np.arange(len(want)), dtype="float32")
            assert np.array_equal(wide, want.astype(np.float32), equal_nan=True)


def test_files_with_scales_and_without_mix(tmp_path: Path) -> None:
    path = copied(FLOAT8, tmp_path / "rows")
    want = opened(FLOAT8)
    tensors = read_tensors(path / "hidden_states/hs_1.safetensors")
    whole = np.stack([want.sequence(1, layer) for layer in want.layers], axis=1)
    write(
        path / "hidden_states/hs_1.safetensors",
        {"hidden_states": whole.view(np.uint16), "token_ids": tensors["token_ids"]},
    )
    store = opened(path)
    assert store.info()["provenance"]["stored_dtype"] == "BF16 and F8_E4M3"
    check_reads(store, Expected(FLOAT8))


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        (np.ones((2, 1, 1), np.float32), r"expected F32 \[\d+, 1, 1\], or axes of .* or 1, found F32 \[2, 1, 1\]"),
        (np.ones((1, 1, 1), np.float64), "found F64"),
        (np.ones((1, 1, 1, 1), np.float32), r"found F32 \[1, 1, 1, 1\]"),
        (np.ones((0, 1, 1), np.float32), r"found F32 \[0, 1, 1\]"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, scales: np.ndarray, said: str) -> None:
    path = copied(FLOAT8, tmp_path / "rows")
    bad = int(np.argmax(opened(FLOAT8).token_counts))
    edit_states(path / f"hidden_states/hs_{bad}.safetensors", hidden_states_scales=scales)
    with pytest.warns(actshard.ActshardWarning, match=said):
        store = actshard.open(path)
    with pytest.raises(actshard.FormatError, match=said):
        store.sequence(bad, 0)
    assert not actshard.verify(path).ok


DAMAGED: dict[str, tuple[list[int], str, str]] = {
    "empty_file": ([0], "found 0", "header"),
    "fp8_no_scales": ([0], "'hidden_states_scales': expected F32", "format"),
    "layers_differ": ([2], r"expected BF16 \[2, 3, 8\] as in most files, found BF16 \[2, 2, 8\]", "format"),
    "missing": ([2], "hs_2.safetensors: expected a file, found nothing", "missing-file"),
    "short_states": ([1], "expected 5 rows of states, one per token id, found 4", "format"),
    "swapped": ([0, 2], "expected the 3 token ids of the row, found 2 that differ at position 0", "format"),
    "truncated": ([1], "the file has 271", "header"),
    "wrong_token_ids": ([1], "found 5 that differ at position 0: these are the states of another row", "format"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_unusable_states_are_named_and_never_read_as_those_of_the_row(case: str, io: str) -> None:
    bad, said, code = DAMAGED[case]
    path = ERRORS / f"speculators_{case}"
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        store = actshard.open(path, io=io)
    assert len(caught_warnings) == len(store.warnings) == len(bad)
    assert re.search(said, str(caught_warnings[0].message))
    assert len(store) == 3
    for i in range(3):
        if i not in bad:
            assert store.sequence(i, "last").shape == (store.token_counts[i], 8)
            continue
        for read in (
            lambda i=i: store.sequence(i, "last"),
            lambda i=i: store.sequences([i], 0),
            lambda i=i: store.gather(0, i, 0),
            lambda i=i: store.last_tokens(1, i),
            lambda: list(store.stream(0, 4)),
        ):
            with pytest.raises((actshard.FormatError, actshard.MissingFileError)) as caught:
                read()
            assert caught.value.path in [path / f"hidden_states/hs_{k}.safetensors" for k in bad]
            if len(bad) == 1:
                assert re.search(said, str(caught.value))
    report = actshard.verify(path)
    assert not report.ok
    assert code in report.codes()


def test_nan_values_are_found_where_they_are() -> None:
    path = ERRORS / "speculators_nan"
    assert actshard.verify(path).ok
    (found,) = [f for f in actshard.verify(path, deep=True).findings if f.code == "nan"]
    assert found.place == "layer 0"
    assert "(0, 1)" in found.found


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"_data_files": [{"filename": "../data.arrow"}]}, actshard.FormatError),
        ({"_data_files": []}, actshard.FormatError),
        ({"_data_files": "x"}, actshard.FormatError),
        ({"_data_files": [{"filename": "none.arrow"}]}, actshard.MissingFileError),
        ({"_indices_files": [{"filename": "indices.arrow"}]}, actshard.UnsupportedError),
    ],
)
def test_a_state_that_names_other_files_is_refused(
    tmp_path: Path, fields: dict[str, object], kind: type[actshard.ActshardError]
) -> None:
    path = copied(ROWS, tmp_path / "rows")
    edit_json(path / "state.json", **fields)
    with pytest.raises(kind) as caught:
        opened(path)
    assert "\n" not in str(caught.value)


def test_arrow_data_that_are_cut_are_refused(tmp_path: Path) -> None:
    path = copied(ROWS, tmp_path / "rows")
    data = (path / "data-00000-of-00001.arrow").read_bytes()
    for size in (0, 7, len(data) // 2):
        (path / "data-00000-of-00001.arrow").write_bytes(data[:size])
        with pytest.raises(actshard.ActshardError) as caught:
            opened(path)
        assert "\n" not in str(caught.value)


def test_folders_without_states_or_rows_are_not_taken(tmp_path: Path) -> None:
    path = copied(ROWS, tmp_path / "rows")
    shutil.rmtree(path / "hidden_states")
    with pytest.raises(actshard.UnknownFormatError, match="no folder hidden_states"):
        opened(path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    with pytest.raises(actshard.UnknownFormatError):
        opened(tmp_path / "other")


def test_numbers_of_layers_can_be_given_where_the_source_has_positions(tmp_path: Path) -> None:
    """DeepSpec compares target_layer_ids with the draft model's: positions would be taken for numbers."""
    done = actshard.convert(ROWS, tmp_path / "cache", "deepspec", layers={0: 2, 1: 18, 2: 33, "last": "last"})
    assert [loss.what for loss in done.losses] == ["masks"]
    store, want = opened(done.path), opened(ROWS)
    assert store.layers == (2, 18, 33, "last")
    assert np.array_equal(store.sequence(0, 18).view(np.uint16), want.sequence(0, 1).view(np.uint16))
    ids = actshard.convert(ROWS, tmp_path / "ids", "deepspec", layer_ids=[2, 18, 33])
    assert [loss.what for loss in ids.losses] == ["masks"]
    assert [loss.what for loss in actshard.convert(ROWS, tmp_path / "same", "speculators").losses] == []


def test_caches_are_converted_among_each_other(tmp_path: Path) -> None:
    done = actshard.convert(ROWS, tmp_path / "cache", "deepspec", verify=True)
    assert list(map(str, done.losses)) == [
        "masks: the source has no attention_mask: it is written as ones",
        "layers: 0, 1, 2 are positions: speculators does not store the layers' numbers in the model. Pass them: "
        "convert(layers={0: NUMBER, ...})",
    ]
    store, want = opened(done.path), opened(ROWS)
    assert store.layers == want.layers
    for layer in store.layers:
        assert np.array_equal(
            np.concatenate(store.sequences(range(6), layer)).view(np.uint16),
            np.concatenate(want.sequences(range(6), layer)).view(np.uint16),
        )
    for name in ("input_ids", "loss_mask"):
        assert store.table[name].to_pylist() == want.table[name].to_pylist()


def test_masks_of_another_length_and_files_of_no_row_are_found(tmp_path: Path) -> None:
    path = copied(ROWS, tmp_path / "rows")
    shutil.copy(path / "hidden_states/hs_0.safetensors", path / "hidden_states/hs_6.safetensors")
    file = path / "data-00000-of-00001.arrow"
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        table = reader.read_all()
    masks = table["loss_mask"].to_pylist()
    masks[2] = [*masks[2], 1]
    table = table.set_column(table.schema.get_field_index("loss_mask"), "loss_mask", pa.array(masks))
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    found = {f.code: f for f in actshard.verify(path).findings}
    assert set(found) == {"count-claim", "unlisted-file"}
    assert found["count-claim"].place == "row 2, column 'loss_mask'"
    assert found["unlisted-file"].path.name == "hs_6.safetensors"


def test_negative_token_ids_and_masks_of_other_values_are_found(tmp_path: Path) -> None:
    path = copied(ROWS, tmp_path / "rows")
    file = path / "data-00000-of-00001.arrow"
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        table = reader.read_all()
    for name, value in (("input_ids", -5), ("loss_mask", 2)):
        lists = table[name].to_pylist()
        lists[3][1] = lists[3][2] = value
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(lists, table[name].type))
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    found = {
        f.code: (f.place, f.found) for f in actshard.verify(path).errors if f.code in ("token-range", "mask-value")
    }
    assert found == {
        "token-range": ("row 3, input_ids, token 1", "-5"),
        "mask-value": ("row 3, loss_mask, token 1", "2"),
    }


def files_of(path: Path) -> dict[str, bytes]:
    """Files of rows and hidden states."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("[!.]*")) if file.is_file()}


def test_copies_are_the_original_byte_for_byte(tmp_path: Path) -> None:
    """Hidden states, rows and state are those that hs-connectors and speculators wrote, but for the fingerprint."""
    done = actshard.convert(ROWS, tmp_path / "copy", "speculators", verify=True)
    assert done.losses == ()
    made, want = files_of(done.path), files_of(ROWS)
    for name in [f"hidden_states/hs_{i}.safetensors" for i in range(6)]:
        assert made[name] == want[name]
    rows = [pa.ipc.open_stream(files["data-00000-of-00001.arrow"]).read_all() for files in (made, want)]
    assert rows[0].equals(rows[1], check_metadata=True)
    states = [json.loads(files["state.json"]) for files in (made, want)]
    assert {**states[0], "_fingerprint": states[1]["_fingerprint"]} == states[1]
    info = [json.loads(files["dataset_info.json"]) for files in (made, want)]
    assert info[1].items() <= info[0].items()
    assert set(made) == set(want) - {"README.md", "expected.json", "expected.npz", "token_freq.pt"}
    check_reads(opened(done.path), Expected(ROWS))


@pytest.mark.parametrize("cache", ["deepspec_v2_single", "automodel_dspark", "modelopt_vllm", "specforge_dspark"])
def test_other_caches_become_training_data_and_go_back(tmp_path: Path, cache: str) -> None:
    source = opened(DRAFT / cache)
    done = actshard.convert(source, tmp_path / "rows", "speculators", verify=True)
    store = opened(done.path)
    assert (store.layers, store.dtype) == (source.layers, source.dtype)
    for layer in store.layers:
        for found, want in zip(
            store.sequences(range(len(store)), layer), source.sequences(range(len(source)), layer), strict=True
        ):
            assert np.array_equal(found.view(np.uint16), want.view(np.uint16))
    for name in ("input_ids", "loss_mask"):
        assert store.table[name].to_pylist() == source.table[name].to_pylist()
    assert store.table["seq_len"].to_pylist() == source.token_counts.tolist()
    if "attention_mask" in source.table.column_names:
        assert "attention_mask" in " ".join(loss.detail for loss in done.losses)
    back = opened(actshard.convert(done.path, tmp_path / "back", "deepspec", verify=True).path)
    assert back.layers == source.layers
    if cache == "deepspec_v2_single":
        assert files_of(back.path)["shard-00000.bin"] == (DRAFT / cache / "shard-00000.bin").read_bytes()


def test_float8_states_are_written_as_their_products(tmp_path: Path) -> None:
    store = opened(actshard.convert(FLOAT8, tmp_path / "rows", "speculators", verify=True).path)
    assert "stored_dtype" not in store.info()["provenance"]
    check_reads(store, Expected(FLOAT8))


def appended(path: Path, **options: object) -> actshard.Writer:
    """A writer of layers 3, "mid" and last, of width 4."""
    given: dict[str, object] = {"layers": ["last", 3, "mid"], "d_model": 4, "dtype": "float16"}
    return actshard.create(path, "speculators", **(given | options))  # type: ignore[arg-type]


def examples_of(lengths: list[int]) -> tuple[list[np.ndarray], dict[str, list[list[int]]]]:
    """States ``(3, S, 4)`` and columns of examples."""
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((3, n, 4)).astype(np.float16) for n in lengths]
    ids = [rng.integers(0, 1 << 31, n).tolist() for n in lengths]
    return rows, {"input_ids": ids, "loss_mask": [[k % 2 for k in range(n)] for n in lengths]}


def test_what_is_appended_comes_back_and_an_interrupted_writer_goes_on(tmp_path: Path) -> None:
    rows, columns = examples_of([3, 1, 7, 2])
    writer = appended(tmp_path / "a")
    writer.append(rows[:3], columns={name: values[:3] for name, values in columns.items()})
    writer.flush()
    writer.abort()
    with pytest.raises(actshard.UnfinishedError):
        opened(tmp_path / "a")
    with appended(tmp_path / "a", resume=True) as writer:
        assert writer.committed == 3
        writer.append(rows[3:], columns={name: values[3:] for name, values in columns.items()})
    with appended(tmp_path / "b") as writer:
        writer.append(rows, columns=columns)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    store = opened(tmp_path / "a")
    assert store.layers == (3, "mid", "last")
    for i, states in enumerate(rows):
        for k, layer in enumerate(["last", 3, "mid"]):
            assert np.array_equal(store.sequence(i, layer), states[k])
    assert {name: store.table[name].to_pylist() for name in columns} == columns
    assert actshard.verify(tmp_path / "a", deep=True).ok


def test_rows_without_a_mask_are_supervised(tmp_path: Path) -> None:
    rows, columns = examples_of([3, 1])
    with appended(tmp_path / "a") as writer:
        writer.append(rows, columns={"input_ids": columns["input_ids"]})
    assert opened(tmp_path / "a").table["loss_mask"].to_pylist() == [[1, 1, 1], [1]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": [3, 8]}, "stores the last hidden state: name a layer 'last'"),
        ({"last": 9}, "last: expected one of the layers"),
        ({"metadata": {"features": {}}}, "'features' describes the files"),
        ({"part": (0, 2)}, "part: not supported"),
        ({"dtype": "float64"}, "speculators supports bfloat16 or float16 or float32"),
        ({"scale": "token"}, "'scale' is not an option of speculators"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(actshard.ActshardError, match=said):
        appended(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"input_ids": [[1, 2]]},
        {"input_ids": [[1, 2, 1 << 31]]},
        {"input_ids": [[1, 2, None]]},
        {"input_ids": [[1, 2, 3]], "loss_mask": [[1]]},
        {"input_ids": [[1, 2, 3]], "other": [[1, 1, 1]]},
    ],
)
def test_columns_that_are_not_one_value_per_token_are_refused(tmp_path: Path, columns: dict[str, object]) -> None:
    rows, _ = examples_of([3])
    writer = appended(tmp_path / "a")

    def everything() -> None:
        writer.append(rows, columns=columns)
        writer.flush()  # lists are compared with rows when they are written

    with pytest.raises(actshard.ActshardError, match="columns"):
        everything()
    writer.abort()


def test_names_of_layers_that_are_none_are_refused(tmp_path: Path) -> None:
    path = copied(ROWS, tmp_path / "rows")
    for names in ([1, 2], "abc", [1, 1, 2], [1, 2, "last"], [1, 2, 3.5], [True, 2, 3]):
        edit_json(path / "dataset_info.json", actshard_layers=names)
        with pytest.raises(actshard.FormatError):
            opened(path)
    edit_json(path / "dataset_info.json", actshard_layers=[4, "b", 2])
    assert opened(path).layers == (4, "b", 2, "last")


def test_tensors_that_are_not_read_are_named_by_verify(tmp_path: Path) -> None:
    for number in range(2):
        states = np.zeros((3, 2, 8), np.float32)
        tensors = {"hidden_states": states, "token_ids": np.arange(3), "logits": np.zeros((3, 20), np.float32)}
        save_file(tensors, str(tmp_path / f"req-{number}.safetensors"))
    (finding,) = [finding for finding in actshard.verify(tmp_path).findings if finding.code == "layout"]
    assert "tensors logits are not read" in str(finding)
    assert "layout" not in actshard.verify(REQUESTS).codes()
