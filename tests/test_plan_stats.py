"""Planned statistics have the bits of one process, for any number of tasks."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actshard
from actshard.looking.stats import Stats, Sums
from conftest import GOLDEN
from shell import run_script

ARRAYS = ("mean", "variance", "min", "max", "nan", "inf")
LEAF = 65_536


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of five leaves and a bit, with NaN and infinite values around the leaves' borders."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((2, 5 * LEAF + 100, 4)).astype(np.float32) * 1000
    for at in range(LEAF, rows.shape[1], LEAF):
        rows[0, at - 1, 1], rows[0, at, 2], rows[1, at, 3] = np.nan, np.inf, -np.inf
    path = tmp_path_factory.mktemp("stats") / "source"
    with actshard.create(path, "npy", layers=[0, 1], d_model=4) as writer:
        writer.append([rows[:, i : i + 5000] for i in range(0, rows.shape[1], 5000)])
    np.save(path.with_name("rows.npy"), rows)
    return path


def file_of(path: Path, layer: int) -> Path:
    return next(file for file in sorted(path.rglob("*.npy")) if str(layer) in file.stem)


def in_tasks(plan: actshard.plan.Plan, seed: int = 0) -> Any:
    order = list(range(len(plan)))
    random.Random(seed).shuffle(order)
    for task in order:
        plan.run(task)
    return plan.commit()


def same_bits(a: Stats, b: Stats) -> bool:
    alike = all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in ARRAYS)
    norms = np.array([a.mean_norm]).tobytes() == np.array([b.mean_norm]).tobytes()
    alike = alike and (a.zeros == b.zeros).all() and a.summary.as_plain() == b.summary.as_plain()
    return alike and norms and (a.rows, a.layer) == (b.rows, b.layer)


@pytest.mark.slow
def test_any_number_of_tasks_has_the_bits_of_one_process(source: Path, tmp_path: Path) -> None:
    store = actshard.open(source)
    expected = {layer: store.stats(layer) for layer in store.layers}
    assert len(expected) == 2
    for tasks in (1, 2, 3, 7, 1000):
        plan = actshard.plan.stats(source, tasks=tasks, work=tmp_path / f"w{tasks}")
        assert len(plan) == min(tasks, 12)
        assert bool(plan.notes) == (tasks == 1000)
        sizes = [task["bytes"] for task in plan.tasks]
        assert sum(sizes) == plan.predicted.read == (5 * LEAF + 100) * 4 * 4 * 2
        found = in_tasks(plan, tasks)
        assert found.keys() == expected.keys()
        assert all(same_bits(found[layer], expected[layer]) for layer in expected), tasks
        again = plan.commit()
        assert all(same_bits(again[layer], expected[layer]) for layer in expected), "kept"
        assert plan.status().committed
        assert not plan.work.exists()
    with np.errstate(invalid="ignore"):
        values = np.load(source.with_name("rows.npy"))[0].astype(np.float64)
        finite = np.where(np.isfinite(values), values, np.nan)
        np.testing.assert_allclose(expected[store.layers[0]].mean, np.nanmean(finite, axis=0), rtol=1e-9)
        np.testing.assert_allclose(expected[store.layers[0]].variance, np.nanvar(finite, axis=0), rtol=1e-9)


@pytest.mark.parametrize(
    ("bad", "dtype"), [(np.nan, "float32"), (np.inf, "float32"), (-np.inf, "bfloat16"), (1.7e308, "float64")]
)
@pytest.mark.parametrize("rows", [[], [3], [3, 4, 5], list(range(180))], ids=len)
def test_rows_whose_norms_are_not_finite(bad: float, dtype: str, rows: list[int], tmp_path: Path) -> None:
    """Of few rows, all are in the sample of repeated rows, except these."""
    values = np.random.default_rng(0).standard_normal((180, 8))
    values[rows, 2:4] = bad
    path = tmp_path / "run"
    with actshard.create(path, "safetensors", layers=[0], d_model=8, dtype=dtype) as writer:
        writer.append(values.reshape(60, 1, 3, 8).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    found = actshard.run(actshard.plan.stats(path, tasks=3, work=tmp_path / "work"))
    want = actshard.open(path).stats(0)
    assert same_bits(found[0], want)
    assert want.repeats.rows == 180 - len(rows)


@pytest.mark.slow
def test_threads_do_not_matter(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys, actshard; s = actshard.open(sys.argv[1]).stats(int(sys.argv[2]));"
        "print((s.mean.tobytes() + s.variance.tobytes()).hex(), s.mean_norm.hex())"
    )
    store = actshard.open(source)
    layer = store.layers[0]
    said = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(source), str(layer)],
            env={**os.environ, "ACTSHARD_NUM_THREADS": str(threads)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for threads in (1, 3)
    }
    found = in_tasks(actshard.plan.stats(source, layer, tasks=4, work=tmp_path / "w"))[layer]
    assert said == {f"{(found.mean.tobytes() + found.variance.tobytes()).hex()} {found.mean_norm.hex()}"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
def test_golden_datasets(tmp_path: Path) -> None:
    done = 0
    for i, path in enumerate(sorted(p for kind in GOLDEN.iterdir() for p in kind.iterdir() if p.is_dir())):
        try:
            store = actshard.open(path)
            expected = {layer: store.stats(layer) for layer in store.layers}
        except actshard.ActshardError as error:
            with pytest.raises(type(error)):
                in_tasks(actshard.plan.stats(path, work=tmp_path / f"{i}"))
            continue
        for tasks in (1, 3):
            found = in_tasks(actshard.plan.stats(path, tasks=tasks, work=tmp_path / f"{i}-{tasks}"))
            assert all(same_bits(found[layer], expected[layer]) for layer in expected), path
            assert list(found) == list(expected)
        done += bool(expected)
    assert done > 20


@pytest.mark.slow
def test_a_changed_input_is_named(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    file = file_of(copy, 1)
    plan = actshard.plan.stats(copy, tasks=3, work=tmp_path / "w")
    plan.run(0)
    before = file.stat()
    os.truncate(file, before.st_size - 16)
    with pytest.raises(actshard.ChangedInputError, match=file.name):
        plan.run(1)
    with pytest.raises(actshard.UnfinishedError, match="1 failed"):
        plan.commit()
    os.truncate(file, before.st_size)
    os.utime(file, ns=(1, before.st_mtime_ns))
    in_tasks(plan)
    plan = actshard.plan.stats(copy, tasks=3, work=tmp_path / "other")
    for task in range(3):
        plan.run(task)
    os.utime(file, ns=(1, 1))
    with pytest.raises(actshard.ChangedInputError, match=file.name):
        plan.commit()


@pytest.mark.slow
def test_results_of_other_leaves_are_refused(source: Path, tmp_path: Path) -> None:
    plan = actshard.plan.stats(source, tasks=3, work=tmp_path / "w")
    for task in range(3):
        plan.run(task)
    (plan.work / "tasks/00001/sums.npy").write_bytes((plan.work / "tasks/00000/sums.npy").read_bytes()[:-8])
    with pytest.raises(actshard.FormatError, match=r"task 1: expected 2 files of .*, as when the task finished"):
        plan.commit()


def test_arguments_are_checked_at_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(actshard.ArgumentError, match="work"):
        actshard.plan.stats(source, work=source / "w")
    with pytest.raises(actshard.ArgumentError, match="tokens"):
        actshard.plan.stats(source, tokens="some")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(actshard.LayerError):
        actshard.plan.stats(source, ["nowhere"])
    with pytest.raises(actshard.ArgumentError, match=r"store\.path"):
        actshard.plan.stats(actshard.open(source))  # type: ignore[arg-type]  # wrong on purpose
    monkeypatch.chdir(tmp_path)
    plan = actshard.plan.stats(source)
    assert plan.work == tmp_path / f".actshard-stats-{plan.id[:8]}"
    plan.save(tmp_path / "plan.json")
    assert actshard.plan.load(tmp_path / "plan.json") == plan


@settings(max_examples=50)
@given(st.data())
def test_ranges_join_in_any_grouping(data: st.DataObject) -> None:
    """Sums of ranges, kept as plain values and joined in any grouping, are those that were joined one by one."""
    count = data.draw(st.integers(1, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))

    def leaf(first: int) -> Sums:
        node = {name: rng.standard_normal(3) for name in ("mean", "squares", "min", "max")}
        node |= {name: rng.integers(0, 9, 3) for name in ("finite", "nan", "infinite", "zeros")}
        at = sorted({int(x) for x in rng.integers(0, 99, 5)})
        node |= {
            "norm_bins": [(1000 + n, 3) for n in at],
            "positions": [(n, float(rng.random()), 2) for n in at],
            "bands": [(n, 60 + n, 2) for n in at],
            "hashes": [(n, 1) for n in at],
            "largest_rows": [(float(rng.random()), first, n) for n in at],
            "largest_columns": [(n, float(rng.random()), first, n) for n in range(3)],
        }
        return Sums(3, [{"first": first, "level": 0, "rows": 9, "norms": (rng.standard_normal(), 9), **node}])

    leaves = [leaf(i) for i in range(count)]
    one = Sums(3)
    for each in leaves:
        one = one.join(each)
    parts = leaves
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        joined = parts[at].join(parts[at + 1])
        parts = [*parts[:at], Sums.of_plain(*joined.as_plain(), 3), *parts[at + 2 :]]
    assert same_bits(parts[0].stats(), one.stats())
    assert parts[0].leaves == (0, count)
    assert one.rows == 9 * count
    with pytest.raises(actshard.ArgumentError, match="an overlap"):
        one.join(leaves[0])
    with pytest.raises(actshard.ArgumentError, match="a hole"):
        one.join(leaf(count + 1))


def test_a_plan_that_was_loaded_leaves_the_function_in_its_place(tmp_path: Path) -> None:
    """In a fresh process: loading a plan imports the module of its verb."""
    script = """
import sys, actshard
actshard.plan.stats(sys.argv[1], tasks=1, work=sys.argv[2] + "/w").save(sys.argv[2] + "/plan.json")
for name in ("actshard.plan.stats", "actshard.plan.summing"):
    sys.modules.pop(name, None)
vars(actshard.plan).pop("stats")
actshard.plan.load(sys.argv[2] + "/plan.json")
print(callable(actshard.plan.stats))
"""
    with actshard.create(tmp_path / "s", "zarr", layers=[0], d_model=4) as writer:
        writer.append(np.ones((2, 1, 3, 4), np.float32))
    done = run_script(script, tmp_path / "s", tmp_path)
    assert done.stdout.split() == ["True"], done.stderr


def test_arguments_that_are_not_given_are_not_in_the_plan(source: Path, tmp_path: Path) -> None:
    """A plan that an earlier release made has the same id."""
    plan = actshard.plan.stats(source, work=tmp_path / "w")
    assert list(plan.arguments) == ["path", "format", "layout", "tokens", "ignore_labels", "layers", "save"]
    again = actshard.plan.load(plan.save(tmp_path / "plan.json"))
    assert (again.id, again.as_dict()) == (plan.id, plan.as_dict())
    assert "min_token" in actshard.plan.stats(source, min_token=1, work=tmp_path / "v").arguments
