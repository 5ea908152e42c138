"""Columns keep their values and types: in append, in conversions, in plans; or the loss is announced."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import pickle
import warnings
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import actshard
from actshard.base._columns import pick_rows
from actshard.formats.npy.write import NpyTarget
from actshard.formats.tables import IncompatibleTypesError, cast_exactly, common_schema, common_type
from actshard.formats.target import AllExamples, Spec
from actshard.writing.columns import Decided
from actshard.writing.converting.previewing import preview
from actshard.writing.given import _column
from conftest import refuses

WIDTH = 4


def rows(n: int) -> np.ndarray:
    return np.ones((n, 1, 2, WIDTH), np.float32)


def write(path: Path, format: str, *blocks: dict[str, Any] | None, **options: Any) -> Path:
    """Writes a dataset; each block of columns is a commit, and a shard of pickle."""
    with actshard.create(path, format, layers=[0], d_model=WIDTH, **options) as writer:
        for columns in blocks:
            n = 2 if columns is None else len(next(iter(columns.values())))
            writer.append(rows(n), columns=columns)
            writer.flush()
    return path


def texts_of(path: Path) -> list[Any] | None:
    table = actshard.open(path).table
    name = next((n for n in ("text", "prompt", "text_preview") if n in table.column_names), None)
    return None if name is None else table[name].to_pylist()


@pytest.mark.parametrize("format", ["npy", "zarr", "lmprobe", "hf_arrow", "pickle"])
@pytest.mark.parametrize(
    "texts", [(["", ""], ["a", ""]), (["a", ""], ["", ""]), (["", None], ["a", None]), ([None, None], ["a", ""])]
)
def test_empty_texts_stay_whatever_the_shards_are(format: str, texts: tuple[list[Any], ...], tmp_path: Path) -> None:
    source = write(tmp_path / "a", "pickle", *({"text": some} for some in texts))
    plan = actshard.plan.convert(source, tmp_path / "c", format, tasks=2)
    for task in range(len(plan)):
        plan.run(task)
    for result in (actshard.convert(source, tmp_path / "b", format), plan.commit()):
        assert texts_of(result.path) == [text for some in texts for text in some]
        assert not any("generated" in str(loss) for loss in result.losses)


def test_texts_of_a_dataset_without_texts_are_no_column(tmp_path: Path) -> None:
    source = write(tmp_path / "a", "pickle", None, None)
    plan = actshard.plan.convert(source, tmp_path / "c", "lmprobe", tasks=2)
    for task in range(len(plan)):
        plan.run(task)
    for result in (actshard.convert(source, tmp_path / "b", "lmprobe"), plan.commit()):
        assert [loss.what for loss in result.losses] == ["texts"]
        assert all(texts_of(result.path) or [])
    assert texts_of(actshard.convert(source, tmp_path / "d", "npy").path) is None


def test_empty_previews_of_other_formats_are_a_column(tmp_path: Path) -> None:
    source = write(tmp_path / "a", "npy", {"text_preview": ["", ""], "label": [1, 2]})
    result = actshard.convert(source, tmp_path / "b", "npy")
    assert (texts_of(result.path), result.losses) == (["", ""], ())


DTYPES = [
    *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "S3", "U3"),
    *(f"{kind}8[{unit}]" for kind in "Mm" for unit in ("s", "ms", "us", "ns")),
    "M8[D]",
]
SHAPES = [(6,), (2, 3), (3, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_numpy_column_has_the_values_of_the_array(dtype: str, order: str, shape: tuple[int, ...]) -> None:
    """Every kind, byte order and shape, with masks, and with NUL at each place of texts and bytes."""
    raw = np.random.default_rng(7).integers(0, 128, (6, 12), np.uint8)
    kind = np.dtype(dtype).kind
    if kind in "SU":
        flat = np.array([bytes(a).decode() for a in (b"a\0b", b"\0ab", b"ab\0", b"", b"\0", b"abc")]).astype(dtype)
    elif kind == "b":
        flat = raw[:, 0] > 64
    else:
        flat = np.ascontiguousarray(raw[:, : np.dtype(dtype).itemsize]).view(dtype)[:, 0]
        flat = flat.view("i8").__rshift__(33).view(dtype) if dtype == "M8[D]" else flat  # a date has 32 bits
    array = flat.reshape(shape).astype(np.dtype(dtype).newbyteorder(order))
    masked = np.ma.masked_array(array, np.arange(6).reshape(shape) == 1)
    for given in (array, array[::-1], masked):
        _, column = _column("x", given, len(given))
        found = column
        while not pa.types.is_primitive(found.type) and found.type not in (pa.string(), pa.binary()):
            found = found.flatten()
        wanted = given.reshape(-1)
        hidden = np.ma.getmaskarray(wanted)
        assert found.is_null().to_pylist() == hidden.tolist()
        if kind in "SU":
            assert [v for v in found.to_pylist() if v is not None] == np.asarray(wanted)[~hidden].tolist()
        else:
            values = found.drop_null().to_numpy(zero_copy_only=False)
            np.testing.assert_array_equal(values, np.asarray(wanted)[~hidden].astype(values.dtype))


def test_dates_beyond_32_bits_are_refused() -> None:
    with refuses(actshard.ArgumentError, None, "'x'"):
        _column("x", np.array([2**40, 5], "M8[D]"), 2)


@pytest.mark.parametrize("format", ["npy", "pickle", "lmprobe", "hf_arrow"])
def test_bytes_and_texts_with_nul_are_whole(format: str, tmp_path: Path) -> None:
    keys = {"key": np.array([b"a\0b", b"a\0c"]), "name": np.array(["a\0b", "a\0c"])}
    table = actshard.open(write(tmp_path / "d", format, keys)).table
    assert {name: table[name].to_pylist() for name in keys} == {name: a.tolist() for name, a in keys.items()}


@pytest.mark.parametrize("format", ["npy", "zarr", "lmprobe", "hf_arrow", "pickle"])
def test_columns_that_get_a_type_later_in_a_folder_whose_name_is_not_utf8(format: str, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"a\xff")
    path = write(folder / "d", format, {"x": [None, None]}, {"x": [1, 2]})
    assert actshard.open(path).table["x"].to_pylist() == [None, None, 1, 2]
    plan = actshard.plan.convert(path, folder / "e", "npy")
    with refuses(actshard.ArgumentError, plan.work, "UTF-8"):
        plan.save(tmp_path / "plan.json")
    plan.run(0)
    assert plan.commit().examples == 4


SOURCES: list[tuple[list[Any], list[Any]]] = [
    ([2**53 + 1, 5], [0.5, None]),
    ([0.5, None], [2**53 + 1, 5]),
    ([[2**53 + 1], []], [[0.5], None]),
    ([{"a": {"b": 2**60 + 1}}, None], [{"a": {"b": 0.5}}, {"a": None}]),
    ([True, False], [1, 2]),
    (["a", "b"], [1, 2]),
]


@pytest.mark.parametrize(("first", "later"), SOURCES)
def test_types_that_do_not_go_together_are_refused_when_the_second_comes(
    first: list[Any], later: list[Any], tmp_path: Path
) -> None:
    target = NpyTarget(Spec(tmp_path, (0,), WIDTH, np.dtype("f4"), {}, None, None, None, None))
    checked = Decided(target, [])
    checked.keep(checked.fit(pa.table({"x": first}), 0, alike=False))
    with refuses(actshard.ArgumentError, None, "'x'.*expected .*, as before, found"):
        checked.fit(pa.table({"x": later}), 2, alike=False)
    again = Decided(target, [pa.table({"x": first})])  # as a resumed conversion knows them
    with refuses(actshard.ArgumentError, None, "'x'.*expected .*, as before, found"):
        again.fit(pa.table({"x": later}), 2, alike=False)


@pytest.mark.parametrize(("first", "later"), SOURCES)
def test_conversions_and_their_plans_refuse_mixed_columns(first: list[Any], later: list[Any], tmp_path: Path) -> None:
    """In the source, the column is one of JSON texts."""
    source = mixed_pickle(tmp_path, first, later)
    assert all(v is None or isinstance(v, str) for v in actshard.open(source).table["x"].to_pylist())
    with refuses(actshard.ArgumentError, None, "'x'"):
        actshard.convert(source, tmp_path / "c", "npy")
    assert not (tmp_path / "c").exists()
    with refuses(actshard.ArgumentError, None, "'x'"):
        actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=2)
    assert not (tmp_path / "d").exists()


def mixed_pickle(folder: Path, first: list[Any], later: list[Any]) -> Path:
    """Two machines of pickle shards, whose columns differ in type."""
    for number, values in enumerate((first, later)):
        write(folder / "s" / f"machine_{number}", "pickle", {"x": values}, machine_id=number, total_machines=2)
    return folder / "s"


PAIRS: list[tuple[pa.Array, pa.Array, pa.DataType]] = [
    (pa.array([1, 2]), pa.array([0.5, 1.5]), pa.float64()),
    (pa.array([1, 2], pa.int8()), pa.array([3, 4], pa.int64()), pa.int64()),
    (pa.array([[1], []]), pa.array([[0.5], None]), pa.list_(pa.float64())),
    (pa.array([{"a": 1}, None]), pa.array([{"b": "x"}, {"b": None}]), pa.struct({"a": pa.int64(), "b": pa.string()})),
    (pa.array([None, None]), pa.array(["a", "b"]), pa.string()),
]


@pytest.mark.parametrize(("first", "later", "wanted"), PAIRS)
def test_every_verb_gives_two_types_the_same_type(
    first: pa.Array, later: pa.Array, wanted: pa.DataType, tmp_path: Path
) -> None:
    values = [*first.to_pylist(), *later.to_pylist()]
    filled = pa.concat_arrays([cast_exactly(x, wanted) for x in (first, later)]).to_pylist()
    for number, column in enumerate((first, later)):
        for format in ("npy", "zarr", "lmprobe"):
            write(tmp_path / format / str(number), format, {"x": column, "text": [f"{number}a", f"{number}b"]})
    source = mixed_pickle(tmp_path, first.to_pylist(), later.to_pylist())
    tables = {
        "read": actshard.open(source).table,
        "join": actshard.concat([actshard.open(tmp_path / "npy" / n) for n in "01"]).table,
        "convert": actshard.open(actshard.convert(source, tmp_path / "c", "npy").path).table,
        "merge lmprobe": actshard.open(actshard.merge(tmp_path / "l", [tmp_path / "lmprobe" / n for n in "01"])).table,
        "merge zarr": actshard.open(
            actshard.merge(tmp_path / "z", [tmp_path / "zarr" / n for n in "01"], physical=True)
        ).table,
    }
    for verb, table in tables.items():
        assert table["x"].to_pylist() == filled, (verb, values)
        assert table["x"].type == wanted, verb


SCALARS = [
    *(pa.null(), pa.bool_(), pa.int8(), pa.int64(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.string()),
    *(pa.large_string(), pa.binary(), pa.binary(3), pa.date32(), pa.timestamp("s"), pa.timestamp("ns", "UTC")),
    *(
        pa.decimal128(38),
        pa.decimal128(10, 2),
        pa.decimal256(60, 2),
        pa.duration("ms"),
        pa.time32("s"),
        pa.time64("ns"),
    ),
]
TYPES = [
    *SCALARS,
    *(pa.list_(t) for t in SCALARS),
    *(pa.list_(t, 2) for t in SCALARS[:6]),
    *(pa.large_list(t) for t in SCALARS[:6]),
    *(pa.struct({"a": t, "b": pa.int8()}) for t in SCALARS),
]


@pytest.mark.parametrize("a", TYPES, ids=str)
def test_the_common_type_is_symmetric_and_stable(a: pa.DataType) -> None:
    assert common_type(a, a) == a
    for b in TYPES:
        both = common_type(a, b)
        other = common_type(b, a)
        if both is None or other is None:
            assert both is other
            continue
        assert both.equals(other) or pa.types.is_struct(both)  # fields have the order of the first
        assert common_type(both, a) == both
        assert common_type(both, b) == both
        with contextlib.suppress(IncompatibleTypesError):
            known = common_schema(pa.schema({"x": a}), pa.schema({"x": b}), narrow=True).field("x").type
            assert common_type(known, a) == known


D = Decimal
TIME = datetime(2026, 1, 1, 2, 3, 4, 5)
COLUMNS: dict[str, pa.Array] = {
    "bool": pa.array([True, None, False, True]),
    "uint64": pa.array([0, 1, 2**64 - 1, 5], pa.uint64()),
    "float16": pa.array(np.array([1, 0.1, np.nan, np.inf], np.float16)),
    "float32": pa.array([0.1, None, np.nan, -0.0], pa.float32()),
    "decimal": pa.array([D("1.50"), D("2.00"), D("3.25"), None], pa.decimal128(10, 2)),
    "decimals, first whole": pa.array([D(1), D(2), D(3), D("1.50")], pa.decimal128(10, 2)),
    "decimals of many digits": pa.array([D("0.1"), D("2.5"), D(0), None], pa.decimal128(38, 9)),
    "decimals of 256 bits": pa.array([D("1.10"), D(2), D(3), None], pa.decimal256(50, 2)),
    "lists of decimals": pa.array([[D("0.1")], [D(2)], [], None], pa.list_(pa.decimal128(38, 9))),
    "dicts of decimals": pa.array([{"a": D("1.10")}] * 4, pa.struct([("a", pa.decimal256(50, 2))])),
    "integers of 8 bits": pa.array([-128, 127, None, 0], pa.int8()),
    "integers of 64 bits": pa.array([-(2**63), 2**63 - 1, None, 0]),
    "large integers": pa.array([D(1), D(10**30), D(3), None], pa.decimal128(38, 0)),
    "date": pa.array([TIME.date()] * 4),
    "time": pa.array([TIME.time()] * 4),
    "timestamp": pa.array([TIME] * 4, pa.timestamp("us")),
    "zone": pa.array([TIME] * 4, pa.timestamp("us", "Europe/Paris")),
    "duration": pa.array([timedelta(seconds=3)] * 4),
    "bytes": pa.array([b"\xff\x00a", b"abc", b"\\xff", None]),
    "texts as bytes": pa.array([b"a", b"b", b"", None]),
    "fixed bytes": pa.array([b"abcd"] * 4, pa.binary(4)),
    "large text": pa.array(["a", "", None, "\0x"], pa.large_string()),
    "text": pa.array(["e\u0301", "\u65e5\r\n", "\U0001f642\t", "\u2028\u0085"]),
    "lists": pa.array([[1, 2], [], None, [3, None]]),
    "lists of bytes": pa.array([[b"\xff"], [], None, [b"a"]]),
    "arrays": pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2)),
    "dicts": pa.array([{"a": 1, "b": "x"}, {"a": None, "b": None}, None, {"a": 3, "b": ""}]),
    "map": pa.array([[("k", 1)], [], None, [("k", 2)]], pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(4),
    "label": pa.array([True, False, True, False]),
}
COLUMN_FORMATS = ["npy", "safetensors", "hf_arrow", "lmprobe", "zarr", "pickle"]


def marked(value: Any) -> Any:
    """A value that equals those of the same kind only; NaN equals NaN."""
    if isinstance(value, list | tuple):
        return [marked(v) for v in value]
    if isinstance(value, dict):
        return {name: marked(v) for name, v in value.items()}
    return (type(value).__name__, repr(value))


@pytest.mark.parametrize("format", COLUMN_FORMATS)
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_kept_or_its_change_is_announced(name: str, format: str, tmp_path: Path) -> None:
    given = COLUMNS[name]
    source = write(tmp_path / "a", "npy", {name: given})
    wanted = [marked(v) for v in actshard.open(source).table[name].to_pylist()]
    assert wanted == [marked(v) for v in given.to_pylist()]
    planned = preview(source, tmp_path / "b", format)[0]
    if planned.refused is not None:
        assert name in planned.refused
        with pytest.raises(actshard.ArgumentError, match=name):
            actshard.convert(source, tmp_path / "b", format)
        with pytest.raises(actshard.ArgumentError, match=name):
            write(tmp_path / "c", format, {name: given})
        return
    result = actshard.convert(source, tmp_path / "b", format)
    changes = [loss.detail for loss in result.losses if loss.what == "columns"]
    found = actshard.open(result.path).table[name if name != "text" or format == "lmprobe" else text_name(result.path)]
    assert bool(changes) == ([marked(v) for v in found.to_pylist()] != wanted), (changes, found)
    assert [loss for loss in planned.losses if loss.what == "columns"] == [
        x for x in result.losses if x.what == "columns"
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write(tmp_path / "c", format, {name: given})
    codes = [w.message.code for w in caught if isinstance(w.message, actshard.ActshardWarning)]
    assert codes == ["column-type-changed"] * bool(changes)


def text_name(path: Path) -> str:
    names = actshard.open(path).table.column_names
    return next(n for n in ("text", "prompt", "text_preview") if n in names)


@pytest.mark.parametrize("format", ["zarr", "pickle"])
def test_a_plan_announces_changed_columns_as_the_conversion_does(format: str, tmp_path: Path) -> None:
    source = write(tmp_path / "a", "npy", {"when": COLUMNS["zone"], "n": [1, 2, 3, 4]})
    plan = actshard.plan.convert(source, tmp_path / "b", format, tasks=2)
    for task in range(len(plan)):
        plan.run(task)
    assert plan.commit().losses == actshard.convert(source, tmp_path / "c", format).losses != ()


def test_a_column_that_a_later_shard_adds_is_announced_if_it_changes(tmp_path: Path) -> None:
    source = write(tmp_path / "a", "pickle", {"n": [1, 2]}, {"n": [3, 4]})
    for shard, values in ((0, {}), (1, {"when": b"a"})):
        path = source / f"shard_{shard + 1:04}.pkl.gz"
        samples = pickle.loads(gzip.decompress(path.read_bytes()))
        for sample in samples["layer_0"]:
            sample["metadata"] |= values
        path.write_bytes(gzip.compress(pickle.dumps(samples)))
    metadata = json.loads((source / "metadata.json").read_text())
    for shard in metadata["shards"]:
        raw = (source / shard["filename"]).read_bytes()
        shard |= {"size_bytes": len(raw), "checksum": f"sha256:{hashlib.sha256(raw).hexdigest()}"}
    (source / "metadata.json").write_text(json.dumps(metadata))
    plan = actshard.plan.convert(source, tmp_path / "b", "zarr", tasks=2)
    for task in range(len(plan)):
        plan.run(task)
    for result in (plan.commit(), actshard.convert(source, tmp_path / "c", "zarr")):
        assert [loss.detail for loss in result.losses if loss.what == "columns"] == ["when: binary becomes string"]


@pytest.mark.parametrize(("kind", "change"), [(pa.string(), "x: double becomes string"), (pa.int32(), None)])
def test_what_a_writer_does_to_values_is_found_without_its_help(
    kind: pa.DataType, change: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a format of another package, say: nothing in the writer declares the change."""
    finish = NpyTarget.finish

    def changing(self: NpyTarget, examples: AllExamples) -> None:
        columns = examples.columns
        if columns is not None and "x" in columns.column_names:
            at = columns.column_names.index("x")
            columns = columns.set_column(at, "x", columns["x"].cast(kind, safe=False))
        finish(self, AllExamples(examples.lengths, columns))

    source = write(tmp_path / "a", "npy", {"x": [0.5, 1.0]})
    monkeypatch.setattr(NpyTarget, "finish", changing)
    monkeypatch.setattr("actshard.writing.columns._known", {})
    if change is not None:
        assert [x.detail for x in actshard.convert(source, tmp_path / "b", "npy").losses] == [change]
        return
    for call in (actshard.convert, actshard.plan.convert):
        with refuses(actshard.ArgumentError, None, "'x'.*different values would be equal as int32"):
            call(source, tmp_path / "b", "npy")
    with refuses(actshard.ArgumentError, None, "'x'.*different values would be equal as int32"):
        write(tmp_path / "c", "npy", {"x": [0.5, 1.0]})


@pytest.mark.parametrize("name", [".a", "[0]", "a.b", "", "\\.a"])
def test_keys_of_dicts_are_names_and_no_paths(name: str, tmp_path: Path) -> None:
    values = [{"a": 2**53 + 1, name: 0.5}, {"a": 1, name: 2.0}]
    source = write(tmp_path / "npy", "npy", {"x": values})
    for format in COLUMN_FORMATS:
        made = actshard.convert(source, tmp_path / f"c-{format}", format).path
        merged = (
            made if format in ("npy", "safetensors", "hf_arrow") else actshard.merge(tmp_path / f"m-{format}", [made])
        )
        for path in (made, merged):
            assert actshard.open(path).table["x"].to_pylist() == values


def test_digests_are_keys_of_zarr_stores(tmp_path: Path) -> None:
    keys = [hashlib.sha256(bytes([i])).digest() for i in range(250)]
    keys = [key for key in keys if 0 not in key][:200]
    source = write(tmp_path / "a", "npy", {"sample_key": keys})
    store = actshard.open(actshard.convert(source, tmp_path / "b", "zarr").path)
    assert store.table["sample_key"].to_pylist() == keys
    with refuses(actshard.ArgumentError, None, "sample_key"):
        write(tmp_path / "c", "zarr", {"sample_key": [b"\xff\0", b"a"]})


def test_a_join_of_values_that_no_type_represents_is_refused(tmp_path: Path) -> None:
    for name, values in (("a", [2**53 + 1, 1]), ("b", [0.5, 1.0])):
        write(tmp_path / name, "npy", {"x": values, "example_id": values})
    joined = actshard.concat([actshard.open(tmp_path / name) for name in "ab"])
    with refuses(actshard.ArgumentError, None, "'x'.*exactly"):
        joined.read_columns(["x"])
    with refuses(actshard.ArgumentError, tmp_path / "b", "example 0"):
        actshard.pair(tmp_path / "a", tmp_path / "b", compare=["x"])


DATE, ZONED = TIME.date(), TIME.replace(tzinfo=UTC)
CHANGED: list[list[Any]] = [
    [DATE, TIME],
    [None, DATE, TIME],
    [{"t": DATE}, None, {"t": TIME}],
    [[[DATE]], [[TIME]]],
    [ZONED, TIME],
    [TIME, ZONED],
    [TIME.time().replace(tzinfo=UTC)],
    [TIME, 1],
    [DATE, 1],
    [TIME.time(), 1],
    [timedelta(1), 1],
    [b"a", "b"],
    [np.True_, 1],
    [{b"a": 1}],
    [np.ma.array([1, 2], mask=[0, 1])],
]


@pytest.mark.parametrize("values", CHANGED, ids=repr)
def test_values_that_arrow_would_change_are_refused(values: list[Any], tmp_path: Path) -> None:
    for column in (values, np.array([*values, None], object)[:-1]):
        with refuses(actshard.ArgumentError, None, "'x': expected .* of one type, found .* stores as"):
            write(tmp_path / "d", "npy", {"x": column})


KEPT: list[list[Any]] = [
    [ZONED, ZONED.astimezone(timezone(timedelta(hours=2))), None],
    [1, 0.5, None, float("nan")],
    [D("1.5"), 1, None],
    [{"a": DATE}, None, {}, {"a": None, "b": [TIME, None]}],
    [np.float32(0.1), 0.1],
    [np.datetime64("2026-01-01T02", "us"), np.datetime64("NaT", "us")],
    [bytearray(b"a"), b"b"],
    [(1, 2), [3], None, np.array([4])],
    [np.array([1]), np.array([2.5])],
    [np.array([b"a"]), [b"b", None]],
]


@pytest.mark.parametrize("values", KEPT, ids=repr)
def test_values_of_one_type_in_other_classes_are_kept(values: list[Any], tmp_path: Path) -> None:
    table = actshard.open(write(tmp_path / "d", "npy", {"x": values})).table["x"]
    assert table.type == pa.array(values).type
    assert [marked(v) for v in table.to_pylist()] == [marked(v) for v in pa.array(values).to_pylist()]


@pytest.mark.parametrize("format", ["npy", "safetensors", "lmprobe"])
def test_a_type_that_the_writer_of_files_lacks_is_refused_by_append(format: str, tmp_path: Path) -> None:
    with actshard.create(tmp_path / "d", format, layers=[0], d_model=WIDTH) as writer:
        with refuses(actshard.ArgumentError, None, f"{format} cannot store the type"):
            writer.append(rows(2), columns={"x": pa.array([{}, {}], pa.struct([]))})
        writer.append(rows(2), columns={"x": [1, 2]})
    assert actshard.open(tmp_path / "d").table["x"].to_pylist() == [1, 2]


NESTED = {
    "texts": pa.array([f"text {i}" * (i % 5) for i in range(40)]),
    "bytes": pa.array([None if i % 7 == 0 else bytes([i]) * i for i in range(40)], pa.large_binary()),
    "lists": pa.array([None if i % 9 == 0 else [[j] * (i % 4) for j in range(i % 6)] for i in range(40)]),
    "pairs": pa.array([[i, i + 1] for i in range(40)], pa.list_(pa.int16(), 2)),
    "maps": pa.array([[(str(i), i)] * (i % 3) for i in range(40)], pa.map_(pa.string(), pa.int32())),
    "structs": pa.array([{"a": i, "b": [i] * (i % 4)} for i in range(40)]),
    "categories": pa.array([str(i % 3) for i in range(40)]).dictionary_encode(),
    "nothing": pa.nulls(40),
}


@pytest.mark.parametrize("numbers", [[], [5], [3, 4, 5], [1, 7, 39], [9, 0, 9, 39, 2]])
@pytest.mark.parametrize("chunks", [1, 3])
def test_rows_of_a_table_are_picked_in_their_order(numbers: list[int], chunks: int) -> None:
    table = pa.table(NESTED)
    table = pa.concat_tables([table.slice(first, -(-40 // chunks)) for first in range(0, 40, -(-40 // chunks))])
    rows = table.to_pylist()
    assert pick_rows(table, np.array(numbers, np.int64)).to_pylist() == [rows[number] for number in numbers]


@pytest.mark.parametrize("as_bytes", [False, True], ids=["lists", "bytes"])
def test_picked_rows_may_have_more_elements_than_32_bit_offsets_count(as_bytes: bool) -> None:
    """pyarrow's take() returns such lists with negative offsets, and raises for bytes."""
    half = 1 << 30
    offsets = np.array([0, half, half + 8], np.int32)
    values = np.zeros(half + 8, np.int8)  # the system gives pages of zeros only when they are written
    column = (
        pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(values)])
        if as_bytes
        else pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    )
    picked = pick_rows(pa.table({"values": column}), np.array([1, 0, 0, 0, 1]))
    lengths = []
    for chunk in picked["values"].chunks:
        all_offsets = np.frombuffer(chunk.buffers()[1], np.int32)
        lengths += np.diff(all_offsets[chunk.offset : chunk.offset + len(chunk) + 1]).tolist()
    assert lengths == [8, half, half, half, 8]
    picked.validate(full=True)
