"""Columns that come later: read with the dataset's own, kept by every verb, and never with the rows of another dataset."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import actshard
from actshard.base.work import COLUMNS, COLUMNS_LOCK
from actshard.reading import extending
from actshard.writing.pushing.planning import choose
from conftest import GOLDEN, refuses
from served import served

LMPROBE = GOLDEN / "lmprobe/fullseq_f32"
FOLDERS = sorted(path for path in GOLDEN.glob("*/*") if path.is_dir())


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return copy_of(LMPROBE, tmp_path)


def copy_of(path: Path, to: Path) -> Path:
    shutil.copytree(path, to / "copy", symlinks=True)
    return to / "copy"


def judged(n: int) -> list[str | None]:
    return [f"judge {i}" if i % 3 else None for i in range(n)]


@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
@pytest.mark.parametrize("golden", FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_added_columns_are_read_like_those_of_the_format(golden: Path, tmp_path: Path) -> None:
    path = copy_of(golden, tmp_path)
    try:
        store = actshard.open(path)
    except actshard.ActshardError:
        return  # a token cache, or a damaged dataset
    before, n = store.table, len(store)
    findings = [finding.code for finding in actshard.verify(path).findings]
    store.extend_columns({"judge": judged(n), "place of n": np.arange(n)})
    for opened in (store, actshard.open(path)):
        assert opened.table.column_names == [*before.column_names, "judge", "place of n"]
        assert repr(opened.table.select(before.column_names).to_pydict()) == repr(
            before.to_pydict()
        )  # NaN differs from itself
        assert opened.table["judge"].to_pylist() == judged(n)
        assert opened.read_columns(["place of n", "judge"], [n - 1]).to_pylist() == [
            {"place of n": n - 1, "judge": judged(n)[n - 1]}
        ]
    assert [finding.code for finding in actshard.verify(path).findings] == findings
    backwards = actshard.open(path).filter(range(n)[::-1])
    assert backwards.table["judge"].to_pylist() == judged(n)[::-1]
    if not store.layers:
        return
    twice = actshard.concat([actshard.open(path), backwards])
    assert twice.table["judge"].to_pylist() == judged(n) + judged(n)[::-1]


@pytest.mark.parametrize(
    "name", ["lmprobe/fullseq_f32", "pickle/numpy2_proto5", "zarr/single_minimal", "containers/npy_example_files_f16"]
)
def test_a_conversion_keeps_added_columns(name: str, tmp_path: Path) -> None:
    """Of formats whose columns are read by unit, in batches and as a whole."""
    path = copy_of(GOLDEN / name, tmp_path)
    store = actshard.open(path)
    store.extend_columns({"judge": judged(len(store))})
    actshard.convert(path, tmp_path / "to", "hf_arrow")
    assert actshard.open(tmp_path / "to").table["judge"].to_pylist() == judged(len(store))
    plan = actshard.plan.convert(path, tmp_path / "planned", "hf_arrow", tasks=2)
    for task in range(len(plan)):
        plan.run(task)
    plan.commit()
    assert actshard.open(tmp_path / "planned").table["judge"].to_pylist() == judged(len(store))


def test_columns_are_added_one_call_after_the_other(dataset: Path) -> None:
    store = actshard.open(dataset)
    n = len(store)
    store.extend_columns({"a": np.arange(n)})
    store.extend_columns(pa.table({"b": pa.array([["x"] * (i % 3) for i in range(n)])}))
    with refuses(actshard.ExistsError, dataset, "'a'.*replace=True"):
        store.extend_columns({"c": np.arange(n), "a": np.arange(n)})
    store.extend_columns({"a": np.arange(n) + 0.5}, replace=True)
    opened = actshard.open(dataset)
    assert opened.table.column_names[-2:] == ["a", "b"]
    assert opened.table["a"].to_pylist() == (np.arange(n) + 0.5).tolist()
    assert opened.table["b"].to_pylist() == [["x"] * (i % 3) for i in range(n)]
    assert opened.filter(pc.field("a") > 1).num_examples == n - 1
    assert {path.name for path in dataset.iterdir()} - {path.name for path in LMPROBE.iterdir()} == {COLUMNS}


def test_what_cannot_be_added_is_refused_and_changes_nothing(dataset: Path, tmp_path: Path) -> None:
    store = actshard.open(dataset)
    n, column = len(store), store.table.column_names[0]
    with refuses(actshard.ExistsError, dataset, f"has a column '{column}'"):
        store.extend_columns({column: np.arange(n)})
    with pytest.raises(actshard.ArgumentError, match=f"'a': expected {n} values, one per example, found {n + 1}"):
        store.extend_columns({"a": np.arange(n + 1)})
    with pytest.raises(actshard.ArgumentError, match="at least one column"):
        store.extend_columns({})
    with pytest.raises(actshard.ArgumentError, match="'a'"):
        store.extend_columns({"a": "x" * n})
    with refuses(actshard.UnsupportedError, dataset, "found a filtered one"):
        store.filter([0, 1]).extend_columns({"a": [1, 2]})
    with pytest.raises(actshard.UnsupportedError, match="found a joined one"):
        actshard.concat([store, store.filter([0])]).extend_columns({"a": np.arange(n + 1)})
    one_file = actshard.open(GOLDEN / "hf_arrow/nla_base_merged_f32/base.parquet")
    with pytest.raises(actshard.UnsupportedError, match="expected a folder"):
        one_file.extend_columns({"a": np.arange(len(one_file))})
    assert {path.name for path in dataset.iterdir()} == {path.name for path in LMPROBE.iterdir()}
    assert actshard.open(dataset).table.equals(actshard.open(LMPROBE).table)


def test_columns_of_a_dataset_that_was_replaced_are_refused(tmp_path: Path) -> None:
    """Of one with as many examples: the labels would be those of other examples."""
    path = tmp_path / "d"
    rows = np.random.default_rng(0).standard_normal((2, 5, 4, 3), np.float32)
    for values in rows:
        with actshard.create(tmp_path / "new", "hf_arrow", layers=[0], d_model=3, dtype="float32") as writer:
            writer.append(values[:, None])
        shutil.copytree(tmp_path / "new", path, dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "new")
        if not (path / COLUMNS).exists():
            actshard.open(path).extend_columns({"judge": judged(5)})
            assert actshard.open(path).table["judge"].to_pylist() == judged(5)
    store = actshard.open(path)
    assert np.array_equal(store.layer(0).rows(), rows[1].reshape(-1, 3))
    with refuses(actshard.FormatError, path / COLUMNS, "another one: the dataset was replaced"):
        store.read_columns("judge")
    with refuses(actshard.ExistsError, path / COLUMNS, "another dataset"):
        store.extend_columns({"other": judged(5)})
    assert not actshard.verify(path).ok


def test_a_damaged_file_of_columns_is_an_error(dataset: Path) -> None:
    actshard.open(dataset).extend_columns({"judge": judged(len(actshard.open(LMPROBE)))})
    data = (dataset / COLUMNS).read_bytes()
    for cut in (0, 1, 7, len(data) // 2, len(data) - 1):
        (dataset / COLUMNS).write_bytes(data[:cut])
        with refuses(actshard.FormatError, dataset / COLUMNS, "expected columns that were added"):
            actshard.open(dataset)
        assert not actshard.verify(dataset).ok


def add_and_die(path: Path, at: int) -> None:
    calls = 0
    replace = os.replace

    def dies(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments, **options)

    os.replace = dies  # type: ignore[assignment]  # replaced in this process only, which ends
    Path.replace = dies  # type: ignore[assignment,method-assign,return-value]  # likewise
    store = actshard.open(path)
    store.extend_columns({"b": np.arange(len(store))})


def test_a_killed_call_adds_nothing_and_can_be_repeated(dataset: Path) -> None:
    store = actshard.open(dataset)
    n = len(store)
    store.extend_columns({"a": np.arange(n)})
    process = multiprocessing.get_context("fork").Process(target=add_and_die, args=(dataset, 1))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert actshard.open(dataset).table.column_names == store.table.column_names
    actshard.open(dataset).extend_columns({"b": np.arange(n)})
    assert actshard.open(dataset).table["b"].to_pylist() == list(range(n))
    assert not (dataset / COLUMNS_LOCK).exists()
    assert [path.name for path in dataset.iterdir() if path.name.endswith(".part")] == []


def test_another_process_that_adds_columns_is_waited_for_by_name(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = actshard.open(dataset)
    errors: list[actshard.ActshardError] = []
    write = extending._write

    def write_while_another_tries(*arguments: Any) -> None:
        with pytest.raises(actshard.LockedError) as caught:
            actshard.open(dataset).extend_columns({"b": np.arange(len(store))})
        errors.append(caught.value)
        write(*arguments)

    monkeypatch.setattr("actshard.reading.extending._write", write_while_another_tries)
    store.extend_columns({"a": np.arange(len(store))})
    monkeypatch.undo()
    assert len(errors) == 1
    store.extend_columns({"b": np.arange(len(store))})
    assert store.table.column_names[-2:] == ["a", "b"]


def test_copies_keep_added_columns(dataset: Path, tmp_path: Path) -> None:
    store = actshard.open(dataset)
    store.extend_columns({"judge": judged(len(store))})
    assert COLUMNS in {file.name for file in choose(dataset, "", links=False)[0]}
    with served(tmp_path / "served") as server:
        shutil.copytree(dataset, server.root / "bucket/run")
        options = server.options
        remote = actshard.open("s3://bucket/run", storage_options=options)
        assert remote.table["judge"].to_pylist() == judged(len(store))
        with pytest.raises(actshard.UnsupportedError, match="Stage it"):
            remote.extend_columns({"b": np.arange(len(store))})
        actshard.stage("s3://bucket/run", tmp_path / "staged", storage_options=options)
    assert actshard.open(tmp_path / "staged").table["judge"].to_pylist() == judged(len(store))


def test_a_merge_that_would_lose_added_columns_is_refused(dataset: Path, tmp_path: Path) -> None:
    store = actshard.open(dataset)
    store.extend_columns({"judge": judged(len(store))})
    with refuses(actshard.UnsupportedError, dataset, "added to it later"):
        actshard.merge(tmp_path / "merged", [dataset, LMPROBE])
    assert not (tmp_path / "merged").exists()


def test_a_row_that_cannot_be_read_is_that_error_and_not_another_dataset(tmp_path: Path) -> None:
    """The file of the columns is right, and nobody should move it away."""
    with actshard.create(tmp_path / "d", "zarr", layers=[0, 1], d_model=4) as writer:
        writer.append(np.random.default_rng(0).standard_normal((20, 2, 3, 4)).astype(np.float32))
    actshard.open(tmp_path / "d").extend_columns({"judge": judged(20)})
    rows = tmp_path / "d/arrays/activations/0.1.0.0"
    whole = rows.read_bytes()
    rows.unlink()
    with pytest.raises(actshard.MissingFileError):
        actshard.open(tmp_path / "d").read_columns("judge")
    rows.write_bytes(whole)
    assert actshard.open(tmp_path / "d").table["judge"].to_pylist() == judged(20)


def test_columns_are_compared_with_lengths_and_rows_of_every_layer(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 2, 4, 4)).astype(np.float32)
    other_rows = rows.copy()
    other_rows[:, 1, :3] += 1
    for name, values, lengths in (("a", rows, [4, 4, 4]), ("b", other_rows, [4, 4, 4]), ("c", rows, [4, 3, 4])):
        with actshard.create(tmp_path / name, "npy", layers=[0, 1], d_model=4) as writer:
            writer.append(values, lengths=lengths)
    actshard.open(tmp_path / "a").extend_columns({"judge": judged(3)})
    for name in "bc":
        shutil.copy(tmp_path / "a" / COLUMNS, tmp_path / name / COLUMNS)
        with refuses(actshard.FormatError, tmp_path / name / COLUMNS, "those of another one"):
            actshard.open(tmp_path / name).read_columns("judge")


def test_columns_that_only_reading_finds_are_kept_and_not_replaced(tmp_path: Path) -> None:
    """A field of later lines of a Zarr store's texts is not known when the store is opened."""
    with actshard.create(tmp_path / "d", "zarr", layers=[0], d_model=2) as writer:
        writer.append(
            np.zeros((3, 1, 1, 2), np.float32), columns={"note": [{"a": 1}, {"a": 2}, {"a": 3}], "prompt": list("abc")}
        )
    before = actshard.open(tmp_path / "d").table
    store = actshard.open(tmp_path / "d")
    store.extend_columns({"judge": judged(3)})
    assert store.table.select(before.column_names).equals(before)
    with pytest.raises(actshard.ExistsError, match="'text'"):
        store.extend_columns({"text": list("xyz")})
