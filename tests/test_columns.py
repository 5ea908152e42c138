"""Arrow columns of numpy arrays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import actshard
from actshard.base._columns import numbers

IMPORTS = """
import sys
sys.modules.pop("pandas", None)
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            print("pandas")
sys.meta_path.insert(0, Refuses())
import actshard
actshard.plan.load(sys.argv[1]).run(0)
"""


@pytest.mark.parametrize("dtype", ["i1", "i4", "i8", "u2", "u8", "f4", "f8"])
@pytest.mark.parametrize("shape", ["contiguous", "strided", "empty"])
def test_numbers_equal_those_of_pyarrow(dtype: str, shape: str) -> None:
    values = np.arange(40).astype(dtype).reshape(20, 2)[:, 0]
    values = {"contiguous": values.copy(), "strided": values, "empty": values[:0]}[shape]
    found = numbers(values)
    found.validate(full=True)
    assert found.equals(pa.array(values))


def test_a_column_keeps_its_memory() -> None:
    found = numbers(np.arange(1000))
    again = [np.full(1000, 7) for _ in range(50)]
    assert len(again) == 50
    assert found.to_pylist() == list(range(1000))


@pytest.mark.parametrize("format", ["saev", "zarr", "lmprobe", "npy"])
def test_a_task_of_numbers_imports_no_pandas(format, tmp_path) -> None:
    """Its import takes longer than most tasks."""
    with actshard.create(tmp_path / "a", "npy", layers=[0], d_model=4) as writer:
        writer.append(np.ones((3, 1, 2, 4), np.float32))
    options = {"saev": {"dtype": "float32"}, "lmprobe": {"pooling": "all"}}
    plan = actshard.plan.convert(tmp_path / "a", tmp_path / "b", format, tasks=2, **options.get(format, {}))
    plan.save(tmp_path / "plan.json")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, tmp_path / "plan.json"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert plan.status().done == (0,)


def test_numbers_of_columns_are_arrays() -> None:
    import pyarrow as pa

    from actshard.base._columns import array_of

    parts = [pa.array([1, 2], pa.int32()), pa.array([], pa.int32()), pa.array([7, 3, 4], pa.int32()).slice(1)]
    assert array_of(parts[0]).tolist() == [1, 2]
    assert array_of(pa.chunked_array(parts)).tolist() == [1, 2, 3, 4]
    for kind in (pa.int8(), pa.uint64(), pa.float32()):
        for empty in (pa.chunked_array([], kind), pa.array([], kind)):
            assert (array_of(empty).tolist(), array_of(empty).dtype) == ([], kind.to_pandas_dtype())


def test_a_misspelt_option_names_the_nearest_argument(tmp_path: Path) -> None:
    for format, option, meant in (("lmprobe", "shard_byte", "shard_bytes"), ("zarr", "modle", "model")):
        with pytest.raises(
            actshard.ArgumentError, match=f"'{option}' is not an option of {format}; do you mean '{meant}'"
        ):
            actshard.create(tmp_path / "d", format, layers=[3], d_model=8, **{option: 3})  # type: ignore[arg-type]  # misspelt on purpose


def test_dir_has_only_public_names() -> None:
    assert {name for name in dir(actshard) if not name.startswith("__")} == set(actshard.__all__) - {"__version__"}
