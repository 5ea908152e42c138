"""A planned conversion has the bytes of one process: for any number of tasks, in any order, twice, at once, and after a kill."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import actshard
from actshard import formats
from actshard.base import work
from actshard.plan import book
from actshard.plan.book import ALIVE_SECONDS, Book
from actshard.plan.data import Planned
from actshard.reading import inputs
from actshard.writing.converting import previewing
from actshard.writing.converting.blocks import balanced
from conftest import GOLDEN
from waiting import PATIENCE

EPOCH = "SOURCE_DATE_EPOCH"


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def sources() -> Iterator[Path]:
    for folder in ("saev", "lmprobe", "zarr", "pickle", "draft"):
        for path in sorted((GOLDEN / folder).iterdir()):
            if path.is_dir():
                yield path


def ragged(path: Path, lengths: list[int], layers: int = 3, width: int = 8) -> Path:
    """A store of examples of these lengths, with ids and texts."""
    rng = np.random.default_rng(7)
    with actshard.create(path, "lmprobe", layers=range(layers), d_model=width, storage="full_sequence") as writer:
        for first in range(0, len(lengths), 50):
            some = lengths[first : first + 50]
            rows = [rng.standard_normal((layers, n, width)).astype(np.float32) for n in some]
            ids = [rng.integers(0, 1000, n).tolist() for n in some]
            writer.append(
                rows,
                columns={
                    "input_ids": ids,
                    "text": [f"t{first + i}" for i in range(len(some))],
                    "score": list(map(len, ids)),
                },
            )
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.random.default_rng(3).integers(1, 12, 200).tolist()
    return ragged(tmp_path_factory.mktemp("plan") / "source", lengths)


SMALL = {"shard_bytes": 4000}
WAYS: dict[str, dict[str, Any]] = {
    "saev": {"pad": True, **SMALL},
    "lmprobe": SMALL,
    "zarr": {"chunk_tokens": 4},
    "pickle": {"compress": False, "columns": ["input_ids"], **SMALL},
    "hf_arrow": SMALL,
    "npy": {},
    "safetensors": {},
    "deepspec": {"dtype": "bfloat16", "layers": {0: 0, 1: 4, 2: "last"}, **SMALL},
    "specforge": {"layers": {0: 0, 1: 1, 2: "last"}},
    "speculators": {"dtype": "bfloat16", "layers": {0: 0, 1: 4, 2: "last"}},
}
ONE_TASK = ("hf_arrow",)
"""Formats that one task writes."""


def in_tasks(plan: actshard.plan.Plan, seed: int = 0) -> Any:
    order = list(range(len(plan)))
    random.Random(seed).shuffle(order)
    for task in order:
        plan.run(task)
    return plan.commit()


def in_one(
    source: Path, dst: Path, format: str, plan: actshard.plan.Plan, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    monkeypatch.setenv(EPOCH, str(plan.arguments["sizes"]["created"]))
    actshard.convert(source, dst, format, **options)
    monkeypatch.delenv(EPOCH)


@pytest.mark.slow
@pytest.mark.parametrize("format", WAYS)
def test_any_number_of_tasks_writes_the_bytes_of_one_process(
    source: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = WAYS[format]
    plan = actshard.plan.convert(source, tmp_path / "x", format, tasks=1, **options)
    in_one(source, tmp_path / "one", format, plan, monkeypatch, **options)
    expected = files(tmp_path / "one")
    counts = set()
    for tasks in (1, 2, 3, 7, 1000):
        plan = actshard.plan.convert(source, tmp_path / f"d{tasks}", format, tasks=tasks, **options)
        assert len(plan) <= tasks
        counts.add(len(plan))
        done = in_tasks(plan, tasks)
        assert done.examples == 200
        assert files(tmp_path / f"d{tasks}") == expected, f"{len(plan)} tasks"
    assert (counts == {1}) == (format in ONE_TASK)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
@pytest.mark.parametrize("path", list(sources()), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_golden_datasets_are_converted_in_tasks(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        store = actshard.open(path)
    except actshard.ActshardError:
        pytest.skip("does not open")
    written = 0
    for format in formats.written():
        small = {"shard_bytes": 3000} if formats.get(format).target().takes_shard_bytes else {}
        try:
            plan = actshard.plan.convert(path, tmp_path / "x", format, tasks=1, **small)
        except actshard.ActshardError:
            continue
        in_one(path, tmp_path / f"{format}-one", format, plan, monkeypatch, **small)
        plan = actshard.plan.convert(path, tmp_path / format, format, tasks=5, **small)
        in_tasks(plan)
        assert files(tmp_path / format) == files(tmp_path / f"{format}-one"), format
        written += 1
    assert written or not store.layers or store.format in ("automodel", "deepspec", "zarr", "pickle")


def test_a_plan_is_a_function_of_its_inputs(source: Path, tmp_path: Path) -> None:
    first = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=4)
    again = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=4)
    assert first.as_dict() == again.as_dict()
    assert actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=5).id != first.id
    path = first.save(tmp_path / "plan.json")
    assert actshard.plan.load(path).as_dict() == first.as_dict()
    assert isinstance(first, Planned)
    assert not (tmp_path / "d").exists(), "planning writes nothing"


def test_tasks_are_balanced_by_bytes(tmp_path: Path) -> None:
    source = ragged(tmp_path / "s", np.random.default_rng(5).integers(1, 40, 400).tolist())
    plan = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=8)
    sizes = [task["bytes"] for task in plan.tasks]
    assert len(sizes) == 8
    assert max(sizes) <= 1.05 * sum(sizes) / 8
    assert sum(sizes) == int(actshard.open(source).token_counts.sum()) * 3 * 8 * 4


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 80), st.data())
def test_ranges_are_as_equal_as_borders_allow(weights: list[int], tasks: int, data: Any) -> None:
    given_borders = data.draw(st.sets(st.integers(1, max(1, len(weights) - 1)), max_size=len(weights)))
    borders = np.array(sorted({0} | {b for b in given_borders if b < len(weights)}), np.int64)
    firsts = balanced(np.array(weights, np.int64), borders, tasks)
    assert firsts[0] == 0
    assert firsts == sorted(set(firsts))
    assert set(firsts) <= set(borders.tolist())
    assert len(firsts) <= tasks
    if len(borders) == len(weights):
        ends = [*firsts[1:], len(weights)]
        largest = max(sum(weights[a:b]) for a, b in zip(firsts, ends, strict=True))
        assert largest <= sum(weights) / tasks + 2 * max(weights)


# -- predictions ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
@pytest.mark.parametrize("path", list(sources()), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_sizes_of_golden_conversions_are_predicted_exactly(path: Path, tmp_path: Path) -> None:
    for format in formats.written():
        try:
            plan = actshard.plan.convert(path, tmp_path / format, format, tasks=2)
        except actshard.ActshardError:
            continue
        in_tasks(plan)
        assert plan.predicted.exact
        sizes = [len(data) for data in files(tmp_path / format).values()]
        assert (plan.predicted.bytes, plan.predicted.files) == (sum(sizes), len(sizes)), format


@pytest.mark.parametrize("format", WAYS)
def test_sizes_are_predicted_from_samples(
    source: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = ragged(tmp_path / "s", np.random.default_rng(3).integers(20, 60, 400).tolist(), 3, 64)
    monkeypatch.setattr(previewing, "WHOLE_BYTES", 0)
    monkeypatch.setattr(previewing, "SAMPLE_BYTES", 3 << 20)
    options = {name: value for name, value in WAYS[format].items() if name not in ("shard_bytes", "chunk_tokens")}
    plan = actshard.plan.convert(large, tmp_path / "d", format, tasks=2, **options)
    in_tasks(plan)
    sizes = [len(data) for data in files(tmp_path / "d").values()]
    assert not plan.predicted.exact
    assert plan.predicted.bytes == pytest.approx(sum(sizes), rel=0.01)
    assert plan.predicted.files == pytest.approx(len(sizes), rel=0.01)


MEASURED = """
import sys, actshard
plan = actshard.plan.load(sys.argv[1])
plan.run(0)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.measures_memory
@pytest.mark.usefixtures("without_pandas")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's memory")
@pytest.mark.parametrize(
    ("format", "tasks"),
    [("zarr", 1), ("zarr", 9), ("pickle", 1), ("specforge", 2), ("saev", 2), ("lmprobe", 2), ("hf_arrow", 1)],
)
def test_memory_of_a_task_is_predicted(tmp_path: Path, format: str, tasks: int) -> None:
    large = ragged(tmp_path / "s", [512] * 24, 3, 1024)
    options = {**WAYS[format], "shard_bytes": None}
    plan = actshard.plan.convert(large, tmp_path / "d", format, tasks=tasks, **options)
    child = [sys.executable, "-W", "ignore", "-c", MEASURED, str(plan.save(tmp_path / "plan.json"))]
    done = subprocess.run(child, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert plan.predicted.memory == pytest.approx(int(done.stdout) * 1024, rel=0.2)


def test_a_full_disk_is_told_before_the_first_task(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 0, 100))  # type: ignore[attr-defined]
    with pytest.raises(actshard.DiskFullError, match=r"d: expected room for [\d,]+ bytes, found 100 free"):
        actshard.plan.convert(source, tmp_path / "d", "zarr")
    monkeypatch.undo()
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*free[:7], 3, *free[8:10])))
    with pytest.raises(actshard.DiskFullError, match=r"expected room for [\d,]+ files, found 3 free inodes"):
        actshard.plan.convert(source, tmp_path / "d", "zarr")


# -- again, at once, killed ----------------------------------------------------------------------------------------


def test_tasks_and_commit_may_be_repeated_at_any_time(source: Path, tmp_path: Path) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=4)
    with pytest.raises(actshard.UnfinishedError, match=r"expected 4 finished tasks, found 4 missing \(0-3\)"):
        plan.commit()
    first = plan.run(2)
    assert plan.run(2)["value"] == first["value"]
    with pytest.raises(actshard.UnfinishedError, match=r"3 missing \(0-1, 3\)"):
        plan.commit()
    done = in_tasks(plan)
    expected = files(tmp_path / "d")
    assert plan.commit().path == done.path
    assert plan.run(1)["committed"]
    assert plan.status().committed
    assert files(tmp_path / "d") == expected
    assert not (tmp_path / "d/.actshard").exists()
    with pytest.raises(actshard.ExistsError, match="already contains this dataset"):
        actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=3)


def test_a_task_looks_at_few_files_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with actshard.create(tmp_path / "s", "zarr", layers=[0], d_model=4) as writer:
        writer.append(np.ones((300, 1, 1, 4), np.float32))
    plan = actshard.plan.convert(tmp_path / "s", tmp_path / "d", "npy", tasks=1)
    assert len(plan.inputs) > 300
    looked: list[Any] = []
    at = inputs.Input.at
    monkeypatch.setattr(inputs.Input, "at", lambda file: looked.append(file) or at(file))  # type: ignore[func-returns-value]  # append is for its effect
    plan.run(0)
    assert 0 < len(looked) <= 16
    plan.commit()
    assert len(looked) > 300


@pytest.mark.parametrize("format", ["saev", "zarr", "lmprobe"])
def test_tasks_begin_while_another_process_begins_the_plan(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """One process finds no plan's folder, and looks whether it was committed; another makes the folder at that moment."""
    options = {"pad": True} if format == "saev" else {}
    plan = actshard.plan.convert(source, tmp_path / "d", format, tasks=2, **options)
    exists = Book.exists

    def begun_after(book: Book) -> bool:
        monkeypatch.setattr(Book, "exists", exists)
        plan.begin()
        return False

    for call in (plan.left, plan.status, lambda: plan.run(0)):
        shutil.rmtree(plan.work, ignore_errors=True)
        monkeypatch.setattr(Book, "exists", begun_after)
        call()
    assert 0 not in plan.left()


def test_two_attempts_at_a_task_leave_one_result(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=2)
    publish = Book.publish

    def slower(self: Book, task: int, folder: Path, record: dict[str, Any]) -> bool:
        monkeypatch.setattr(Book, "publish", publish)
        assert actshard.plan.Plan.run(plan, task)["task"] == task  # another process is faster
        return publish(self, task, folder, record)

    monkeypatch.setattr(Book, "publish", slower)
    plan.run(0)
    assert [path.name for path in (plan.work / "tasks").iterdir()] == ["00000"]
    plan.run(1)
    plan.commit()


def test_an_attempt_that_ends_after_the_commit_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=2)
    plan.run(1)
    publish = Book.publish

    def late(self: Book, task: int, folder: Path, record: dict[str, Any]) -> bool:
        monkeypatch.setattr(Book, "publish", publish)
        plan.run(0)
        plan.commit()
        (folder / "files").mkdir(parents=True)  # a writer that makes its folder again
        return publish(self, task, folder, record)

    monkeypatch.setattr(Book, "publish", late)
    plan.run(0)
    assert not (tmp_path / "d/.actshard").exists()
    actshard.open(tmp_path / "d")


TRACED = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=none", "-e")
CHILD = """
import os, sys, actshard
plan = actshard.plan.load(sys.argv[1])
if sys.argv[2] == "commit":
    plan.commit()
else:
    plan.run(int(sys.argv[2]))
"""


def killed(plan: Path, what: str, calls: int) -> bool:
    """Runs a task or the commit in a process that is killed with SIGKILL at its n-th write, rename or sync. Whether it was."""
    tracing = f"inject=rename,renameat2,write,pwrite64,pwritev,fsync,fdatasync,mkdir,unlink:signal=KILL:when={calls}"
    child = (sys.executable, "-W", "ignore", "-c", CHILD, str(plan), what)
    done = subprocess.run([*TRACED, tracing, *child], capture_output=True, timeout=PATIENCE, check=False)
    return done.returncode != 0


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


@pytest.mark.slow
@needs_strace
@pytest.mark.parametrize("format", ["zarr", "saev"])
def test_killed_tasks_and_commits_are_run_again(source: Path, tmp_path: Path, format: str) -> None:
    options = WAYS[format]
    whole = actshard.plan.convert(source, tmp_path / "whole", format, tasks=3, **options)
    in_tasks(whole)
    plan = actshard.plan.convert(source, tmp_path / "d", format, tasks=3, **options)
    path = plan.save(tmp_path / "plan.json")
    at = random.Random(format)
    killed(path, "1", at.randrange(20, 120))
    for task in range(len(plan)):
        plan.run(task)
    for _ in range(2):
        over = not killed(path, "commit", at.randrange(20, 140))
        if not over and not plan.book.exists():
            continue
        if not over:
            with pytest.raises(actshard.ActshardError):
                actshard.open(tmp_path / "d")
    plan.commit()
    assert files(tmp_path / "d") == files(tmp_path / "whole")


# -- what is refused -----------------------------------------------------------------------------------------------


def test_a_changed_input_is_named(source: Path, tmp_path: Path) -> None:
    own = shutil.copytree(source, tmp_path / "s")
    plan = actshard.plan.convert(own, tmp_path / "d", "zarr", tasks=2)
    plan.run(0)
    plan.run(1)
    shard = next(own.glob("tensors/*.safetensors"))
    os.utime(shard, ns=(1, 1))
    with pytest.raises(actshard.ChangedInputError, match=f"{shard.name}.*was written again since the plan was made"):
        plan.commit()
    shard.unlink()
    with pytest.raises(actshard.ChangedInputError, match=f"{shard.name}.*found nothing. Make the plan again"):
        plan.commit()


@pytest.mark.parametrize(
    ("name", "value"), [("tasks", []), ("verb", "verify"), ("arguments", {}), ("id", "x"), ("work", "here")]
)
def test_a_changed_plan_is_refused(source: Path, tmp_path: Path, name: str, value: Any) -> None:
    path = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=2).save(tmp_path / "plan.json")
    made = json.loads(path.read_text())
    path.write_text(json.dumps({**made, name: value}))
    with pytest.raises(actshard.FormatError, match=r"plan\.json: "):
        actshard.plan.load(path)
    path.write_text(json.dumps({**made, "actshard_plan": 2}))
    with pytest.raises(actshard.FormatError, match="a later release made this plan"):
        actshard.plan.load(path)


def test_a_result_of_other_examples_is_refused(source: Path, tmp_path: Path) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=3)
    for task in range(3):
        plan.run(task)
    path = plan.book.folder(1) / "result.json"
    made = json.loads(path.read_text())
    made["value"]["examples"][1] -= 1
    path.write_text(json.dumps(made))
    with pytest.raises(actshard.FormatError, match=r"task 1: expected examples \["):
        plan.commit()


def test_pieces_with_holes_or_overlaps_are_refused(source: Path, tmp_path: Path) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "deepspec", tasks=3, **WAYS["deepspec"])
    for task in range(3):
        plan.run(task)
    path = plan.book.folder(1) / "result.json"
    good = path.read_text()
    for change, said in ((8, "a hole"), (-8, "an overlap")):
        made = json.loads(good)
        (piece,) = made["value"]["fragments"]
        assert piece[0] == "samples.idx"
        piece[1] += change
        path.write_text(json.dumps(made))
        with pytest.raises(actshard.FormatError, match=f"samples.idx: expected bytes from .*: {said}"):
            plan.commit()
    path.write_text(good)
    plan.commit()


def test_an_unfinished_plan_is_no_dataset_and_no_place_for_another(source: Path, tmp_path: Path) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "specforge", tasks=2, **WAYS["specforge"])
    plan.run(0)
    for call in (
        lambda: actshard.open(tmp_path / "d"),
        lambda: actshard.convert(source, tmp_path / "d", "zarr"),
        lambda: actshard.convert(source, tmp_path / "d", "zarr", resume=True),
        lambda: actshard.create(tmp_path / "d", "zarr", layers=[1], d_model=4),
        lambda: actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=2),
    ):
        with pytest.raises(
            actshard.UnfinishedError, match="contains tasks of a plan that is not committed: see actshard status"
        ):
            call()
    assert [finding.code for finding in actshard.verify(tmp_path / "d").findings] == ["unfinished"]
    again = actshard.plan.convert(source, tmp_path / "d", "specforge", tasks=2, **WAYS["specforge"])
    assert again.status().done == (0,)
    assert work.look(tmp_path / "d").plan("planned") == plan.work


def test_errors_name_the_examples_and_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.ones((6, 1, 3, 4), np.float32)
    rows[4, 0, 1, 2] = 1e30
    with actshard.create(tmp_path / "s", "zarr", layers=[0], d_model=4) as writer:
        writer.append(rows)
    with pytest.raises(actshard.DtypeError, match="value of examples 0 to 5 is too large for float16"):
        actshard.plan.convert(tmp_path / "s", tmp_path / "d", "zarr", tasks=3, dtype="float16")
    monkeypatch.setattr(previewing, "WHOLE_BYTES", 0)  # as for large data, of which a sample is converted
    monkeypatch.setattr(previewing, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(previewing, "SAMPLE_FILES", 1)
    plan = actshard.plan.convert(tmp_path / "s", tmp_path / "d", "zarr", tasks=3, dtype="float16")
    with pytest.raises(
        actshard.TasksFailedError, match=r"1 of 3 tasks failed: task 2: .*value of examples 4 to 5"
    ) as caught:
        actshard.run(plan, keep_going=True)
    assert list(caught.value.errors) == [2]
    status = plan.status()
    assert status.done == (0, 1)
    assert "examples 4 to 5" in str(status.failed[2])
    with pytest.raises(actshard.UnfinishedError, match=r"1 failed \(2\), the first: .*too large for float16"):
        plan.commit()


def test_a_killed_process_of_this_machine_is_not_running(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid, is_running in ((os.getpid(), True), (ended.pid, False)):
        assert book.Attempt(0, tmp_path, book.host(), pid, 1.0, 0, 0).running is is_running
    assert book.Attempt(0, tmp_path, "far", ended.pid, 1.0, 0, 0).running


def test_status_tells_running_from_stopped(source: Path, tmp_path: Path) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=3)
    assert plan.status().missing == (0, 1, 2)
    plan.begin()
    for task, age in ((0, 0.0), (1, 2 * ALIVE_SECONDS)):
        folder = plan.work / "attempts" / f"{task:05}.far.1234.0123abcd"
        folder.mkdir()
        plan.book.tell(folder, 5, 10)
        now = (folder / "progress.json").stat().st_mtime
        os.utime(folder / "progress.json", (now - age, now - age))
    status = plan.status()
    assert [(a.task, a.host, a.pid, a.done, a.total) for a in status.running] == [(0, "far", 1234, 5, 10)]
    assert [a.task for a in status.stopped] == [1]
    assert status.missing == (1, 2)
    assert json.loads(json.dumps(status.as_dict()))["missing"] == [1, 2]


@pytest.mark.parametrize("tasks", [0, -1, True, 1.5, "2"])
def test_wrong_numbers_of_tasks_are_refused(source: Path, tmp_path: Path, tasks: Any) -> None:
    with pytest.raises(actshard.ArgumentError, match="tasks: expected"):
        actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=tasks)


def test_a_store_is_no_source_of_other_processes(source: Path, tmp_path: Path) -> None:
    with pytest.raises(actshard.ArgumentError, match=r"pass store\.path"):
        actshard.plan.convert(actshard.open(source), tmp_path / "d", "zarr")  # type: ignore[arg-type]  # what is refused


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.integers(1, 9),
    st.sampled_from(["lmprobe", "zarr", "pickle", "npy"]),
)
def test_any_lengths_in_any_tasks(tmp_path: Path, lengths: list[int], tasks: int, format: str) -> None:
    shutil.rmtree(tmp_path, ignore_errors=True)
    with actshard.create(tmp_path / "s", "zarr", layers=[0, 1], d_model=4, t_max=9) as writer:
        rng = np.random.default_rng(1)
        writer.append(
            [rng.standard_normal((2, n, 4)).astype(np.float32) for n in lengths],
            columns={"name": [str(n) for n in lengths]},
        )
    options = {} if format in ("zarr", "npy") else {"shard_bytes": 200}
    plan = actshard.plan.convert(tmp_path / "s", tmp_path / "d", format, tasks=tasks, **options)
    in_tasks(plan, tasks)
    found, source = actshard.open(tmp_path / "d"), actshard.open(tmp_path / "s")
    for layer in (0, 1):
        for a, b in zip(
            source.sequences(range(len(lengths)), layer), found.sequences(range(len(lengths)), layer), strict=True
        ):
            if len(a):
                assert a.tobytes() == b.tobytes()


def test_columns_come_in_order(source: Path, tmp_path: Path) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "lmprobe", tasks=5, examples=np.arange(199, -1, -2), **SMALL)
    in_tasks(plan)
    found = actshard.open(tmp_path / "d").table["text"].to_pylist()
    assert found == [f"t{i}" for i in range(199, -1, -2)]
    assert isinstance(actshard.open(tmp_path / "d").table, pa.Table)


# -- what a commit finds of finished tasks -------------------------------------------------------------------------


@pytest.mark.parametrize("format", sorted(WAYS))
@pytest.mark.parametrize("how", ["removed", "cut off", "longer", "renamed"])
def test_files_of_finished_tasks_that_changed_are_refused(source: Path, tmp_path: Path, format: str, how: str) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", format, tasks=2, **WAYS[format])
    for task in range(len(plan)):
        plan.run(task)
    last = plan.book.folder(len(plan) - 1)
    file = max((p for p in last.rglob("*") if p.is_file() and p.name != "result.json"), key=lambda p: p.stat().st_size)
    good = file.read_bytes()
    if how == "removed":
        file.unlink()
    elif how == "renamed":
        file.rename(file.with_name("other"))
    else:
        file.write_bytes(good[: len(good) // 2] if how == "cut off" else good + b"x")
    with pytest.raises(actshard.FormatError, match=r"expected (\d+ files|a piece) of .*run the task again"):
        plan.commit()
    assert not plan.status().committing
    with pytest.raises(actshard.ActshardError):
        actshard.open(tmp_path / "d")
    shutil.rmtree(last)
    plan.run(len(plan) - 1)
    plan.commit()


def test_processes_of_another_container_are_not_taken_for_dead(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = actshard.plan.convert(source, tmp_path / "d", "zarr", tasks=2)
    plan.begin()
    nobody = 2**22 + 1  # above the largest number of a process
    monkeypatch.setattr(os, "getpid", lambda: nobody)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "readlink", lambda self: Path("pid:[4026532999]"))
        far = plan.book.begin_attempt(0)
    here = plan.book.begin_attempt(0)
    assert "4026532999" in far.name
    plan.book.begin_attempt(0)
    assert far.is_dir()
    assert not here.exists()
