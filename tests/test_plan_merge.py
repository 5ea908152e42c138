"""Guarantees of actshard.plan.merge: the bytes of actshard.merge, for any number of tasks, and whatever was killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.base.errors import ArgumentTypeError
from actshard.formats.merging import Assembled
from conftest import refuses

LAYERS, WIDTH = [3, 7], 8
SIZES = [5, 3, 7, 1, 6]
OPTIONS: dict[str, dict[str, Any]] = {
    "saev": {"max_tokens_per_shard": 4 * 2 * 3},
    "lmprobe": {"shard_bytes": 300, "storage": "full_sequence"},
    "zarr": {"chunk_tokens": 3},
    "pickle": {"shard_bytes": 1500},
}
COUNTS = (1, 2, 3, 7, 1000)
CASES = [(format, False) for format in OPTIONS] + [("zarr", True)]


@pytest.fixture(autouse=True)
def _same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    folder = Path(f"/dev/shm/actshard-{os.getpid()}-{tmp_path.name}")
    if not folder.parent.is_dir() or folder.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm as a second file system")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def parts_in(folder: Path, format: str) -> list[Path]:
    rng = np.random.default_rng(0)
    made = []
    for i, n in enumerate(SIZES):
        options = {**OPTIONS[format], **({"machine_id": i} if format == "pickle" else {})}
        lengths = [3] * n if format == "saev" else rng.integers(2, 8, n).tolist()
        with actshard.create(folder / f"part{i}", format, layers=LAYERS, d_model=WIDTH, **options) as writer:
            rows = [rng.standard_normal((2, t, WIDTH)).astype(np.float32) for t in lengths]
            extra = {"labels": np.full((n, 3), i, np.uint8)} if format == "saev" else {"columns": {"label": [i] * n}}
            writer.append(rows, **extra)
        made.append(folder / f"part{i}")
    return made


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["linked", "copied"])
@pytest.mark.parametrize(("format", "physical"), CASES)
def test_any_number_of_tasks_in_any_order_gives_the_bytes_of_one_merge(
    tmp_path: Path, request: pytest.FixtureRequest, format: str, physical: bool, apart: bool
) -> None:
    parts = parts_in(tmp_path, format)
    wanted = files(actshard.merge(tmp_path / "whole", parts, physical=physical))
    before = files(tmp_path / "part0")
    folder = request.getfixturevalue("far") if apart else tmp_path
    for tasks in COUNTS if format == "saev" or apart else (1, 3):
        plan = actshard.plan.merge(folder / f"d{tasks}", parts, tasks=tasks, physical=physical)
        copied = format == "saev" or apart
        assert len(plan) == 1 if not copied or tasks == 1 else 1 < len(plan) <= tasks
        assert (len(plan) == tasks) == (not plan.notes) or (len(plan) == 1 and not copied)
        assert sum(task["bytes"] for task in plan.tasks) == plan.predicted.read
        assert not (folder / f"d{tasks}").exists()  # nothing was written
        for task in random.Random(tasks).sample(range(len(plan)), len(plan)):
            first = plan.run(task)
            assert plan.run(task) == first
        made = plan.commit()
        merged = files(made)
        assert merged == wanted
        assert plan.commit() == made
        assert plan.run(0)["committed"]
        assert not list((folder / f"d{tasks}").rglob(".actshard"))
        assert plan.predicted.files == len(merged)
        size = sum(map(len, merged.values()))
        assert plan.predicted.exact == (not physical)
        assert plan.predicted.bytes == size if not physical else abs(plan.predicted.bytes - size) < 0.05 * size
        if not apart:
            linked = {p.stat().st_ino for part in parts for p in part.rglob("*") if p.is_file()}
            rows = [p for p in made.rglob("*") if p.suffix in (".safetensors", ".gz") or "activations/" in str(p)]
            chunks = [p for p in rows if p.name[0] != "."]
            assert all(p.stat().st_ino in linked for p in chunks)
    assert files(tmp_path / "part0") == before


def test_what_is_copied_is_divided_by_bytes(tmp_path: Path) -> None:
    parts = []
    for i in range(2):
        with actshard.create(tmp_path / f"p{i}", "saev", layers=[0], d_model=64, max_tokens_per_shard=40) as writer:
            writer.append(np.full((605 - 10 * i, 1, 4, 64), i, np.float32))
        parts.append(tmp_path / f"p{i}")
    plan = actshard.plan.merge(tmp_path / "d", parts, tasks=6)
    sizes = [task["bytes"] for task in plan.tasks]
    assert len(plan) == 6
    assert max(sizes) <= 1.05 * sum(sizes) / 6


@pytest.mark.slow
@pytest.mark.parametrize("format", OPTIONS)
def test_killed_processes_lose_and_repeat_nothing(tmp_path: Path, format: str) -> None:
    first, step = {"saev": (28, 24), "lmprobe": (29, 15), "zarr": (24, 13), "pickle": (32, 8)}[format]
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("plan_kills.py")), "merge", format]
    done = subprocess.run(
        [*command, str(tmp_path / "w"), str(first), str(step)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["killed"] >= 1


def _run(file: Path, task: int) -> None:
    actshard.plan.load(file).run(task)


def test_processes_run_tasks_at_once_and_twice(tmp_path: Path) -> None:
    parts = parts_in(tmp_path, "saev")
    plan = actshard.plan.merge(tmp_path / "d", parts, tasks=3)
    file = plan.save(tmp_path / "plan.json")
    spawn = multiprocessing.get_context("forkserver")
    started = [spawn.Process(target=_run, args=(file, task)) for task in (0, 1, 2, 1)]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0
    assert files(plan.commit()) == files(actshard.merge(tmp_path / "whole", parts))


def test_changed_parts_and_damaged_copies_are_refused(tmp_path: Path) -> None:
    parts = parts_in(tmp_path, "saev")
    plan = actshard.plan.merge(tmp_path / "d", parts, tasks=2)
    with refuses(actshard.UnfinishedError, plan.work, r"expected 2 finished tasks, found 2 missing"):
        plan.commit()
    plan.run(0)
    plan.run(1)
    copy = next(p for p in (plan.work / "tasks/00001/files").rglob("*") if p.is_file())
    os.truncate(copy, 10)
    with refuses(
        actshard.FormatError,
        copy,
        r"task 1: expected [\d,]+ bytes, found 10; remove the folder of task 1",
    ):
        plan.commit()
    shutil.rmtree(plan.work / "tasks/00001")
    plan.run(1)
    whole = next(p for p in parts[1].rglob("acts000000.bin"))
    data = whole.read_bytes()
    whole.write_bytes(data + b"\0")
    with refuses(actshard.ChangedInputError, whole, "Make the plan again"):
        plan.commit()
    assert not [p for p in (tmp_path / "d").iterdir() if p.name != ".actshard"]


def test_what_cannot_be_merged_is_refused_before_a_task_runs(tmp_path: Path) -> None:
    parts = parts_in(tmp_path, "zarr")
    with actshard.create(tmp_path / "other", "zarr", layers=LAYERS, d_model=4) as writer:
        writer.append(np.ones((1, 2, 3, 4), np.float32))
    with refuses(actshard.FormatError, tmp_path / "other", "d_model"):
        actshard.plan.merge(tmp_path / "d", [*parts, tmp_path / "other"], tasks=2)
    with refuses(actshard.ArgumentError, None, "twice"):
        actshard.plan.merge(tmp_path / "d", [parts[0], parts[0]])
    with refuses(ArgumentTypeError, None, "parts: expected a list"):
        actshard.plan.merge(tmp_path / "d", str(parts[0]))
    with refuses(ArgumentTypeError, None, "parts: expected a list"):
        actshard.plan.merge(tmp_path / "d", None)  # type: ignore[arg-type]  # what is refused
    with refuses(actshard.ExistsError, tmp_path / "part0", "found"):
        actshard.plan.merge(tmp_path / "part0", parts[1:])
    assert not (tmp_path / "d").exists()


def test_nothing_else_is_made_where_a_plan_merges(tmp_path: Path) -> None:
    parts = parts_in(tmp_path, "zarr")
    plan = actshard.plan.merge(tmp_path / "d", parts)
    plan.run(0)
    assert actshard.plan.merge(tmp_path / "d", parts) == plan
    assert actshard.plan.load(plan.save(tmp_path / "plan.json")) == plan
    for work in (
        lambda: actshard.merge(tmp_path / "d", parts),
        lambda: actshard.plan.merge(tmp_path / "d", parts[:2]),
        lambda: actshard.create(tmp_path / "d", "zarr", layers=LAYERS, d_model=WIDTH),
        lambda: actshard.plan.create(tmp_path / "d", "zarr", layers=[0], d_model=1, num_examples=2, tasks=2),
        lambda: actshard.open(tmp_path / "d"),
    ):
        with refuses(actshard.UnfinishedError, tmp_path / "d", plan.work.name):
            work()
    plan.commit()
    with refuses(actshard.ExistsError, tmp_path / "d", "found"):
        actshard.plan.merge(tmp_path / "d", parts)


def test_a_copy_has_all_its_bytes_or_no_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(10)))
    file = Assembled("x", ((tmp_path / "a", 2, 3, 1), (tmp_path / "a", 0, 2, 6)), 9)
    told: list[int] = []
    file.write(tmp_path / "x", told.append)
    assert (tmp_path / "x").read_bytes() == bytes([0, 2, 3, 4, 0, 0, 0, 1, 0])
    assert (file.bytes, told) == (5, [3, 2])
    with pytest.raises(actshard.ActshardError):
        Assembled("y", ((tmp_path / "a", 2, 30, 1),), 31).write(tmp_path / "y")
    assert not (tmp_path / "y").exists()
    Assembled("z", (), 0).write(tmp_path / "z")
    assert (tmp_path / "z").read_bytes() == b""


def _mutated(plan: Any, path: Path) -> Iterator[str]:
    """Files of the plan with one wrong value, under a hash that fits."""
    from actshard.plan.data import identity

    base = json.dumps(plan.as_dict())
    places = [("arguments", name) for name in plan.arguments] + [("tasks", name) for name in plan.tasks[0]]
    for (place, name), value in itertools.product(places, (None, -1, "x", [], [5, 2], [0, 10**30], {}, "gone")):
        made = json.loads(base)
        changed = made["arguments"] if place == "arguments" else made["tasks"][0]
        changed[name] = value
        if value == "gone":
            del changed[name]
        made["id"] = identity(made["verb"], made["arguments"], plan.inputs, made["tasks"])
        path.write_text(json.dumps(made))
        yield f"{place} {name} {value}"


def test_plans_that_others_wrote_are_refused_in_one_line(tmp_path: Path) -> None:
    parts = parts_in(tmp_path, "saev")
    plans = [
        actshard.plan.merge(tmp_path / "d", parts, tasks=2),
        actshard.plan.create(tmp_path / "e", "zarr", layers=[0], d_model=8, num_examples=9, tasks=2, capture="a:b"),
    ]
    refused = []
    for plan in plans:
        for _what in _mutated(plan, tmp_path / "plan.json"):
            try:
                loaded = actshard.plan.load(tmp_path / "plan.json")
            except actshard.ActshardError as error:
                refused.append(str(error))
                continue
            loaded.status()
            with contextlib.suppress(actshard.ActshardError):
                loaded.run(0)
            shutil.rmtree(loaded.work, ignore_errors=True)
    assert len(refused) > 150
    assert all(len(message.splitlines()) == 1 for message in refused)


@pytest.mark.slow
@pytest.mark.measures_memory
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
@pytest.mark.parametrize("format", ["saev", "lmprobe"])
def test_the_memory_of_a_task_is_predicted(tmp_path: Path, far: Path, format: str) -> None:
    plan = actshard.plan.merge(far / "d", parts_in(tmp_path, format), tasks=2)
    code = (
        "import sys\n"
        "from actshard.plan import load\n"
        "load(sys.argv[1]).run(0)\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(plan.save(tmp_path / "plan.json"))]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 10
    assert 0.8 * peak <= plan.predicted.memory <= 1.2 * peak


def test_a_working_folder_on_another_file_system_is_refused_at_once(tmp_path: Path, far: Path) -> None:
    parts = parts_in(tmp_path, "saev")
    with pytest.raises(actshard.ArgumentError, match=r"work: expected a folder on the file system of dst"):
        actshard.plan.merge(tmp_path / "d", parts, tasks=2, work=far / "w")
