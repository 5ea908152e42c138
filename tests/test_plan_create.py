"""Guarantees of actshard.plan.create: every example once and in order, whatever process wrote it, and whatever was killed."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard.plan import creating
from actshard.plan.book import Book
from conftest import refuses

LAYERS, WIDTH, TOKENS, N = [3, 7], 8, 3, 23
OPTIONS: dict[str, dict[str, Any]] = {
    "saev": {"max_tokens_per_shard": 4 * 2 * TOKENS},
    "lmprobe": {"shard_bytes": 300, "storage": "full_sequence"},
    "zarr": {"chunk_tokens": 3},
    "pickle": {"shard_bytes": 1500},
}
ROWS = (".bin", ".safetensors", ".gz")
DATA = np.random.default_rng(0).standard_normal((N, 2, TOKENS, WIDTH)).astype(np.float32)


def planned(path: Path, format: str = "zarr", tasks: int = 3, **more: Any) -> creating.CreatePlan:
    asked = {"layers": LAYERS, "d_model": WIDTH, "num_examples": N, "dtype": "float32", "tokens_per_example": TOKENS}
    return actshard.plan.create(path, format, tasks=tasks, **{**asked, **OPTIONS[format], **more})


def columns(format: str, n: int) -> dict[str, Any] | None:
    return None if format == "saev" else {"label": [n]}


def write(plan: creating.CreatePlan, task: int, upto: int = N) -> None:
    with plan.writer(task) as writer:
        for n in writer.left[:upto]:
            writer.append(DATA[n : n + 1], columns=columns(plan.arguments["format"], n))


def check(path: Path) -> None:
    store = actshard.open(path)
    assert len(store) == N
    for e in range(N):
        for k, layer in enumerate(LAYERS):
            assert np.array_equal(store.sequence(e, layer), DATA[e, k])
    if store.format != "saev":
        assert store.table["label"].to_pylist() == list(range(N))
    assert actshard.verify(path, deep=True).findings == []
    assert not list(path.rglob(".actshard")) + list(path.rglob(".parts"))


def rows_in(path: Path) -> dict[str, bytes]:
    """The files of rows of a dataset; the others have the time of writing."""
    files = [p for p in path.rglob("*") if p.suffix in ROWS or (p.parent.name == "activations" and p.name[0] != ".")]
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


@pytest.mark.slow
@pytest.mark.parametrize("format", OPTIONS)
def test_any_number_of_tasks_in_any_order_gives_every_example_once(tmp_path: Path, format: str) -> None:
    for tasks in (1, 2, 3, 7, 1000):
        path = tmp_path / f"d{tasks}"
        plan = planned(path, format, tasks)
        assert [n for task in range(len(plan)) for n in plan.examples(task)] == list(range(N))
        sizes = [len(plan.examples(task)) for task in range(len(plan))]
        assert max(sizes) - min(sizes) <= 1
        assert len(plan) == min(tasks, N)
        assert any("23 examples" in note for note in plan.notes) == (tasks > N)
        order = random.Random(tasks).sample(range(len(plan)), len(plan))
        for task in order:
            write(plan, task)
            write(plan, task)  # nothing is left
        assert plan.status().done == tuple(range(len(plan)))
        with refuses(actshard.UnfinishedError, path):
            actshard.open(path)
        made = plan.commit()
        check(made)
        assert plan.commit() == made
        write(plan, 0)
        assert not plan.work.exists()
        files = [p for p in made.rglob("*") if p.is_file()]
        of_label = 2 * len(plan) if format == "zarr" else 0  # columns are not known before
        assert plan.predicted.files + of_label == len(files)
        written = sum(map(len, rows_in(made).values()))
        if format != "pickle":  # whose arrays compress, and have opcodes around them
            assert abs(plan.predicted.bytes - written) <= 0.01 * written


@pytest.mark.parametrize("format", OPTIONS)
def test_the_result_is_that_of_parts_and_merge(tmp_path: Path, format: str) -> None:
    plan = planned(tmp_path / "a", format)
    for task in range(3):
        write(plan, task)
        with actshard.create(
            tmp_path / "b", format, layers=LAYERS, d_model=WIDTH, dtype="float32", part=(task, 3), **OPTIONS[format]
        ) as writer:
            for n in plan.examples(task):
                writer.append(DATA[n : n + 1], columns=columns(format, n))
    assert rows_in(plan.commit()) == rows_in(actshard.merge(tmp_path / "b"))


@pytest.mark.slow
@pytest.mark.parametrize("format", OPTIONS)
def test_tasks_at_default_options_write_all_examples_and_what_is_predicted(tmp_path: Path, format: str) -> None:
    asked: dict[str, Any] = {"layers": LAYERS, "d_model": WIDTH, "dtype": "float32", "num_examples": N}
    with actshard.create(tmp_path / "one", format, **asked) as writer:
        writer.append(DATA, columns=None if format == "saev" else {"label": list(range(N))})
    for tasks in (1, 3, N):
        plan = actshard.plan.create(tmp_path / f"d{tasks}", format, tasks=tasks, tokens_per_example=TOKENS, **asked)
        for task in range(len(plan)):
            write(plan, task)
        made = plan.commit()
        check(made)
        written = sum(map(len, rows_in(made).values()))
        assert abs(plan.predicted.bytes - written) <= 0.01 * written or format == "pickle"
        assert plan.predicted.scratch <= plan.predicted.bytes
        if (
            format == "saev"
        ):  # whose shards have one size, which is that of all examples if there are few: tasks see only theirs
            (one,) = (tmp_path / "one").iterdir()
            assert rows_in(made) == rows_in(one)
            assert made.name == one.name  # a hash of the metadata


def test_tasks_begin_with_shards_where_they_stay_equal(tmp_path: Path) -> None:
    n = 4 * 40 + 2
    plan = planned(tmp_path / "d", "saev", tasks=2, num_examples=n)
    assert [plan.examples(task) for task in range(2)] == [range(80), range(80, n)]
    for task in (1, 0):
        with plan.writer(task) as writer:
            writer.append(np.ones((len(writer.left), 2, TOKENS, WIDTH), np.float32))
    inodes = {p.stat().st_ino for p in (tmp_path / "d/.parts").rglob("acts*.bin")}
    assert {p.stat().st_ino for p in plan.commit().glob("acts*.bin")} == inodes  # nothing was copied
    few = planned(tmp_path / "e", "saev", tasks=4, num_examples=18)  # five shards for four tasks
    assert [len(few.examples(task)) for task in range(4)] == [4, 5, 4, 5]


def test_a_disk_that_is_too_small_is_told_before_a_task_runs(tmp_path: Path) -> None:
    with refuses(actshard.DiskFullError, tmp_path / "d", "expected room for"):
        planned(tmp_path / "d", "saev", num_examples=1 << 50, tasks=1000)
    unequal = planned(tmp_path / "d", "saev", num_examples=18, tasks=4)
    assert 0 < unequal.predicted.scratch < unequal.predicted.bytes  # shards that the commit copies together
    assert planned(tmp_path / "d", "saev", num_examples=16, tasks=4).predicted.scratch == 0


def test_a_plan_is_data(tmp_path: Path) -> None:
    plan = planned(tmp_path / "d", metadata={"model_id": "m"})
    again = actshard.plan.load(plan.save(tmp_path / "plan.json"))
    assert type(again) is creating.CreatePlan
    assert again == plan == planned(tmp_path / "d", metadata={"model_id": "m"})
    assert again.id != planned(tmp_path / "d", metadata={"model_id": "other"}).id
    assert not (tmp_path / "d").exists()  # nothing was written
    write(plan, 1)
    assert planned(tmp_path / "d", metadata={"model_id": "m"}) == again  # by the next process, when a task has begun
    assert again.status().done == (1,)
    with pytest.raises(actshard.OutOfRangeError, match="0 to 2, found 3"):
        again.writer(3)


@pytest.mark.slow
@pytest.mark.parametrize("format", OPTIONS)
def test_killed_processes_lose_and_repeat_nothing(tmp_path: Path, format: str) -> None:
    first = {"saev": 3, "lmprobe": 14, "zarr": 18, "pickle": 22}[format]
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("plan_kills.py")), "create", format]
    done = subprocess.run(
        [*command, str(tmp_path / "w"), str(first), "26"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["killed"] == 2


def _share(path: Path, environment: dict[str, str]) -> None:
    import os

    os.environ.update(environment)
    plan = planned(path, tasks=5)
    for task in plan.mine():
        write(plan, task)


def test_processes_at_once_share_the_tasks(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("forkserver")
    each = [{"RANK": str(i), "WORLD_SIZE": "2"} for i in range(2)]
    started = [spawn.Process(target=_share, args=(tmp_path / "d", environment)) for environment in each]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0
    check(planned(tmp_path / "d", tasks=5).commit())


def test_a_plan_that_another_process_begins_at_this_moment_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path / "d")
    write(plan, 0)
    looks = iter([False])  # the first look came before the other process began
    whole = Book.exists
    monkeypatch.setattr(Book, "exists", lambda book: next(looks, None) is None and whole(book))
    assert planned(tmp_path / "d") == plan
    assert next(looks, None) is None


def test_a_task_has_one_writer_at_a_time(tmp_path: Path) -> None:
    plan = planned(tmp_path / "d")
    with plan.writer(1) as writer:
        writer.append(DATA[writer.left[0]][None], columns={"label": [0]})
        assert [a.task for a in plan.status().running] == [1]
        code = (
            "import actshard, sys\n"
            "try:\n    actshard.plan.load(sys.argv[1]).writer(1)\n"
            "except actshard.LockedError as error:\n    print(error)\n"
        )
        file = plan.save(tmp_path / "plan.json")
        told = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(file)], capture_output=True, text=True, check=False
        )
        assert "another writer is writing here: process" in told.stdout, told
        for n in writer.left:
            writer.append(DATA[n][None], columns={"label": [n]})
    assert plan.status().done == (1,)


def test_an_interrupted_task_goes_on_after_its_committed_examples(tmp_path: Path) -> None:
    plan = planned(tmp_path / "d")
    with pytest.raises(KeyError), plan.writer(2) as writer:  # noqa: PT012 -- the block is what is interrupted
        for n in writer.left[:3]:
            writer.append(DATA[n][None], columns={"label": [n]})
        raise KeyError("a model's error")
    status = plan.status()
    assert "task 2: KeyError" in str(status.failed[2])
    assert status.missing == (0, 1)
    with plan.writer(2) as writer:
        assert writer.committed == 3
        assert writer.left == plan.examples(2)[3:]
        for n in writer.left:
            writer.append(DATA[n][None], columns={"label": [n]})
    assert not plan.status().failed
    write(plan, 0)
    write(plan, 1)
    check(plan.commit())


def test_a_task_with_other_than_its_examples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d"
    plan = planned(path)
    with refuses(actshard.ArgumentError, None, r"task 1: expected examples 7 to 14 \(8\), found 2 appended.*from 9$"):
        write(plan, 1, upto=2)
    with refuses(actshard.ArgumentError, None, "expected 8, found 9 more"), plan.writer(1) as writer:
        writer.append(DATA[:9], columns={"label": [0] * 9})
    with pytest.raises(actshard.UnfinishedError, match=r"2 missing \(0, 2\), 1 failed \(1\)"):
        plan.commit()
    for task in range(3):
        write(plan, task)
    part = path / ".parts/part-00001-of-00003"
    part.rename(tmp_path / "kept")
    with refuses(actshard.UnfinishedError, path / ".parts", "part 1 missing"):
        plan.commit()
    with actshard.create(tmp_path / "other", "zarr", layers=LAYERS, d_model=WIDTH, chunk_tokens=3) as writer:
        writer.append(DATA[:5], columns={"label": [0] * 5})
    (tmp_path / "other").rename(part)
    with refuses(actshard.FormatError, part, r"task 1: expected examples 7 to 14 \(8\), found 5; remove"):
        plan.commit()
    (part).rename(tmp_path / "gone")
    (tmp_path / "kept").rename(part)
    check(plan.commit())


def test_nothing_else_is_made_where_a_plan_makes_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "d"
    plan = planned(path)
    write(plan, 0)
    asked: dict[str, Any] = {"layers": LAYERS, "d_model": WIDTH}
    for part in ((1, 3), (0, 2)):
        with refuses(actshard.UnfinishedError, path, plan.work.name):
            actshard.create(path, "zarr", part=part, **asked)
    with refuses(actshard.UnfinishedError, path, plan.work.name):
        planned(path, tasks=4)
    with refuses(actshard.UnfinishedError, path, plan.work.name):
        actshard.merge(path)
    begun = planned(tmp_path / "e")
    begun.begin()  # a task has begun, and written nothing
    with refuses(actshard.UnfinishedError, begun.path, begun.work.name):
        actshard.open(begun.path)
    with refuses(actshard.UnfinishedError, begun.path, begun.work.name):
        actshard.create(begun.path, "zarr", **asked)


@pytest.mark.parametrize("format", OPTIONS)
def test_a_dataset_that_is_there_is_refused_or_accepted(tmp_path: Path, format: str) -> None:
    path = tmp_path / "d"
    plan = planned(path, format)
    for task in range(3):
        write(plan, task)
    made = plan.commit()
    with refuses(actshard.ExistsError, made, "exist_ok=True"):
        planned(path, format)
    again = planned(path, format, exist_ok=True)
    assert again.status().committed
    assert again.commit() == made
    with again.writer(2) as writer:
        assert writer.complete
        assert not writer.left
    if format != "saev":  # whose folder holds several dumps
        with pytest.raises(actshard.ExistsError):
            planned(path, format, num_examples=N + 1, exist_ok=True)
    with actshard.create(
        tmp_path / "e", format, part=(0, 2), layers=LAYERS, d_model=WIDTH, **OPTIONS[format]
    ) as writer:
        writer.append(DATA[:2])
    with refuses(actshard.ExistsError, tmp_path / "e", "parts of another dataset"):
        planned(tmp_path / "e", format)


def test_formats_without_parts_are_refused(tmp_path: Path) -> None:
    for format in ("hf_arrow", "npy", "safetensors", "deepspec", "automodel", "speculators"):
        with refuses(actshard.ArgumentError, None, f"format: {format} .*lmprobe, .*actshard.convert"):
            actshard.plan.create(tmp_path / "d", format, layers=[0], d_model=8, num_examples=4, tasks=2)
    with refuses(actshard.ArgumentError, None, "format must be one of"):
        actshard.plan.create(tmp_path / "d", "csv", layers=[0], d_model=8, num_examples=4, tasks=2)
    for name in ("tasks", "num_examples"):
        with refuses(actshard.ArgumentError, None, f"{name}: expected"):
            planned(tmp_path / "d", **{name: 0})
    assert not (tmp_path / "d").exists()


CAPTURE = """
import numpy as np
DATA = np.random.default_rng(0).standard_normal((23, 2, 3, 8)).astype(np.float32)

def capture(writer, examples):
    for n in examples:
        writer.append(DATA[n][None], columns={"label": [n]})

def short(writer, examples):
    capture(writer, examples[1:])

def fails(writer, examples):
    raise ZeroDivisionError(f"example {examples[0]}")

def late(writer, examples):
    assert len(examples), "nothing is left"
    capture(writer, examples)
    raise ZeroDivisionError("after the last example")
"""


def test_engines_run_a_capture_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_capture.py").write_text(CAPTURE)
    monkeypatch.syspath_prepend(tmp_path)
    import my_capture  # type: ignore[import-not-found]  # written above

    plan = planned(tmp_path / "d", capture="my_capture:capture")
    assert plan == planned(tmp_path / "d", capture=my_capture.capture)
    assert plan.run(1)["value"]["examples"] == [7, 15]
    assert plan.run(1) == plan.run(1)
    check(actshard.run(plan))
    assert plan.run(0)["committed"]
    with pytest.raises(actshard.TasksFailedError, match=r"task 0: .*examples 0 to 6 \(7\), found 6"):
        actshard.run(planned(tmp_path / "e", capture="my_capture:short"))
    plan = planned(tmp_path / "f", capture="my_capture:fails")
    with pytest.raises(actshard.TasksFailedError, match=r"task 1: .*example 7") as told:
        actshard.run(plan, keep_going=True)
    assert sorted(told.value.errors) == [0, 1, 2]
    plan = planned(tmp_path / "g", capture="my_capture:late")
    for task in range(len(plan)):
        with pytest.raises(actshard.InternalError, match="after the last"):
            plan.run(task)
    check(actshard.run(plan))
    for name, why in (
        ("my_capture:lost", "no attribute 'lost'"),
        ("not_there:x", "No module"),
        ("my_capture:DATA", "ndarray"),
    ):
        plan = planned(tmp_path / why, capture=name)
        with pytest.raises(actshard.ArgumentError, match=why):
            plan.run(0)
    for wrong in ("my_capture", "a:b:c", "a b:c", lambda writer, examples: None, 3, ""):
        with refuses(actshard.ArgumentError, None, "capture: expected"):
            planned(tmp_path / "h", capture=wrong)
    with refuses(actshard.ArgumentError, None, r"no capture=.*plan.writer\(2\)"):
        planned(tmp_path / "h").run(2)


def test_the_script_of_the_page_about_writing_runs_as_written(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/writing.md").read_text()
    script = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "plan.mine()" in block)
    states = np.random.default_rng(0).standard_normal((1000, 2, 3, 64)).astype(np.float32)
    names: dict[str, Any] = {"actshard": actshard, "path": tmp_path / "d", "states_of": lambda batch: states[batch]}
    exec(script, names)
    store = actshard.open(tmp_path / "d")
    assert len(store) == 1000
    assert np.array_equal(store.sequence(999, 8), states[999, 1])
