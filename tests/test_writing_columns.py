"""Guarantees of create() about columns: they are stored, or rejected at the append; never when it is too late."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import actshard
from conftest import refuses

FORMATS = ("lmprobe", "zarr", "pickle")
WIDTH = 8


def rows(n: int, tokens: int = 2) -> np.ndarray:
    return np.ones((n, 1, tokens, WIDTH), np.float32)


def create(path: Path, format: str, **own: Any) -> actshard.Writer:
    return actshard.create(path, format, layers=[0], d_model=WIDTH, **own)


def values(path: Path, name: str) -> list[Any]:
    """A column. Where types differ between shards, the reader returns lists and dicts as JSON."""
    found = actshard.open(path).table[name].to_pylist()
    told = [json.loads(v) if isinstance(v, str) and v[:1] in ("[", "{") else v for v in found]
    return [int(v) if isinstance(v, Decimal) else v for v in told]


DRIFTS: list[tuple[list[Any], list[Any], list[Any]]] = [
    ([1, 0], [True, False], [5, 6]),
    ([1, 0], ["a", "b"], [None, 3]),
    ([1, 0], [0.5, 1.5], [2, 3]),
    (["a", "b"], [1, 2], ["c", None]),
    ([[1], []], [["a"], []], [[], [2, 3]]),
    ([{"a": 1}, {"a": 2}], [{"a": "x"}, {"a": "y"}], [{"a": 3, "b": 1}, None]),
    ([2**70, 1], [0.5, None], [3, 2**100]),
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("first", "bad", "good"), DRIFTS)
def test_a_column_of_another_type_is_refused_and_the_dataset_can_be_finished(
    tmp_path: Path, format: str, first: list[Any], bad: list[Any], good: list[Any]
) -> None:
    path = tmp_path / "d"
    writer = create(path, format)
    writer.append(rows(2), columns={"x": first})
    assert writer.flush() == 2
    with refuses(actshard.ArgumentError, None, "'x'.*as before"):
        writer.append(rows(2), columns={"x": bad})
    assert len(writer) == 2
    writer.append(rows(2), columns={"x": good})
    writer.abort()
    writer = create(path, format, resume=True)
    with pytest.raises(actshard.ArgumentError, match="'x'"):
        writer.append(rows(2), columns={"x": bad})
    with pytest.raises(actshard.ArgumentError, match="as before"):
        writer.append(rows(2), columns={"y": first})
    writer.append(rows(2), columns={"x": first})
    writer.close()
    found = values(path, "x")
    wanted = [*first, *good, *first]
    if isinstance(first[0], dict):
        wanted, found = ([v and {"a": v["a"], "b": v.get("b")} for v in values] for values in (wanted, found))
    assert found == wanted


@pytest.mark.parametrize("format", FORMATS)
def test_a_column_of_nothing_but_nulls_has_no_type_yet(tmp_path: Path, format: str) -> None:
    with create(tmp_path / "d", format) as writer:
        for given in ([None, None], [[], None], [[None], [1]], [[2], None]):
            writer.append(rows(2), columns={"x": given})
            writer.flush()
    assert values(tmp_path / "d", "x") == [None, None, [], None, [None], [1], [2], None]


@pytest.mark.parametrize("format", FORMATS)
def test_lists_of_nulls_are_kept(tmp_path: Path, format: str) -> None:
    given = [[None, None], [None], [], [None, None, None]]
    with create(tmp_path / "d", format) as writer:
        writer.append(rows(4), columns={"x": given, "y": [{"a": x} for x in given]})
    assert values(tmp_path / "d", "x") == given
    assert actshard.verify(tmp_path / "d", deep=True).ok


REFUSED: list[tuple[str, dict[str, Any], type[actshard.ActshardError], str]] = [
    ("lmprobe", {"num_tokens": [5, 6]}, actshard.ArgumentError, "num_tokens"),
    ("lmprobe", {"row_offset": [5, 6]}, actshard.ArgumentError, "row_offset"),
    ("lmprobe", {"label": [1, 2**40]}, actshard.ArgumentError, "32-bit"),
    ("lmprobe", {"label": [0.5, 1.0]}, actshard.ArgumentError, "32-bit integers, or text"),
    ("lmprobe", {"label": np.zeros(2, np.float32)}, actshard.ArgumentError, "32-bit integers, or text"),
    ("lmprobe", {"label": [[1], [2]]}, actshard.ArgumentError, "label"),
    ("lmprobe", {"text": [1, 2]}, actshard.ArgumentError, "expected strings"),
    ("lmprobe", {"x": [{}, {}]}, actshard.ArgumentError, "to Parquet"),
    ("lmprobe", {"logits_values": np.ones((2, 3), np.float32)}, actshard.ArgumentError, "one of them"),
    ("zarr", {"i": [3, 4]}, actshard.ArgumentError, "'i'"),
    ("zarr", {"seq_len": [99, 98]}, actshard.ArgumentError, "'seq_len' is reserved"),
    ("zarr", {"seq_len": ["a", None]}, actshard.ArgumentError, "'seq_len' is reserved"),
    ("pickle", {"shape": [1, 2]}, actshard.ArgumentError, "'shape' is reserved"),
    ("pickle", {"layers": ["a", "b"]}, actshard.ArgumentError, "'layers' is reserved"),
    ("pickle", {"text_preview": ["a", "b"], "text": ["c", "d"]}, actshard.ArgumentError, "pass only one of them"),
    ("pickle", {"prompt": ["a", "b"], "text_preview": ["c", "d"]}, actshard.ArgumentError, "pass only one of them"),
    ("pickle", {"text": [1, 2]}, actshard.ArgumentError, "expected strings"),
    ("pickle", {"text_preview": [1.5, None]}, actshard.ArgumentError, "expected strings"),
    ("zarr", {"when": np.array([1, 2], "M8[ns]")}, actshard.ArgumentError, "when"),
    ("pickle", {"when": np.array([1, 2], "M8[ns]")}, actshard.ArgumentError, "when"),
    ("pickle", {"sample_idx": [7, 7]}, actshard.ArgumentError, "7 twice"),
    ("pickle", {"sample_idx": [7, None]}, actshard.ArgumentError, "sample_idx"),
    ("pickle", {"sample_idx": [-1, 7]}, actshard.ArgumentError, "example 0: expected 0 to"),
    ("pickle", {"sample_idx": [7, 1 << 62]}, actshard.ArgumentError, "example 1: expected 0 to"),
    ("pickle", {"sample_idx": ["a", "b"]}, actshard.ArgumentError, "sample_idx"),
    ("saev", {"a": [1, 2]}, actshard.NotStoredError, "no columns"),
    ("saev", {"patch_labels": [1, 2]}, actshard.ArgumentError, "uint8"),
    ("zarr", {"x": [2**70, "a"]}, actshard.ArgumentError, "of one type"),
    ("zarr", {"x": [1, "a"]}, actshard.ArgumentError, "of one type"),
    ("zarr", {"\ud800": [1, 2]}, actshard.ArgumentError, "UTF-8"),
    ("zarr", {"x": ["\ud800", ""]}, actshard.ArgumentError, "of one type"),
    ("zarr", {"actshard.tokens": [1, 2]}, actshard.ArgumentError, "journal"),
    ("zarr", {1: [1, 2], "1": [1, 2]}, actshard.ArgumentError, "twice"),
]


@pytest.mark.parametrize(("format", "columns", "kind", "match"), REFUSED)
def test_what_a_format_cannot_hold_is_refused_by_append_and_changes_nothing(
    tmp_path: Path, format: str, columns: dict[str, Any], kind: type[actshard.ActshardError], match: str
) -> None:
    writer = create(tmp_path / "d", format)
    with refuses(kind, None, match):
        writer.append(rows(2), columns=columns)
    assert len(writer) == 0
    writer.append(rows(3))  # without columns: the rejected ones determined nothing
    writer.close()
    assert len(actshard.open(writer.path)) == 3
    assert actshard.verify(writer.path).ok


def test_a_refused_append_decides_neither_tokens_nor_type_nor_storage(tmp_path: Path) -> None:
    writer = create(tmp_path / "s", "saev")
    with pytest.raises(actshard.DtypeError):
        writer.append(rows(1, 3).astype(np.float64))
    with pytest.raises(actshard.ArgumentError):
        writer.append(rows(1, 3), labels=np.zeros((1, 9), np.uint8))
    writer.append(rows(1, 4))
    writer.close()
    assert actshard.open(writer.path).token_counts.tolist() == [4]
    writer = create(tmp_path / "l", "lmprobe")
    with pytest.raises(actshard.ArgumentError):
        writer.append(rows(1).astype(np.float16)[:, :, 0], columns={"label": [2**40]})
    writer.append(rows(1, 4))
    writer.close()
    store = actshard.open(writer.path)
    assert store.dtype == np.float32
    assert store.token_counts.tolist() == [4]


def test_numbers_of_samples_differ_over_the_whole_dataset(tmp_path: Path) -> None:
    """Also of other shards, and of an earlier writer."""
    path = tmp_path / "d"
    writer = create(path, "pickle")
    for first in range(0, 60, 3):  # more runs than are searched linearly
        writer.append(rows(3), columns={"sample_idx": [1000 - first, 1001 - first, 999 - first]})
        writer.flush()
    with refuses(actshard.ArgumentError, None, "973 twice"):
        writer.append(rows(2), columns={"sample_idx": [5, 973]})
    writer.abort()
    writer = create(path, "pickle", resume=True)
    with refuses(actshard.ArgumentError, None, "1001 twice"):
        writer.append(rows(2), columns={"sample_idx": [5, 1001]})
    writer.append(rows(2), columns={"sample_idx": [5, 4]})
    writer.close()
    assert len(set(values(path, "sample_idx"))) == 62


def test_more_than_num_examples_and_more_than_t_max_are_refused_at_once(tmp_path: Path) -> None:
    writer = create(tmp_path / "z", "zarr", num_examples=3, t_max=4)
    writer.append(rows(2))
    with refuses(actshard.ArgumentError, None, "num_examples: expected 3"):
        writer.append(rows(2))
    with refuses(actshard.ArgumentError, None, "t_max is 4.*truncate=True"):
        writer.append(rows(1, 5))
    writer.append(rows(1, 4))
    writer.close()
    with create(tmp_path / "cut", "zarr", t_max=4, truncate=True) as writer:
        writer.append(rows(2, 6))
    assert actshard.open(tmp_path / "cut").token_counts.tolist() == [4, 4]


@pytest.mark.parametrize("format", ["lmprobe", "zarr", "pickle"])
@pytest.mark.parametrize("ragged", [False, True])
def test_values_that_would_become_infinite_are_refused_unless_asked_for(
    tmp_path: Path, format: str, ragged: bool
) -> None:
    given: Any = rows(3, 2)
    given[1, 0, 1, 3] = 70_000
    given[2, 0, 0, 0] = np.inf  # was infinite before
    if ragged:
        given = list(given)
    writer = create(tmp_path / "d", format, dtype="float16")
    with refuses(actshard.DtypeError, None, "1 value .*overflow='allow'"):
        writer.append(given)
    writer.append(rows(1))
    writer.close()
    assert np.isfinite(actshard.open(tmp_path / "d").sequence(0, 0)).all()
    with create(tmp_path / "e", format, dtype="float16", overflow="allow") as writer:
        writer.append(given)
    assert np.isinf(actshard.open(tmp_path / "e").sequence(1, 0)).sum() == 1
    with refuses(actshard.ArgumentError, None, "overflow"):
        create(tmp_path / "f", format, overflow="inf")


def test_zarr_columns_are_where_the_text_has_them(tmp_path: Path) -> None:
    keys = [f"{i:064x}" for i in range(3)]
    for name, given in (("text", keys), ("bytes", np.array(keys, "S64"))):
        with create(tmp_path / name, "zarr") as writer:
            numbers = {"prompt_len": [1, 2, 3], "response_len": [0, 0, 1], "hallu_label": [0, 1, 0], "split": [0, 1, 2]}
            writer.append(
                rows(3), columns={"sample_key": given, "prompt": list("abc"), "response": list("def"), **numbers}
            )
        root = tmp_path / name
        types = {p.parent.name: json.loads(p.read_text())["dtype"] for p in root.glob("arrays/*/.zarray")}
        assert types["sample_key"] == "|S64"
        assert np.fromfile(root / "arrays/sample_key/0", "S64").tolist() == [k.encode() for k in keys]
        assert [types[n] for n in numbers] == ["<i4", "<i4", "|i1", "|i1"]
        for file, field in (("prompts", "prompt"), ("responses", "response")):
            lines = [json.loads(line) for line in (root / f"text/{file}.jsonl").read_text().splitlines()]
            assert [(x["i"], x["sample_key"]) for x in lines] == list(enumerate(keys))
            assert field in lines[0]
        store = actshard.open(root)
        assert store.warnings == ()
        assert store.table["sample_key"].to_pylist() == keys
        assert store.table["split"].to_pylist() == [0, 1, 2]
        assert actshard.verify(root, deep=True).ok


@pytest.mark.parametrize("keys", [["a" * 65, "b"], ["é", "b"], ["a\0", "b"], [None, "b"]])
def test_zarr_keys_that_are_no_64_bytes_are_lines(tmp_path: Path, keys: list[Any]) -> None:
    with create(tmp_path / "d", "zarr") as writer:
        writer.append(rows(2), columns={"sample_key": keys, "hallu_label": [0, 1000]})
    lines = [json.loads(x) for x in (tmp_path / "d/meta/sample_index.jsonl").read_text().splitlines()]
    assert [x["sample_key"] for x in lines] == keys
    table = actshard.open(tmp_path / "d").table
    assert table["sample_key"].to_pylist() == keys
    assert table["hallu_label"].to_pylist() == [0, 1000]


def test_a_column_called_as_rows_are_does_not_take_their_place(tmp_path: Path) -> None:
    with create(tmp_path / "d", "zarr") as writer:
        names = ["activations", "prompt_activations", "seq_len2", "..", "", "x" * 300]
        writer.append(rows(2), columns={name: [1, 2] for name in names})
    store = actshard.open(tmp_path / "d")
    assert np.array_equal(store.sequence(1, 0), np.ones((2, WIDTH)))
    assert all(store.table[name].to_pylist() == [1, 2] for name in names)


def test_lmprobe_finds_examples_without_a_text(tmp_path: Path) -> None:
    """lmprobe distinguishes prompts by text: with one text for all there would be one prompt."""
    with create(tmp_path / "d", "lmprobe") as writer:
        writer.append(rows(3), columns={"label": [1, 0, 1]})
    import pyarrow.parquet as pq

    index = pq.read_table(tmp_path / "d/index")
    texts = index["text"].to_pylist()
    assert len(set(texts)) == 3
    assert json.loads(index.schema.metadata[b"lmprobe:made_up"]) == ["text"]
    with create(tmp_path / "e", "lmprobe") as writer:
        writer.append(rows(2), columns={"text": ["a", "b"]})
    assert b"lmprobe:made_up" not in pq.read_table(tmp_path / "e/index").schema.metadata


def test_addresses_of_many_tokens_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """List offsets are 32-bit integers and memory is bounded, so addresses are written in parts."""
    monkeypatch.setattr(actshard.formats.lmprobe.write, "_TOKENS_AT_ONCE", 10)
    counts = [4, 5, 0, 25, 1, 1, 9, 2]
    wanted = [np.full((1, n, WIDTH), i, np.float32) for i, n in enumerate(counts)]
    most = 0
    made = actshard.formats.lmprobe.write.LmprobeTarget._token_lists

    def counting(self: Any, tokens: Any, first: int, lasts: int) -> Any:
        nonlocal most
        most = max(most, int(tokens.sum()))
        return made(self, tokens, first, lasts)

    monkeypatch.setattr(actshard.formats.lmprobe.write.LmprobeTarget, "_token_lists", counting)
    with create(tmp_path / "d", "lmprobe") as writer:
        writer.append(wanted)
    assert most == 25  # one longer example
    store = actshard.open(tmp_path / "d")
    assert all(np.array_equal(store.sequence(i, 0), w[0]) for i, w in enumerate(wanted))


def test_metadata_cannot_say_what_the_files_are(tmp_path: Path) -> None:
    for format, name in (("zarr", "layers"), ("zarr", "T_max"), ("lmprobe", "tensors"), ("lmprobe", "num_prompts")):
        with refuses(actshard.ArgumentError, None, name):
            create(tmp_path / "d", format, metadata={name: 3})


@pytest.mark.parametrize("format", ["saev", *FORMATS])
def test_metadata_that_a_reader_would_refuse_are_refused(tmp_path: Path, format: str) -> None:
    """Otherwise the finished dataset could not be opened."""
    deep: Any = []
    for _ in range(95):
        deep = [deep]
    for odd in (float("nan"), float("inf"), deep):
        with refuses(actshard.ArgumentError, None, "metadata: expected JSON values"):
            create(tmp_path / "d", format, metadata={"data": odd})


@pytest.mark.parametrize(
    "arguments",
    [
        {"columns": 5},
        {"columns": {"x": 5}},
        {"columns": pa.table([pa.array([1, 2]), pa.array([3, 4])], names=["x", "x"])},
        {"logits": 5},
        {"logits": (np.ones((2, 3)),)},
        {"logits": (np.ones((2, 3)), np.ones((2, 4)))},
        {"router": 5},
        {"router": {"a": np.ones((2, 3))}},
        {"router": {0: np.ones((2, 3)), 1: np.ones((2, 4))}},
        {"labels": "words"},
        {"labels": np.zeros((2, 0), np.uint8)},
        {"lengths": "ab"},
        {"lengths": [1]},
        {"columns": {"x": pa.array([1])}},
    ],
)
def test_arguments_of_append_that_make_no_sense_are_errors_of_ours(tmp_path: Path, arguments: dict[str, Any]) -> None:
    writer = create(tmp_path / "d", "lmprobe")
    with pytest.raises(actshard.ActshardError):
        writer.append(rows(2), **arguments)
    writer.append(rows(2))
    writer.close()
    assert actshard.verify(tmp_path / "d").ok


@pytest.mark.parametrize("format", ["saev", *FORMATS])
def test_arrays_may_be_reused_after_append(tmp_path: Path, format: str) -> None:
    """Blocks wait in memory until they are written: changing an array afterwards must not change what is written."""
    n, tokens, k = 3, 4, 2
    given: dict[str, np.ndarray] = {
        "rows": np.ones((n, 1, tokens, WIDTH), np.float32),
        "labels": np.arange(n * tokens, dtype=np.uint8).reshape(n, tokens),
    }
    own: dict[str, Any] = {"labels": given["labels"]}
    if format != "saev":  # which stores nothing else, and examples of one length only
        given |= {
            "lengths": np.array([4, 2, 3]),
            "number": np.arange(n),
            "vector": np.arange(n * k, dtype=np.float32).reshape(n, k),
            "logits": np.arange(n * k, dtype=np.float32).reshape(n, k),
            "ids": np.arange(n * k, dtype=np.int32).reshape(n, k),
            "router": np.arange(n * k, dtype=np.float32).reshape(n, k),
        }
        own |= {
            "lengths": given["lengths"],
            "columns": {"number": given["number"], "vector": given["vector"]},
            "logits": (given["logits"], given["ids"]),
            "router": {0: given["router"]},
        }

    def append(writer: actshard.Writer) -> None:
        writer.append(given["rows"], **own)

    with create(tmp_path / "kept", format, metadata={}) as kept:
        append(kept)
    with create(tmp_path / "reused", format, metadata={}) as reused:
        append(reused)
        for array in given.values():
            array[:] = 1  # a value that every array can hold, lengths included
    stores = [actshard.open(writer.path) for writer in (kept, reused)]
    for example in range(n):
        assert np.array_equal(stores[0].sequence(example, 0), stores[1].sequence(example, 0))
    assert stores[0].table.to_pydict() == stores[1].table.to_pydict()
    if format == "saev":
        assert np.array_equal(stores[0].labels[:], stores[1].labels[:])
    if format == "lmprobe":
        pairs = [*zip(*(store.logits() for store in stores), strict=True), [store.router(0) for store in stores]]
        assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("format", FORMATS)
def test_masked_values_are_nulls(tmp_path: Path, format: str) -> None:
    with create(tmp_path / "d", format) as writer:
        writer.append(rows(3), columns={"score": np.ma.masked_array([1, 2, 3], mask=[0, 1, 0])})
    assert values(tmp_path / "d", "score") == [1, None, 3]


@pytest.mark.parametrize("format", FORMATS)
def test_lists_of_nulls_inside_dicts_are_kept_when_another_field_gets_a_type(tmp_path: Path, format: str) -> None:
    """pyarrow casts such structs to invalid arrays."""
    first = [{"a": [None, None], "b": None}, {"a": [None], "b": None}]
    second = [{"a": [None, None], "b": 1}, {"a": [None], "b": 2}]
    with create(tmp_path / "d", format) as writer:
        writer.append(rows(2), columns={"facts": first})
        writer.append(rows(2), columns={"facts": second})
    assert values(tmp_path / "d", "facts") == first + second
    for i, part in enumerate((first, second)):
        with create(tmp_path / "m", format, part=(i, 2)) as writer:
            writer.append(rows(2), columns={"facts": part})
    assert values(actshard.merge(tmp_path / "m"), "facts") == first + second


class Stream:
    """Speaks numpy's protocol, which loses values, and Arrow's of streams, as a Series of polars."""

    def __init__(self, column: pa.Array) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.zeros(len(self.column))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return pa.chunked_array([self.column[:1], self.column[1:]]).__arrow_c_stream__(requested_schema)


class ArrayOfC(Stream):
    __arrow_c_stream__ = None  # type: ignore[assignment]

    def __arrow_c_array__(self, requested_schema: object = None) -> object:
        return self.column.__arrow_c_array__(requested_schema)


class ArrayOfArrow(Stream):
    __arrow_c_stream__ = None  # type: ignore[assignment]

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.Array:
        return self.column


ARROW = [
    pa.array([2**53 + 1, None, 3]),
    pa.array([True, None, False]),
    pa.array(["x", None, "z"], pa.string_view()),
    pa.array([{"a": 1, "b": 5}, {"a": 2, "b": 6}, None]),
    pa.array([{"a": 1, "b": "p"}, {"a": 2, "b": "q"}, None], pa.struct([("a", pa.int64()), ("b", pa.string_view())])),
    pa.array([["x"], [], ["y", None]], pa.large_list(pa.string_view())),
    pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.uint32()), pa.array(["u", "v"], pa.string_view())),
    pa.array([{"a": "p"}, {"a": "q"}, None], pa.struct([("a", pa.dictionary(pa.int32(), pa.string()))])),
    pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([7, None])),
    pa.array([0, None, 1], pa.timestamp("us", "Europe/Berlin")),
]


@pytest.mark.parametrize("library", [Stream, ArrayOfC, ArrayOfArrow, lambda column: column])
@pytest.mark.parametrize("column", ARROW, ids=lambda column: str(column.type)[:30])
def test_columns_of_other_libraries_are_taken_as_arrow_data(tmp_path: Path, library: Any, column: pa.Array) -> None:
    """numpy has no nulls, structs, dictionaries or time zones."""
    with create(tmp_path / "d", "npy") as writer:
        writer.append(rows(3), columns={"x": library(column)})
    assert actshard.open(tmp_path / "d").table["x"].to_pylist() == column.to_pylist()


def test_a_column_that_arrow_cannot_decode_is_an_error_of_ours(tmp_path: Path) -> None:
    column = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["a", "b"], pa.string_view()))
    writer = create(tmp_path / "d", "npy")
    with refuses(actshard.ArgumentError, None, "'x'.*run_end_encoded"):
        writer.append(rows(3), columns={"x": column})
    writer.abort()


@pytest.mark.parametrize("column", ["xyz", b"xyz", {"a": 1, "b": 2, "c": 3}, {1, 2, 3}], ids=repr)
def test_texts_dicts_and_sets_are_no_columns(tmp_path: Path, column: Any) -> None:
    """Each has three elements, but a text is one value, and the others have no values by example."""
    writer = create(tmp_path / "d", "npy")
    with refuses(actshard.ArgumentError, None, "'x'.*a list or an array of 3 values"):
        writer.append(rows(3), columns={"x": column})
    writer.abort()


MASKED: dict[str, dict[str, Any]] = {
    "activations": {"activations": np.ma.masked_array(rows(2), rows(2) == 1)},
    "list": {"activations": [np.ma.masked_array(x, x == 1) for x in rows(2)]},
    "lengths": {"lengths": np.ma.masked_array([1, 2], [0, 1])},
    "labels": {"labels": np.ma.masked_array(np.ones((2, 2), np.uint8), [[0, 1], [0, 0]])},
    "lists of labels": {"labels": [np.ma.masked_array([1, 2], [0, 1]), np.array([1, 2])]},
    "logits": {"logits": (np.ma.masked_array(np.ones((2, 1)), [[0], [1]]), np.ones((2, 1), np.int32))},
    "router": {"router": {0: np.ma.masked_array(np.ones((2, 1)), [[0], [1]])}},
}


@pytest.mark.parametrize("arguments", MASKED.values(), ids=MASKED.keys())
def test_masked_values_are_refused_where_there_are_no_nulls(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """numpy returns the numbers below a mask. A mask that masks nothing is none."""
    writer = create(tmp_path / "d", "npy")
    with refuses(actshard.ArgumentError, None, "masked value"):
        writer.append(**{"activations": rows(2), **arguments})
    writer.append(np.ma.masked_array(rows(2), False))
    writer.close()
    assert np.array_equal(actshard.open(tmp_path / "d").sequence(1, 0), rows(2)[1, 0])


def test_masked_example_numbers_are_refused(tmp_path: Path) -> None:
    with create(tmp_path / "d", "npy") as writer:
        writer.append(rows(3))
    for examples in (np.ma.masked_array([0, 1], [0, 1]), np.ma.masked_array([True] * 3, [0, 1, 0])):
        with refuses(actshard.ArgumentError, None, "examples: .*1 masked value"):
            actshard.convert(tmp_path / "d", tmp_path / "c", "npy", examples=examples)


class Borrowed:
    """A column of another library that shares memory with a numpy array."""

    def __init__(self, values: np.ndarray[Any, Any], method: str) -> None:
        exported = pa.array(values) if method == "__arrow_c_array__" else pa.chunked_array([pa.array(values)])
        setattr(self, method, getattr(exported, method))


@pytest.mark.parametrize("method", ["__arrow_c_array__", "__arrow_c_stream__"])
@pytest.mark.parametrize("format", ["npy", "lmprobe", "zarr", "pickle"])
def test_columns_of_other_libraries_are_copied_when_they_are_appended(tmp_path: Path, format: str, method: str) -> None:
    values = np.arange(3.0)
    with actshard.create(tmp_path / "a", format, layers=[0], d_model=2) as writer:
        rows = np.ones((3, 1, 2, 2), np.float32)
        writer.append(rows, columns={"weight": Borrowed(values, method), "text": ["a", "b", "c"]})
        values.fill(-7)
    assert actshard.open(tmp_path / "a").table["weight"].to_pylist() == [0.0, 1.0, 2.0]


def test_a_table_is_a_row_of_numbers_per_example(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, 2.0, 3.0], "y": [4.0, 5.0, 6.0]})
    with actshard.create(tmp_path / "a", "npy", layers=[0], d_model=2) as writer:
        writer.append(np.ones((3, 1, 2, 2), np.float32), columns={"pair": table})
    assert actshard.open(tmp_path / "a").table["pair"].to_pylist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
