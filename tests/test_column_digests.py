"""Digests of columns: equal for equal values in any type and cut, others for other values; in records, and in verify."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import actshard
from actshard.formats.column_digests import digests_of_columns, hashes_of
from actshard.request import RECORD, Request

ALIKE = [
    [pa.array([1, -2, None], pa.int8()), pa.array([1, -2, None]), pa.array([1.0, -2.0, None], pa.float32())],
    [pa.array([0.5, None, float("nan")], pa.float16()), pa.array([0.5, None, float("nan")])],
    [
        pa.array(["a", "", None, "\u00e9\0"]),
        pa.array(["a", "", None, "\u00e9\0"], pa.large_string()),
        pa.array(["a", "", None, "\u00e9\0"], pa.string_view()),
        pa.array(["x", "a", "", None, "\u00e9\0"])[1:],
        pa.array(["a", "", None, "\u00e9\0"]).dictionary_encode(),
    ],
    [pa.array([b"ab", None]), pa.array([b"ab", None], pa.binary(2)), pa.array([b"ab", None], pa.large_binary())],
    [
        pa.array([[1, 2], None, [3, None]]),
        pa.array([[1, 2], None, [3, None]], pa.list_(pa.int8(), 2)),
        pa.array([[9], [1, 2], None, [3, None]], pa.large_list(pa.float64()))[1:],
    ],
    [
        pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}]),
        pa.array([{"b": "x", "a": 1, "c": None}, None, {"b": "y", "a": None, "c": None}]),
    ],
    [
        pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        pa.array([[("z", 0)], [("k", 1)], None, []], pa.map_(pa.large_string(), pa.int8()))[1:],
    ],
]


@pytest.mark.parametrize("arrays", ALIKE, ids=lambda arrays: str(arrays[0].type))
def test_a_value_has_one_hash_in_every_type(arrays: list[pa.Array]) -> None:
    first, *others = map(hashes_of, arrays)
    for array, hashes in zip(arrays, [first, *others], strict=True):
        np.testing.assert_array_equal(hashes, first)
        assert ((hashes == 0) == ~array.is_valid().to_numpy(zero_copy_only=False)).all()
        np.testing.assert_array_equal(hashes_of(pa.chunked_array([array[:1], array[1:]])), first)


def key(value: Any) -> Any:
    """What makes values equal, in plain Python."""
    if isinstance(value, bool | str | bytes) or value is None:
        return (type(value).__name__, value)
    if isinstance(value, float) and (value != int(value) if np.isfinite(value) else True):
        return ("float", repr(value))
    if isinstance(value, int | float):
        return ("-0.0",) if repr(value) == "-0.0" else ("number", int(value))
    if isinstance(value, list):
        return ("list", tuple(map(key, value)))
    return ("dict", frozenset((name, key(v)) for name, v in value.items() if v is not None))


LEAVES: list[Any] = [
    st.booleans(),
    st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1),
    st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 2.0**53]),
    st.text(max_size=3),
    st.binary(max_size=3),
]


@st.composite
def columns(draw: st.DrawFn) -> list[Any]:
    leaf = st.none() | draw(st.sampled_from(LEAVES))
    shape = draw(st.sampled_from(["plain", "list", "dict", "lists", "dicts"]))
    if shape in ("list", "lists"):
        leaf = st.none() | st.lists(leaf, max_size=3)
    if shape in ("dict", "dicts"):
        leaf = st.none() | st.fixed_dictionaries({"a": leaf}, optional={"b": leaf})
    if shape == "lists":
        leaf = st.none() | st.lists(leaf, max_size=3)
    if shape == "dicts":
        leaf = st.lists(leaf, max_size=2)
    return draw(st.lists(leaf, max_size=8))


@given(values=columns(), other=columns(), cut=st.integers(0, 8))
def test_hashes_are_equal_where_values_are_and_blocks_do_not_matter(
    values: list[Any], other: list[Any], cut: int
) -> None:
    arrays = [pa.array(values), pa.array(other)]
    hashes = [hashes_of(array).tolist() for array in arrays]
    keys = {}
    for array, some in zip(arrays, hashes, strict=True):
        for value, hashed in zip(array.to_pylist(), some, strict=True):
            assert keys.setdefault(hashed, key(value)) == key(value)
    assert len(set(keys.values())) == len(keys)
    whole = digests_of_columns([pa.table({"x": arrays[0]})])
    parts = [pa.table({"x": arrays[0][:cut]}), pa.table({"x": arrays[0][cut:]})]
    assert digests_of_columns(parts) == whole


ROWS = np.arange(6 * 2 * 3 * 4, dtype=np.float32).reshape(6, 2, 3, 4)
COLUMNS = {
    "text": ["a", "b", "c", "d", "e", "f"],
    "label": np.arange(6),
    "ids": [[n, n + 1, n + 2] for n in range(6)],
    "note": [None, "x", None, "y", None, None],
}


def write(path: Path, format: str, some: slice = slice(None), **more: Any) -> Path:
    columns = {name: values[some] for name, values in COLUMNS.items()}
    with actshard.create(path, format, layers=[0, 1], d_model=4, dtype="float32", **more) as writer:
        writer.append(ROWS[some], columns=columns)
    return writer.path


@pytest.mark.parametrize("format", ["npy", "safetensors", "zarr", "lmprobe", "hf_arrow"])
def test_writers_conversions_plans_and_merges_record_digests(tmp_path: Path, format: str) -> None:
    def recorded(path: Path) -> Any:
        assert "other-columns" not in actshard.verify(path, deep=True).codes()
        record = Request.read(path)
        assert record is not None
        assert record.columns is not None
        assert list(record.columns) == list(actshard.open(path).contents.column_names)
        return record.columns

    written = recorded(write(tmp_path / "one", format))
    write(tmp_path / "npy", "npy")
    assert recorded(actshard.convert(tmp_path / "npy", tmp_path / "to", format).path) == written
    plan = actshard.plan.convert(tmp_path / "npy", tmp_path / "planned", format, tasks=3)
    assert recorded(actshard.run(plan).path) == written
    if format in ("zarr", "lmprobe"):
        for part in range(2):
            write(tmp_path / "parts", format, slice(part * 3, part * 3 + 3), part=(part, 2))
        recorded(actshard.merge(tmp_path / "parts"))


def test_odd_columns_have_digests_and_never_hinder_a_writer(tmp_path: Path) -> None:
    """Fields with dots or equal names, and types that a format reads back as others."""
    twice = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([3, 4])], ["a", "a"])
    odd = {
        "dotted": pa.array([{".a": 1}, {".a": 2}]),
        "big": pa.array([2**63, 2**64 - 1], pa.uint64()),
        "decimal": pa.array([1, None], pa.decimal256(50, 2)),
        "times": pa.array([1, 2], pa.timestamp("ms")),
    }
    for format in ("npy", "zarr", "lmprobe", "pickle", "hf_arrow"):
        for name, column in odd.items():
            path = tmp_path / f"{format}-{name}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of types that the format changes
                with actshard.create(path, format, layers=[0], d_model=4, dtype="float32") as writer:
                    writer.append(np.ones((2, 1, 3, 4), np.float32), columns={"x": column})
            assert "other-columns" not in actshard.verify(writer.path, deep=True).codes()
    assert (hashes_of(twice) != 0).all()


def test_verifying_names_columns_that_were_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "d", "npy")
    (file,) = path.rglob("*.parquet")
    table = pq.read_table(file)
    moved = table.set_column(1, "label", pa.array([1, 0, 2, 3, 4, 5]))
    changed = moved.set_column(moved.column_names.index("text"), "text", pa.array(["a", "b", "C", "d", "e", "f"]))
    pq.write_table(changed.drop_columns(["ids"]), file)
    report = actshard.verify(path, deep=True)
    found = {f.place: f.found for f in report.findings if f.code == "other-columns"}
    assert found == {
        "column 'label'": "the values in another order",
        "column 'text'": "other values",
        "column 'ids'": "no such column",
    }
    assert "other-columns" not in actshard.verify(path).codes()


@pytest.mark.parametrize("value", [[], {"a": 3}, {"a": "0"}, "x"])
def test_damaged_digests_are_refused(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "d", "npy")
    record = json.loads((path / RECORD).read_text())
    (path / RECORD).write_text(json.dumps({**record, "column_digests": value}))
    report = actshard.verify(path, deep=True)
    assert any("column_digests" in str(finding) for finding in report.errors)
    del record["column_digests"]  # of an earlier release
    (path / RECORD).write_text(json.dumps(record))
    assert actshard.verify(path, deep=True).ok
