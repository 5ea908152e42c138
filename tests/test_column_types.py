"""Columns keep their values and types: in append, in conversions, in plans; or the loss is announced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import actshard
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
@pytest.mark.parametrize("texts", [(["", ""], ["a", ""]), (["a", ""], ["", ""]), (["", None], ["a", None])])
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
