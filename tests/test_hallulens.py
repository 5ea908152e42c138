"""HalluLens inference captures: every golden array reads back, and every special case of the format is handled."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.formats.hallulens import read
from actshard.writing.converting import planning
from conftest import GOLDEN, refuses

CAPTURES = sorted(p.parent for p in (GOLDEN / "hallulens_v1").glob("*/expected.npz"))
FULL = GOLDEN / "hallulens_v1/full_capture"


def opened(path: Path, io: str = "mmap") -> actshard.Store:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return actshard.open(path, io=io)


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A copy of the finished capture."""
    return Path(shutil.copytree(FULL / "capture", tmp_path / "capture"))


def parts_of(golden: Path, layer: int) -> list[np.ndarray]:
    """Rows of each example as bits: prompt rows, then response rows."""
    z = np.load(golden / "expected.npz")
    response = np.split(z[f"response_layer_{layer}_bits"], np.cumsum(z["response_lengths"])[:-1])
    if f"prompt_layer_{layer}_bits" not in z:
        return response
    prompt = np.split(z[f"prompt_layer_{layer}_bits"], np.cumsum(z["prompt_lengths"])[:-1])
    return [np.concatenate(pair) for pair in zip(prompt, response, strict=True)]


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("golden", CAPTURES, ids=lambda p: p.name)
def test_golden_captures_come_back(golden: Path, io: str) -> None:
    expected = json.loads((golden / "expected.json").read_text())
    z = np.load(golden / "expected.npz")
    store = opened(golden / "capture", io)
    assert store.format == "hallulens"
    assert (len(store), list(store.layers)) == (expected["examples"], expected["layers"])
    for layer in store.layers:
        want = parts_of(golden, layer)
        assert store.token_counts.tolist() == [len(x) for x in want]
        for i, rows in enumerate(want):
            assert np.array_equal(store.sequence(i, layer).view(np.uint16), rows)
            assert np.array_equal(store.last_tokens(layer, i).view(np.uint16)[0], rows[-1])
        streamed = [batch.activations for batch in store.stream(layer, 7)]
        assert np.array_equal(np.concatenate(streamed).view(np.uint16), np.concatenate(want))
    table = store.table
    for name, values in expected["columns"].items():
        assert table[name].to_pylist() == values
    assert table["prompt_len"].to_pylist() == z["prompt_len"].tolist()
    assert table["sample_index"].to_pylist() == z["rows"].tolist()
    for name in ("prompt_token_ids", "response_token_ids", "response_token_logprobs", "response_topk_logprobs"):
        assert (name in z) == (name in table.column_names)
        if name in z:
            assert np.array_equal(np.concatenate(table[name].to_pylist()), z[name])
    attention = store.read_columns(["response_attention"])["response_attention"].to_pylist()
    assert np.array_equal(np.concatenate([np.ravel(x) for x in attention]), z["response_attention"])
    if expected["icr_scores"] == "aligned":
        assert np.array_equal(np.array(table["icr_scores"].to_pylist(), np.float32), z["icr_scores"])
    else:
        assert "icr_scores" not in table.column_names
    assert actshard.verify(golden / "capture", deep=True).ok


def test_scores_of_a_resumed_capture_are_not_assigned() -> None:
    path = GOLDEN / "hallulens_v1/resumed_capture/capture"
    with pytest.warns(actshard.ActshardWarning, match="cannot assign 2 rows of scores to 5 samples"):
        store = actshard.open(path)
    with refuses(actshard.FormatError, path / "icr_scores.npy", "cannot assign .* rows of scores"):
        store.read_columns(["icr_scores"])
    assert actshard.verify(path).codes() == {"claim"}


@pytest.mark.parametrize("format", ["saev", "lmprobe", "zarr", "pickle"])
def test_captures_become_any_format(tmp_path: Path, format: str) -> None:
    options: dict[str, Any] = {"pad": True, "dtype": "float32"} if format == "saev" else {}
    done = actshard.convert(FULL / "capture", tmp_path / "made", format, verify=True, **options)
    assert "response_attention" in " ".join(map(str, done.losses))
    store = opened(done.path)
    for i, rows in enumerate(parts_of(FULL, 2)):
        assert np.array_equal(store.sequence(i, 2)[: len(rows)], rows.view(np.float16).astype(store.dtype))
    if format == "zarr":
        assert store.table["prompt"].to_pylist() == [f"prompt {i}" for i in range(5)]
        assert store.metadata["converted_from"]["metadata"]["storage_format"] == "inference_capture_v1"
    with pytest.raises(actshard.ArgumentError, match="format must be one of saev, lmprobe, zarr, pickle"):
        actshard.convert(done.path, tmp_path / "back", "hallulens")


def change_lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def test_rows_are_found_by_sample_index(capture: Path) -> None:
    """Lines in another order, and a sample that was never committed."""
    change_lines(capture / "meta.jsonl", lambda lines: [lines[3], lines[0], lines[4]])
    store = opened(capture)
    want = parts_of(FULL, 1)
    assert [store.sequence(i, 1).view(np.uint16).tolist() for i in range(3)] == [want[i].tolist() for i in (3, 0, 4)]
    assert store.table["key"].to_pylist() == ["q3", "q0", "q4"]
    assert store.table["generation"].to_pylist() == ["answer 3 é", "answer 0 é", "answer 4 é"]
    assert "icr_scores" not in store.table.column_names


@pytest.mark.parametrize("name", ["meta.jsonl", "generation.jsonl"])
def test_a_torn_last_line_is_left_out(capture: Path, name: str) -> None:
    path = capture / name
    path.write_bytes(path.read_bytes()[:-20])
    store = opened(capture)
    assert store.warnings[-2 if name == "generation.jsonl" else 0].startswith(
        f"{name}: ignoring the last line, incomplete"
    )
    assert len(store) == (4 if name == "meta.jsonl" else 5)
    assert store.table["generation"].to_pylist()[4:] == ([] if name == "meta.jsonl" else [None])
    path.write_bytes(path.read_bytes() + b"\n")
    with refuses(actshard.FormatError, path, "line 5: expected a JSON object"):
        actshard.open(capture)


@pytest.mark.parametrize("last", [b"", b"\n"], ids=["torn", "whole"])
def test_a_broken_line_that_has_its_newline_is_refused(capture: Path, last: bytes) -> None:
    path = capture / "meta.jsonl"
    *before, broken, whole = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*before, broken.rstrip(b"}"), *([whole] if not last else [])]) + last)
    with refuses(actshard.FormatError, path, r"line \d: expected a JSON object"):
        opened(capture)


def test_a_last_line_that_lacks_only_its_newline_counts(capture: Path) -> None:
    path = capture / "meta.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(actshard.open(capture)) == 5


def test_lines_of_generations_are_joined_by_hash_and_the_last_wins(capture: Path) -> None:
    path = capture / "generation.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    again = json.loads(lines[2]) | {"generation": "again", "hallucinated": None, "prompt_len": 99}
    path.write_text("".join([*lines[::-1], json.dumps(again) + "\n"]))
    table = actshard.open(capture).table
    assert table["generation"].to_pylist() == ["answer 0 é", "answer 1 é", "again", "answer 3 é", "answer 4 é"]
    # meta.jsonl takes precedence, because later evaluations rewrite only that file.
    assert table["hallucinated"].to_pylist() == [False, True, False, True, False]
    assert table["prompt_len"].to_pylist() == [4, 6, 1, 8, 5]


def grown(capture: Path, rows: int) -> None:
    """Extends the files like numpy when a capture is resumed with more samples."""
    config = json.loads((capture / "config.json").read_text())
    for path in capture.glob("*.npy"):
        if path.name != "icr_scores.npy":
            size = path.stat().st_size // config["n_samples"]
            with path.open("r+b") as file:
                file.truncate(size * (config["n_samples"] + rows))


def test_a_capture_resumed_with_more_samples_has_more_rows_than_its_configuration(capture: Path) -> None:
    grown(capture, 3)
    change_lines(
        capture / "meta.jsonl",
        lambda lines: [
            *lines,
            json.dumps(json.loads(lines[0]) | {"sample_index": 6, "key": "q6", "prompt_len": 2}) + "\n",
        ],
    )
    store = opened(capture)
    assert store.token_counts.tolist()[5:] == [5]
    assert not store.sequence(5, 0).any()
    assert actshard.verify(capture).codes() == {"claim", "count-claim"}  # the array contains 0 tokens


@pytest.mark.parametrize(
    ("change", "error", "match", "code"),
    [
        (lambda x: x | {"sample_index": 5}, actshard.FormatError, "0 to 4, found 5", "address-out-of-range"),
        (lambda x: x | {"sample_index": 1}, actshard.FormatError, "both have sample_index 1", "duplicate-sample"),
        (lambda x: x | {"sample_index": -1}, actshard.FormatError, "sample_index", "metadata"),
        (lambda x: x | {"prompt_len": "4"}, actshard.FormatError, "prompt_len", "metadata"),
    ],
)
def test_lines_that_no_capture_has_are_refused(
    capture: Path, change: Any, error: type[Exception], match: str, code: str
) -> None:
    change_lines(capture / "meta.jsonl", lambda lines: [json.dumps(change(json.loads(lines[0]))) + "\n", *lines[1:]])
    with refuses(error, capture / "meta.jsonl", match):
        actshard.open(capture)
    assert code in actshard.verify(capture).codes()


@pytest.mark.parametrize("name", ["response_activations.npy", "prompt_len.npy", "response_attention.npy"])
def test_files_of_other_sizes_are_refused(capture: Path, name: str) -> None:
    path = capture / name
    whole = path.read_bytes()
    for data, code in ((whole[:-2], "truncated"), (whole + b"xy", "format")):
        path.write_bytes(data)
        found = actshard.verify(capture)
        assert code in found.codes()
        if name == "response_activations.npy":
            with pytest.raises(actshard.ActshardError, match=name):
                actshard.open(capture)


def test_scores_of_two_files_in_one_are_refused(capture: Path) -> None:
    path = capture / "icr_scores.npy"
    path.write_bytes(path.read_bytes() * 2)
    store = opened(capture)
    with refuses(actshard.FormatError, path, "concatenated .npy files are unsupported"):
        store.read_columns(["icr_scores"])
    assert not actshard.verify(capture).ok


def test_lengths_in_both_places_are_compared(capture: Path) -> None:
    lengths = np.fromfile(capture / "response_len.npy", "<i4")
    lengths[3] += 1
    lengths.tofile(capture / "response_len.npy")
    (finding,) = actshard.verify(capture).findings
    assert (finding.code, finding.place) == ("count-claim", "line 4, field 'response_len'")


def test_arrays_may_be_missing(capture: Path) -> None:
    for name in ("prompt_activations", "response_attention", "response_topk_logprobs", "response_len"):
        (capture / f"{name}.npy").unlink()
    with pytest.warns(actshard.ActshardWarning, match="expected the array") as warned:
        store = actshard.open(capture)
    assert [warning.message.code for warning in warned] == ["missing-file"] * 4
    z = np.load(FULL / "expected.npz")
    assert store.token_counts.tolist() == z["response_lengths"].tolist()
    with pytest.raises(actshard.NotStoredError, match="response_attention"):
        store.read_columns(["response_attention"])
    assert actshard.verify(capture).codes() == {"missing-file"}
    (capture / "response_activations.npy").unlink()
    bare = opened(capture)
    assert (bare.layers, bare.table["key"].to_pylist()) == ((), [f"q{i}" for i in range(5)])


def test_a_capture_without_samples_is_an_empty_dataset(capture: Path) -> None:
    (capture / "meta.jsonl").write_text("")
    store = opened(capture)
    assert len(store) == 0
    assert store.table.num_rows == 0
    assert list(store.stream(0, 4)) == []


def test_a_damaged_header_of_scores_is_an_error_of_ours(capture: Path) -> None:
    """numpy parses the header with Python's tokenizer, which raises its own exception."""
    path = capture / "icr_scores.npy"
    data = path.read_bytes()
    for at in range(10, 128):
        for bit in (0, 3, 5):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            with warnings.catch_warnings(), contextlib.suppress(actshard.ActshardError):
                warnings.simplefilter("ignore")  # unreadable scores are left out with a warning
                actshard.open(capture)


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_samples_that_were_committed_are_read_while_the_capture_is_written(io: str, capture: Path) -> None:
    store = opened(capture, io)
    rows = [store.sequence(i, 0) for i in range(len(store))]
    written = [time.time_ns() + 10**9] * 2
    for array in capture.glob("*_activations.npy"):
        with array.open("ab") as file:
            file.write(bytes(len(array.read_bytes())))
        os.utime(array, ns=(written[0], written[1]))
    assert all(np.array_equal(store.sequence(i, 0), want) for i, want in enumerate(rows))


def label_lines(capture: Path, *labels: object) -> None:
    """Gives the samples labels."""
    for path in capture.rglob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**line, "label": labels[i]}) + "\n" for i, line in enumerate(lines)))


@pytest.mark.parametrize("once", [2, 1_000], ids=["a batch at a time", "several"])
def test_labels_whose_type_changes_in_a_later_batch_are_converted_or_named_as_they_are(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, once: int
) -> None:
    """lmprobe stores other labels than integers as text: the message named the text. Several batches raised an ArrowTypeError."""
    monkeypatch.setattr(read, "_BATCH", 2)
    monkeypatch.setattr(planning, "_COLUMNS_AT_ONCE", once)
    count = max(len(path.read_text().splitlines()) for path in capture.rglob("*.jsonl"))
    label_lines(capture, *[1] * 2, *[1.5] * (count - 2))
    if once == 2:
        named = r"'label': expected int64, as in earlier examples, found double"
        with pytest.raises(actshard.ArgumentError, match=named):
            actshard.convert(capture, tmp_path / "to", "lmprobe")
    else:
        stored = actshard.open(actshard.convert(capture, tmp_path / "to", "lmprobe").path)
        assert stored.table["label"].to_pylist()[1:4] == ["1.0", "1.5", "1.5"]
    label_lines(capture, *[1.5] * count)
    stored = actshard.open(actshard.convert(capture, tmp_path / "floats", "lmprobe").path)
    assert set(stored.table["label"].to_pylist()) == {"1.5"}
    label_lines(capture, *["a"] * 2, *[1] * (count - 2))
    with pytest.raises(actshard.ArgumentError, match=r"'label': expected (values of one type|string, as before)"):
        actshard.convert(capture, tmp_path / "mixed", "npy")
