"""Columns of pandas and polars: stored with their values, nulls, keys and time zones."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard

pytestmark = pytest.mark.peers


def stored(path: Path, column: Any) -> list[Any]:
    with actshard.create(path, "npy", layers=[0], d_model=4) as writer:
        writer.append(np.ones((2, 1, 2, 4), np.float32), columns={"x": column})
    values: list[Any] = actshard.open(path).table["x"].to_pylist()
    return values


def test_series_of_polars_are_stored_as_they_are(tmp_path: Path) -> None:
    polars: Any = pytest.importorskip("polars")
    noon = datetime.datetime(2020, 1, 1, 12)
    for i, column in enumerate(
        [
            polars.Series([2**53 + 1, None]),
            polars.Series([True, None]),
            polars.Series([{"x": 1, "y": "q"}, {"x": None, "y": "r"}]),
            polars.Series(["u", None], dtype=polars.Categorical),
            polars.Series(["u", "v"], dtype=polars.Enum(["u", "v"])),
            polars.Series([noon, noon]).dt.replace_time_zone("Europe/Berlin"),
            polars.Series([[1, None], None]),
        ]
    ):
        assert stored(tmp_path / str(i), column) == column.to_list()
    with pytest.raises(actshard.ArgumentError, match="'x'"):
        stored(tmp_path / "wide", polars.Series([2**100, 1], dtype=polars.Int128))


def test_series_of_pandas_are_stored_as_they_are(tmp_path: Path) -> None:
    pandas: Any = pytest.importorskip("pandas")
    noon = datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC)
    for i, (column, values) in enumerate(
        [
            (pandas.Series([2**53 + 1, None], dtype="Int64"), [2**53 + 1, None]),
            (pandas.Index([2**53 + 1, None], dtype="Int64"), [2**53 + 1, None]),
            (pandas.array([2**53 + 1, None], dtype="Int64"), [2**53 + 1, None]),
            (pandas.Series([2**53 + 1, None], dtype="int64[pyarrow]"), [2**53 + 1, None]),
            (pandas.Series(["x", None]), ["x", None]),
            (pandas.Series(["x", float("nan")], dtype=object), ["x", None]),
            (pandas.Series([[1], None], dtype=object), [[1], None]),
            (pandas.Series([1, None], dtype="category"), [1, None]),
            (pandas.Series([1, 0], dtype="Sparse[int]"), [1, 0]),
            (pandas.Series(pandas.to_datetime([noon, None])), [noon, None]),
            (pandas.Series([3, 4], index=[9, 5]), [3, 4]),
        ]
    ):
        assert stored(tmp_path / str(i), column) == values
    numbers = stored(tmp_path / "nan", pandas.Series([0.5, float("nan")]))
    assert numbers[0] == 0.5
    assert np.isnan(numbers[1])


def test_a_series_of_pandas_may_be_changed_after_append(tmp_path: Path) -> None:
    pandas: Any = pytest.importorskip("pandas")
    for i, dtype in enumerate(["Int64", "int64", "Float32"]):
        column = pandas.Series([1, 2], dtype=dtype)
        with actshard.create(tmp_path / str(i), "npy", layers=[0], d_model=4) as writer:
            writer.append(np.ones((2, 1, 2, 4), np.float32), columns={"x": column})
            column[:] = 7
        assert actshard.open(tmp_path / str(i)).table["x"].to_pylist() == [1, 2]


def test_objects_and_types_of_one_library_are_refused(tmp_path: Path) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    strange = (
        polars.Series([Path("a"), Path("b")], dtype=polars.Object),
        pandas.Series(pandas.period_range("2020-01", periods=2, freq="M")),
        pandas.Series(pandas.interval_range(0, 2)),
    )
    for number, values in enumerate(strange):
        with (
            pytest.raises(actshard.ArgumentError, match="expected"),
            actshard.create(tmp_path / str(number), "pickle", layers=[0], d_model=2) as writer,
        ):
            writer.append(np.ones((2, 1, 2, 2), np.float32), columns={"c": values})
