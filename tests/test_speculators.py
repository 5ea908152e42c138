"""speculators' training data and vLLM's request files: golden data read bit for bit; unusable states are never another row's."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import actshard
from conftest import refuses
from draft_files import DRAFT, Expected, check_reads, copied, edit_json, opened

ROWS, REQUESTS, FLOAT8 = (DRAFT / f"speculators_{name}" for name in ("bf16", "vllm_requests", "fp8"))
ERRORS = DRAFT / "errors"


@pytest.mark.parametrize("golden", [ROWS, REQUESTS], ids=lambda p: p.name)
def test_golden_data_read_bit_for_bit(golden: Path, io: str) -> None:
    store = opened(golden, io)
    assert store.format == "speculators"
    assert store.warnings == ()
    assert store.layers == ((0, 1, 2, "last") if golden == ROWS else (0, 1, "last"))
    check_reads(store, Expected(golden))
    assert actshard.verify(golden, deep=True).ok


def test_float8_states_are_refused_by_name() -> None:
    with refuses(actshard.UnsupportedError, FLOAT8 / "hidden_states/hs_0.safetensors", "float8 states with scales"):
        opened(FLOAT8)


DAMAGED: dict[str, tuple[list[int], str, str]] = {
    "empty_file": ([0], "found 0", "header"),
    "fp8_no_scales": ([0], "'hidden_states_scales': expected F32", "format"),
    "layers_differ": ([2], r"expected BF16 \[2, 3, 8\] as in most files, found BF16 \[2, 2, 8\]", "format"),
    "missing": ([2], "hs_2.safetensors: expected a file, found nothing", "missing-file"),
    "short_states": ([1], "expected 5 rows of states, one per token id, found 4", "format"),
    "swapped": ([0, 2], "expected the 3 token ids of the row, found 2 that differ at place 0", "format"),
    "truncated": ([1], "the file has 271", "header"),
    "wrong_token_ids": ([1], "found 5 that differ at place 0: these are the states of another row", "format"),
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


def test_caches_are_converted_among_each_other(tmp_path: Path) -> None:
    done = actshard.convert(ROWS, tmp_path / "cache", "deepspec", verify=True)
    assert [loss.detail for loss in done.losses] == ["deepspec has no place for them: seq_len"]
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
    import pyarrow as pa

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
