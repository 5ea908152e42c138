"""A planned check has the report of one process, for any number of tasks."""

from __future__ import annotations

import os
import random
import shutil
import tracemalloc
from functools import reduce
from itertools import count, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from actshard.base.request import Digest
from actshard.reading.verifying.deep import first_row, joined
from conftest import GOLDEN
from test_verifying import CASES


def in_tasks(plan: actshard.plan.Plan, seed: int = 0) -> Any:
    order = list(range(len(plan)))
    random.Random(seed).shuffle(order)
    for task in order:
        plan.run(task)
    return plan.commit()


def planned(path: Path, work: Path, tasks: int) -> Any:
    plan = actshard.plan.verify(path, tasks=tasks, work=work / f"{tasks}")
    found = in_tasks(plan, tasks)
    assert plan.commit() == found, "kept"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_golden_datasets_have_the_report_of_one_process(kind: str, tmp_path: Path) -> None:
    checked = 0
    for i, path in enumerate(sorted(p for p in (GOLDEN / kind).iterdir() if p.is_dir())):
        try:
            expected = actshard.verify(path, deep=True)
        except actshard.ActshardError as error:
            with pytest.raises(type(error)):
                planned(path, tmp_path / f"{i}", 1)
            continue
        for tasks in (2, 7):
            assert planned(path, tmp_path / f"{i}", tasks) == expected, (path, tasks)
        checked += 1
    assert checked or kind in ("containers", "levanter")


@pytest.mark.parametrize("number", range(0, len(CASES), 5))
def test_broken_datasets_have_the_report_of_one_process(number: int, tmp_path: Path) -> None:
    make, damage, code = CASES[number]
    path = make(tmp_path)
    damage(path)
    expected = actshard.verify(path, deep=True)
    assert code in expected.codes()
    assert planned(path, tmp_path / "work", 3) == expected


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Odd rows on both sides of every border of tasks, a constant column, and equal examples far apart."""
    rows = np.random.default_rng(2).standard_normal((2, 40, 3, 8)).astype(np.float32)
    rows[:, :, :, 5] = 2.5
    rows[0, :20, :, 6], rows[0, 20:, :, 6] = 1.5, -1.5
    rows[0, 9, 2, 1], rows[0, 10, 0, 1], rows[1, 20, 0, 0] = np.nan, np.nan, np.inf
    rows[1, 13], rows[1, 26, 1] = 0, 3
    rows[:, 39] = rows[:, 1]
    path = tmp_path / "odd"
    with actshard.create(path, "zarr", layers=[0, 1], d_model=8) as writer:
        writer.append(list(rows.transpose(1, 0, 2, 3)))
    return path


def test_oddities_at_borders_are_counted_once(odd: Path, tmp_path: Path) -> None:
    expected = actshard.verify(odd, deep=True)
    wanted = {"nan", "infinite", "zero-row", "constant-row", "constant-dimension", "duplicate-example"}
    assert wanted <= expected.codes()
    constant = [finding.found for finding in expected.findings if finding.code == "constant-dimension"]
    assert constant == ["1 of 8 columns: 5"]
    for tasks in (1, 2, 3, 7, 1000):
        assert planned(odd, tmp_path / "work", tasks) == expected
    plan = actshard.plan.verify(odd, tasks=1000, work=tmp_path / "notes")
    assert len(plan) == 40
    assert "40 examples" in plan.notes[0]


def test_without_deep_there_is_one_task(odd: Path, tmp_path: Path) -> None:
    plan = actshard.plan.verify(odd, deep=False, work=tmp_path / "w")
    assert len(plan) == 1
    assert in_tasks(plan) == actshard.verify(odd)


def test_a_changed_input_is_named(odd: Path, tmp_path: Path) -> None:
    plan = actshard.plan.verify(odd, tasks=2, work=tmp_path / "w")
    plan.run(0)
    plan.run(1)
    file = Path(plan.inputs[0].path)
    os.utime(file, ns=(1, 1))
    with pytest.raises(actshard.ChangedInputError, match=str(file)):
        plan.commit()
    shutil.rmtree(plan.work)
    with pytest.raises(actshard.ChangedInputError, match=str(file)):
        plan.run(0)


def test_damaged_results_are_refused(odd: Path, tmp_path: Path) -> None:
    plan = actshard.plan.verify(odd, tasks=2, work=tmp_path / "w")
    plan.run(0)
    plan.run(1)
    np.save(plan.work / "tasks/00001/hashes.npy", np.zeros(3, np.uint64))
    with pytest.raises(actshard.FormatError, match=r"task 1: expected 2 files of .*, as when the task finished"):
        plan.commit()


def test_the_working_folder_is_not_in_the_dataset(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(odd)
    with pytest.raises(actshard.ArgumentError, match="pass work="):
        actshard.plan.verify(odd)


def test_a_commit_holds_the_columns_of_one_task(tmp_path: Path) -> None:
    """Memory of a commit does not depend on the number of tasks: columns of all would be 40 times those of one."""
    layers, width, n = 2, 20_000, 40
    rows = np.random.default_rng(4).standard_normal((n, layers, 1, width)).astype(np.float32)
    path = tmp_path / "wide"
    with actshard.create(path, "zarr", layers=range(layers), d_model=width) as writer:
        writer.append(rows)
    expected = actshard.verify(path, deep=True)
    plan = actshard.plan.verify(path, tasks=n, work=tmp_path / "w")
    assert len(plan) == n
    for task in range(n):
        plan.run(task)
    one = layers * 3 * width * 8
    assert plan.book.folder(0).joinpath("columns.npy").stat().st_size == pytest.approx(one, rel=0.01)
    tracemalloc.start()
    try:
        found = plan.commit()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == expected
    assert peak < 4 * one, f"{peak / one:.1f} times the columns of a task"


@settings(max_examples=100)
@given(st.data())
def test_scans_of_ranges_join_to_the_scan_of_all(data: st.DataObject) -> None:
    """Against bit operations on all rows."""
    values = st.sampled_from([0, 1, 6, 0x7F])
    rows = np.array(data.draw(st.lists(st.lists(values, min_size=3, max_size=3), min_size=1, max_size=12)), np.uint8)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    hashes = np.arange(len(rows), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    parts = []
    for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        some = rows[a:b].astype(np.uint64)
        part: dict[str, Any] = {"rows": b - a, "nan": 0, "infinite": 0, "first": rows[a:b][:1].tobytes()}
        part["magnitudes"] = np.bitwise_or.reduce(some, axis=0) if b > a else np.zeros(3, np.uint64)
        part["differences"] = np.bitwise_or.reduce(some ^ some[:1], axis=0) if b > a else np.zeros(3, np.uint64)
        part |= {name: (0, []) for name in ("nan_rows", "infinite_rows", "constant_rows")}
        zeros = [(i, 0) for i in range(a, b) if not rows[i].any()]
        part["zero_rows"] = (len(zeros), zeros)
        part["first"] = first_row(part)
        part["digests"] = (Digest.of(hashes[a:b], a),)
        parts.append(part)
    before = [{name: np.copy(x) for name, x in part.items() if isinstance(x, np.ndarray)} for part in parts]
    found = reduce(joined, parts, None)
    assert found is not None
    for part, same in zip(parts, before, strict=True):
        assert all(np.array_equal(part[name], x) for name, x in same.items()), "a task's own scan is not changed"
    total, ordered = (
        sum(int(x) * k for x, k in zip(hashes, numbers, strict=False)) % 2**64 for numbers in (repeat(1), count(1))
    )
    assert found["digests"] == (Digest(total, ordered),)
    every = rows.astype(np.uint64)
    assert found["rows"] == len(rows)
    assert found["magnitudes"].tolist() == np.bitwise_or.reduce(every, axis=0).tolist()
    assert found["differences"].tolist() == np.bitwise_or.reduce(every ^ every[:1], axis=0).tolist()
    assert found["zero_rows"] == ((~rows.any(axis=1)).sum(), [(i, 0) for i in range(len(rows)) if not rows[i].any()])


def test_a_format_that_does_not_exist_is_refused_at_once(tmp_path: Path) -> None:
    for deep in (False, True):
        with pytest.raises(actshard.ArgumentError, match="format must be one of"):
            actshard.plan.verify(GOLDEN / "lmprobe/fullseq_f32", format="zzz", deep=deep, work=tmp_path / "work")
