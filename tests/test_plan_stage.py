"""Guarantees of actshard.plan.stage: the folder of one actshard.stage, by any number of tasks, whatever was killed or changed."""

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
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import actshard
from actshard import tokens
from actshard.plan import staging as planning
from actshard.plan.book import Book
from actshard.plan.data import identity
from actshard.writing import staging
from conftest import GOLDEN, refuses, saev_dump
from hub import hub
from served import Served, served

SAEV = saev_dump(GOLDEN / "saev/v21_cls_labels_multishard")
LMPROBE = GOLDEN / "lmprobe/fullseq_f32"
ZARR = GOLDEN / "zarr/single_minimal/activations.zarr"
DATASETS = [
    SAEV,
    LMPROBE,
    GOLDEN / "lmprobe/fullseq_logits_router",
    GOLDEN / "pickle/numpy2_proto5",
    GOLDEN / "zarr/v3_sharded/activations.zarr",
    GOLDEN / "zarr/run_20260122_101112",
]
TASKS = (1, 2, 3, 7, 1000)


@pytest.fixture(autouse=True)
def _no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A bucket whose credentials are in the environment, as those of plans are."""
    with served(tmp_path / "served") as found:
        point_to(found, monkeypatch)
        yield found


def point_to(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": "AKIAPUBLIC",
        "AWS_SECRET_ACCESS_KEY": "hushhush",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


def put(server: Served, path: Path) -> str:
    shutil.copytree(path, server.root / "bucket/run" / path.name)
    return f"s3://bucket/run/{path.name}"


def far(server: Served, url: str) -> Path:
    return server.root / url.removeprefix("s3://")


def in_tasks(plan: actshard.plan.Plan, seed: int = 0) -> Any:
    for task in random.Random(seed).sample(range(len(plan)), len(plan)):
        plan.run(task)
    return plan.commit()


def files(folder: Path) -> dict[str, bytes]:
    """All files of a staged folder, byte for byte; of the marker, without the times at which the copy's files were written."""
    found = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    marker = json.loads(found[staging.MARKER])
    below = folder / marker["inside"]
    assert marker.pop("times") == {name: (below / name).stat().st_mtime_ns for name in marker["files"]}
    return found | {staging.MARKER: json.dumps(marker).encode()}


def tidy(tmp_path: Path, *more: str) -> bool:
    return sorted(p.name for p in tmp_path.iterdir() if p.name != "served") == sorted(more)


@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
@pytest.mark.parametrize("path", DATASETS, ids=lambda path: path.parent.name + "-" + path.name)
def test_any_number_of_tasks_makes_the_folder_of_one_stage(path: Path, tmp_path: Path) -> None:
    one = actshard.stage(path, tmp_path / "one")
    expected = files(tmp_path / "one")
    for tasks in TASKS:
        folder = tmp_path / f"copy{tasks}"
        plan = actshard.plan.stage(path, folder, tasks=tasks)
        assert len(plan) == min(tasks, len(plan)) <= one.files
        assert any(f"{one.files} files" in note for note in plan.notes) == (len(plan) < tasks)
        done = in_tasks(plan, tasks)
        assert done == staging.Staged(folder / one.path.relative_to(tmp_path / "one"), *as_tuple(one)[1:])
        assert files(folder) == expected, f"{len(plan)} tasks"
        assert (plan.predicted.bytes, plan.predicted.files) == (one.bytes, one.files)
        assert actshard.stage(path, folder).fetched == 0, "complete for actshard.stage"
    assert tidy(tmp_path, "one", *(f"copy{n}" for n in TASKS)), "nothing is left beside"


def as_tuple(done: staging.Staged) -> tuple[Any, ...]:
    return tuple(getattr(done, name) for name in done.__dataclass_fields__)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
@pytest.mark.parametrize("path", DATASETS, ids=lambda path: path.parent.name + "-" + path.name)
def test_some_layers_in_tasks_are_those_of_one_stage(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = actshard.open(path).layers[-1:]
    made = {}
    for tasks in TASKS:
        plan = actshard.plan.stage(path, tmp_path / f"copy{tasks}", layers, tasks=tasks)
        done = in_tasks(plan, tasks)
        assert done.layers == layers
        assert actshard.open(done.path).layers == layers
        made[tasks] = done
    # One process reads the clock, unless this is set.
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(plan.arguments["convert"]["sizes"]["created"]))
    one = actshard.stage(path, tmp_path / "one", layers)
    expected = files(tmp_path / "one")
    for tasks, done in made.items():
        assert files(tmp_path / f"copy{tasks}") == expected
        assert as_tuple(done)[1:] == as_tuple(one)[1:]
        assert actshard.stage(path, tmp_path / f"copy{tasks}", layers).fetched == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::actshard.ActshardWarning")
@pytest.mark.parametrize("layers", [None, [3]])
def test_a_bucket_is_copied_with_one_request_for_each_file(
    server: Served, tmp_path: Path, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = put(server, LMPROBE)
    plan = actshard.plan.stage(url, tmp_path / "copy", layers, tasks=5)
    plan = actshard.plan.load(plan.save(tmp_path / "plan.json"))
    before = len(server.requests)
    for task in range(len(plan)):
        plan.run(task)
    if layers is None:
        asked = server.requests[before:]
        assert {kind for kind, _, _ in asked} == {"GET"}, "tasks do not ask for sizes"
        assert not any("list-type" in query for _, _, query in asked), "nor for names"
        # A set: a slow request is sent twice.
        ranges = {(path, query) for _, path, query in asked}
        assert sorted(path for path, _ in ranges) == sorted(
            f"bucket/run/{LMPROBE.name}/{name}" for name, *_ in plan.arguments["files"]
        )
    done = plan.commit()
    if layers is not None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(plan.arguments["convert"]["sizes"]["created"]))
    one = actshard.stage(url, tmp_path / "one", layers)
    assert files(tmp_path / "copy") == files(tmp_path / "one")
    assert (done.bytes, done.files, done.losses) == (one.bytes, one.files, one.losses)
    assert tidy(tmp_path, "copy", "one", "plan.json")


def test_token_caches_are_staged(server: Served, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4]}\n')
    tokens.build_cache(tmp_path / "a.jsonl", server.root / "bucket/web/train", format={"type": "prebuilt"})
    done = in_tasks(actshard.plan.stage("s3://bucket/web", tmp_path / "copy", tasks=3))
    assert [row["input_ids"].tolist() for row in tokens.open_cache(done.path).rows(range(2))] == [[1, 2, 3], [4]]
    actshard.stage("s3://bucket/web", tmp_path / "one")
    assert files(tmp_path / "copy") == files(tmp_path / "one")
    with pytest.raises(actshard.ArgumentError, match="has no layers"):
        actshard.plan.stage("s3://bucket/web", tmp_path / "other", [1])


@pytest.mark.slow
def test_all_tasks_read_one_commit_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub() as lab:
        monkeypatch.setenv("HF_ENDPOINT", lab.url)
        commit = lab.add("lab/acts", LMPROBE)
        actshard.stage("hf://datasets/lab/acts", tmp_path / "one")
        plan = actshard.plan.stage("hf://datasets/lab/acts", tmp_path / "copy", tasks=3)
        plan.run(1)
        lab.add("lab/acts", GOLDEN / "pickle/numpy2_proto5")  # main is another commit now
        done = in_tasks(plan)
        assert done.revision == commit
        assert files(tmp_path / "copy") == files(tmp_path / "one")
        layer = actshard.open(LMPROBE).layers[0]
        pinned = in_tasks(actshard.plan.stage(f"hf://datasets/lab/acts@{commit}", tmp_path / "layer", layer))
        assert actshard.open(pinned.path).layers == (layer,)


def test_a_complete_copy_needs_nothing(server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    plan = actshard.plan.stage(url, tmp_path / "copy", tasks=3)
    done = in_tasks(plan)
    again = actshard.plan.stage(url, tmp_path / "copy", tasks=3)
    assert again == plan
    assert (again.status().committed, again.left()) == (True, [])
    before = len(server.requests)
    assert again.run(1)["committed"]
    assert again.commit() == staging.Staged(*as_tuple(done)[:-2], 0, done.losses)
    assert actshard.run(plan, on="local").fetched == 0
    assert len(server.requests) == before, "no request"
    assert tidy(tmp_path, "copy")
    in_one = actshard.stage(url, tmp_path / "one")
    assert actshard.plan.stage(url, tmp_path / "one", tasks=7).status().committed, "that of one process too"
    assert in_one.fetched > 0


def test_a_plan_is_data_without_secrets(server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    plan = actshard.plan.stage(url, tmp_path / "copy", tasks=2)
    text = plan.save(tmp_path / "plan.json").read_text()
    assert "hushhush" not in text
    assert "AKIAPUBLIC" not in text
    assert "127.0.0.1" not in text
    assert actshard.plan.load(tmp_path / "plan.json") == plan == actshard.plan.stage(url, tmp_path / "copy", tasks=2)
    assert tidy(tmp_path, "plan.json"), "planning writes nothing"
    with pytest.raises(TypeError):
        actshard.plan.stage(url, tmp_path / "copy", storage_options=server.keys)  # type: ignore[call-arg]


def test_nothing_else_is_made_where_a_plan_stages(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    plan = actshard.plan.stage(ZARR, copy, tasks=2)
    plan.run(0)
    for work in (
        lambda: actshard.open(copy),
        lambda: actshard.verify(copy),
        lambda: actshard.stage(ZARR, copy),
        lambda: actshard.stage(LMPROBE, copy),
        lambda: actshard.plan.stage(LMPROBE, copy),
        lambda: actshard.plan.stage(ZARR, copy, tasks=3),
        lambda: actshard.convert(ZARR, copy, "zarr"),
        lambda: actshard.plan.convert(ZARR, copy, "zarr"),
        lambda: actshard.create(copy, "saev", layers=[0], d_model=1),
        lambda: actshard.merge(copy, [ZARR, ZARR]),
    ):
        with refuses(actshard.UnfinishedError, copy, plan.work.name):
            work()
    assert not copy.exists()
    in_tasks(plan)
    assert len(actshard.open(copy)) == len(actshard.open(ZARR))
    # A plan that is given up is in nobody's way.
    other = actshard.plan.stage(ZARR, tmp_path / "other", tasks=2)
    other.run(0)
    shutil.rmtree(other.work)
    assert actshard.stage(ZARR, tmp_path / "other").fetched > 0
    assert tidy(tmp_path, "copy", "other")


def test_an_older_copy_stays_until_the_commit_replaces_it(server: Served, tmp_path: Path) -> None:
    url, copy = put(server, SAEV), tmp_path / "copy"
    old = in_tasks(actshard.plan.stage(url, copy, tasks=3))
    (copy / "mine.txt").write_text("mine")
    source = far(server, url)
    shard = source / "acts000001.bin"
    shard.write_bytes(bytes(shard.stat().st_size))  # as long as before
    (source / "labels.bin").unlink()
    plan = actshard.plan.stage(url, copy, tasks=3)
    before, rows = len(server.requests), actshard.open(old.path).last_tokens(actshard.open(old.path).layers[0])
    assert not plan.status().committed
    for task in range(len(plan)):
        plan.run(task)
    store = actshard.open(old.path)
    assert np.array_equal(store.last_tokens(store.layers[0]), rows), "the old copy is still there"
    with refuses(actshard.UnfinishedError, copy, plan.work.name):
        actshard.stage(url, copy)
    done = plan.commit()
    fetched = {Path(path).name for _, path, query in server.requests[before:] if "list-type" not in query}
    assert fetched == {"acts000001.bin"}, "unchanged files were linked"
    assert done.fetched == shard.stat().st_size
    assert {p.name: p.read_bytes() for p in done.path.iterdir()} == {p.name: p.read_bytes() for p in source.iterdir()}
    assert (copy / "mine.txt").read_text() == "mine"
    assert tidy(tmp_path, "copy")


def test_files_of_others_are_refused_and_stay(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with refuses(actshard.ExistsError, tmp_path / "mine", "were not staged"):
        actshard.plan.stage(SAEV, tmp_path / "mine")
    in_tasks(actshard.plan.stage(SAEV, tmp_path / "copy"))
    with refuses(actshard.ExistsError, tmp_path / "copy", "contains all layers"):
        actshard.plan.stage(LMPROBE, tmp_path / "copy")
    plan = actshard.plan.stage(SAEV, tmp_path / "late", tasks=2)
    for task in range(2):
        plan.run(task)
    (tmp_path / "late").mkdir()
    (tmp_path / "late/notes.txt").write_text("mine")
    with refuses(actshard.ExistsError, tmp_path / "late", "were not staged"):
        plan.commit()
    assert [p.name for p in (tmp_path / "late").iterdir()] == ["notes.txt"]
    (tmp_path / "late/notes.txt").unlink()
    assert plan.commit().files > 0


@pytest.mark.slow
@pytest.mark.parametrize("near", [True, False], ids=["local", "bucket"])
def test_changed_inputs_are_named(near: bool, server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    source = far(server, url)
    place = str(source) if near else url
    shard, data = source / "acts000001.bin", (source / "acts000001.bin").read_bytes()

    def change(what: str) -> str:
        """Changes the source; returns what a commit says."""
        if what == "equal size":
            shard.write_bytes(data[::-1])
            return "acts000001.bin: was written again since the plan was made"
        if what == "shorter":
            shard.write_bytes(data[:-1])
            return f"acts000001.bin: expected {len(data):,} bytes, as when the plan was made, found {len(data) - 1:,}"
        if what == "gone":
            shard.unlink()
            return f"acts000001.bin: expected a file of {len(data):,} bytes, as when the plan was made, found nothing"
        (source / "more.txt").write_text("x")
        return "more.txt: expected no file, as when the plan was made, found one"

    for number, (what, early) in enumerate(itertools.product(("equal size", "shorter", "gone", "new"), (True, False))):
        shard.write_bytes(data)
        (source / "more.txt").unlink(missing_ok=True)
        plan = actshard.plan.stage(place, tmp_path / f"copy{number}", tasks=3)
        said = change(what) if early else ""
        for task in range(len(plan)):
            if early and what != "new" and task == of_file(plan, "acts000001.bin"):
                with pytest.raises(actshard.ChangedInputError, match=said):
                    plan.run(task)
                assert "acts000001.bin" in str(plan.status().failed[task])
            else:
                plan.run(task)
        if not early:
            said = change(what)
        if not early or what == "new":
            with pytest.raises(actshard.ChangedInputError, match=said):
                plan.commit()
        else:
            with pytest.raises(actshard.UnfinishedError, match="1 failed"):
                plan.commit()
        assert not (tmp_path / f"copy{number}").exists()


def of_file(plan: actshard.plan.Plan, name: str) -> int:
    """The task that copies a file."""
    number = [each[0] for each in plan.arguments["files"]].index(name)
    return next(i for i, task in enumerate(plan.tasks) if task["files"][0] <= number < task["files"][1])


def test_a_file_that_is_replaced_while_it_is_copied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(SAEV, tmp_path / SAEV.name)
    shard = tmp_path / SAEV.name / "acts000001.bin"
    plan = actshard.plan.stage(tmp_path / SAEV.name, tmp_path / "copy", tasks=1)
    copied = actshard._native.copy_ranges

    def replaced(ranges: Any) -> None:
        copied(ranges)
        shard.write_bytes(bytes(shard.stat().st_size))

    monkeypatch.setattr(actshard._native, "copy_ranges", replaced)
    with refuses(actshard.ChangedInputError, shard, "was written again"):
        plan.run(0)
    assert list((plan.work / "attempts").iterdir()) == []


def test_another_server_is_not_the_source(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = put(server, SAEV)
    plan = actshard.plan.stage(url, tmp_path / "copy", tasks=2)
    shutil.copytree(server.root, tmp_path / "second")
    with served(tmp_path / "second") as second:
        point_to(second, monkeypatch)
        with pytest.raises(actshard.ChangedInputError, match="another server or account"):
            plan.run(0)
        assert second.requests == []


def test_a_connection_that_is_cut_fails_the_task_and_not_the_plan(server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    server.cutting["acts000001.bin"] = [100]  # once: reading goes on
    plan = actshard.plan.stage(url, tmp_path / "copy", tasks=1000)
    task = of_file(plan, "acts000001.bin")
    plan.run(task)
    assert not server.cutting["acts000001.bin"]
    server.failing["acts000000.bin"] = [403] * 100  # refused: not tried again
    task = of_file(plan, "acts000000.bin")
    with pytest.raises(actshard.FileAccessError, match=r"acts000000\.bin"):
        plan.run(task)
    assert list((plan.work / "attempts").iterdir()) == [], "nothing that counts is left"
    assert task in plan.status().failed
    server.failing.clear()
    in_tasks(plan)
    actshard.stage(url, tmp_path / "one")
    assert files(tmp_path / "copy") == files(tmp_path / "one")


def _run(file: Path, tasks: list[int], together: Any) -> None:
    warnings.simplefilter("ignore")
    plan = actshard.plan.load(file)
    together.wait()
    for task in tasks:
        plan.run(task)


@pytest.mark.slow
def test_processes_run_tasks_at_once_and_twice(server: Served, tmp_path: Path) -> None:
    url = put(server, LMPROBE)
    plan = actshard.plan.stage(url, tmp_path / "copy", tasks=4)
    file = plan.save(tmp_path / "plan.json")
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(3)
    orders = ([0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0])
    started = [spawn.Process(target=_run, args=(file, order, together)) for order in orders]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0
    assert list((plan.work / "attempts").iterdir()) == []
    plan.commit()
    actshard.stage(url, tmp_path / "one")
    assert files(tmp_path / "copy") == files(tmp_path / "one")


def test_an_attempt_that_ends_after_the_commit_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = actshard.plan.stage(SAEV, tmp_path / "copy", tasks=2)
    copied, late = planning.copy, []

    def slow(*arguments: Any) -> None:
        monkeypatch.setattr(planning, "copy", copied)
        in_tasks(plan)
        late.append(files(tmp_path / "copy"))
        copied(*arguments)

    monkeypatch.setattr(planning, "copy", slow)
    with contextlib.suppress(actshard.ActshardError):
        plan.run(0)
    assert files(tmp_path / "copy") == late[0]
    assert tidy(tmp_path, "copy")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["new", "again", "layers"])
def test_killed_processes_lose_and_repeat_nothing(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("plan_kills.py")), "stage", kind]
    # Of 40 points, one each: before copies are moved together, before an old copy is removed, after the marker is written.
    first = {"new": 20, "again": 32, "layers": 29}[kind]
    done = subprocess.run(
        [*command, str(tmp_path / "w"), str(first), "40"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["killed"] == 1


def test_a_commit_that_ended_between_its_renames_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ZARR, tmp_path / "source")
    actshard.stage(tmp_path / "source", tmp_path / "copy")
    (tmp_path / "copy/mine.txt").write_text("mine")
    attributes = tmp_path / "source/.zattrs"
    attributes.write_text(attributes.read_text() + " ")
    plan = actshard.plan.stage(tmp_path / "source", tmp_path / "copy", tasks=3)
    replace = Path.replace

    def ended(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", ended)
        with pytest.raises(KeyboardInterrupt):
            in_tasks(plan)
    assert not (tmp_path / "copy").exists()
    with refuses(actshard.UnfinishedError, tmp_path / "copy", plan.work.name):
        actshard.open(tmp_path / "copy")
    assert plan.commit().path == tmp_path / "copy"
    assert (tmp_path / "copy/mine.txt").read_text() == "mine"
    (tmp_path / "copy/mine.txt").unlink()
    actshard.stage(tmp_path / "source", tmp_path / "one")
    assert files(tmp_path / "copy") == files(tmp_path / "one")
    assert tidy(tmp_path, "copy", "one", "source")


def test_copies_that_were_damaged_are_refused(tmp_path: Path) -> None:
    plan = actshard.plan.stage(SAEV, tmp_path / "copy", tasks=3)
    for task in range(len(plan)):
        plan.run(task)
    copy = next((plan.work / "tasks").rglob("acts000001.bin"))
    task = int(copy.relative_to(plan.work / "tasks").parts[0])
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-1])
    with refuses(actshard.FormatError, copy, f"task {task}: expected {len(whole):,} bytes, found {len(whole) - 1:,}"):
        plan.commit()
    copy.unlink()
    with refuses(actshard.FormatError, copy, "found no file"):
        plan.commit()
    shutil.rmtree(plan.work / "tasks" / f"{task:05}")
    in_tasks(plan)


def test_tasks_are_balanced_by_bytes(tmp_path: Path) -> None:
    with actshard.create(tmp_path / "s", "zarr", layers=[0, 1], d_model=16) as writer:
        writer.append(np.ones((600, 2, 8, 16), np.float32))
    plan = actshard.plan.stage(tmp_path / "s", tmp_path / "d", tasks=7)
    sizes = [task["bytes"] for task in plan.tasks]
    assert len(sizes) == 7
    assert max(sizes) <= 1.05 * sum(sizes) / 7
    assert sum(sizes) == plan.predicted.bytes
    (tmp_path / "s/large.bin").write_bytes(bytes(10 * sum(sizes)))
    plan = actshard.plan.stage(tmp_path / "s", tmp_path / "d", tasks=7)
    assert any("large.bin is copied by one task" in note for note in plan.notes)


def test_a_disk_that_is_too_small_is_told_before_a_task_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 0, 100))  # type: ignore[attr-defined]
    for layers in (None, actshard.open(SAEV).layers[:1]):
        with pytest.raises(actshard.DiskFullError, match="expected room for"):
            actshard.plan.stage(SAEV, tmp_path / "copy", layers)
    assert tidy(tmp_path)


def test_arguments_that_are_wrong_are_told(server: Served, tmp_path: Path) -> None:
    url = put(server, SAEV)
    for layers in ([], [1, 1], [1.5]):
        with pytest.raises(actshard.ArgumentError, match="layers: expected"):
            actshard.plan.stage(url, tmp_path / "copy", layers)
    with pytest.raises(actshard.LayerError):
        actshard.plan.stage(url, tmp_path / "copy", [99])
    for tasks in (0, -1, True, 1.5):
        with pytest.raises(actshard.ArgumentError, match="tasks"):
            actshard.plan.stage(url, tmp_path / "copy", tasks=tasks)  # type: ignore[arg-type]
    with pytest.raises(actshard.UnsupportedError, match="cannot list files"):
        actshard.plan.stage(server.web("bucket/run"), tmp_path / "copy")
    with pytest.raises(actshard.MissingFileError, match="found nothing"):
        actshard.plan.stage("s3://bucket/none", tmp_path / "copy")
    with pytest.raises(actshard.ArgumentError, match="expected a local path here"):
        actshard.plan.stage(url, "s3://bucket/copy")


VALUES: tuple[Any, ...] = (
    None, -1, "x", "/", "..", "../x", "a/../..", "s3://", "s3://b/k?x=1", "hf://datasets/a", [], [5, 2], [0, 10**30], {}, "gone",
    [["../x", 1, ""]], [["/etc/passwd", 1, ""]], [[".actshard-staged.json", 1, ""]], [["a", 1, ""], ["a/b", 1, ""]],
    [["a", 1, ""]] * 2, [["a", 10**30, ""]], [["a", -1, ""]], [["a\0", 1, ""]], [["\ud800", 1, ""]], {"format": "saev"},
)  # fmt: skip


def _mutated(plan: actshard.plan.Plan, path: Path) -> Iterator[tuple[str, Any]]:
    """Files of the plan with one wrong value, under a hash and a folder that fit."""
    base = json.dumps(plan.as_dict())
    places = [("arguments", name) for name in plan.arguments] + [("tasks", name) for name in plan.tasks[0]]
    for (place, name), value in itertools.product(places, VALUES):
        made = json.loads(base)
        changed = made["arguments"] if place == "arguments" else made["tasks"][0]
        if changed[name] == value or (name in ("layers", "revision", "origin") and value is None):
            continue
        changed[name] = value
        if value == "gone":
            del changed[name]
        made["id"] = identity(made["verb"], made["arguments"], plan.inputs, made["tasks"])
        with contextlib.suppress(TypeError, ValueError, KeyError):
            made["work"] = str(
                planning._work(Path(made["arguments"]["folder"]), made["arguments"], plan.inputs, made["tasks"])
            )
        path.write_text(json.dumps(made))
        yield f"{place} {name}", value


@pytest.mark.parametrize("layers", [False, True])
def test_plans_that_others_wrote_are_refused_in_one_line(tmp_path: Path, layers: bool) -> None:
    shutil.copytree(SAEV, tmp_path / "in" / SAEV.name)
    source = tmp_path / "in" / SAEV.name
    some = actshard.open(source).layers[:1] if layers else None
    plan = actshard.plan.stage(source, tmp_path / "d", some, tasks=2)
    refused, before = [], sorted(tmp_path.rglob("*"))
    for what, value in _mutated(plan, tmp_path / "plan.json"):
        try:
            loaded = actshard.plan.load(tmp_path / "plan.json")
        except actshard.ActshardError as error:
            refused.append(str(error))
            continue
        assert value == "x" or what not in ("arguments files", "tasks files", "arguments below", "arguments folder"), (
            what
        )
        for call in (loaded.status, lambda loaded=loaded: loaded.run(0), loaded.commit):
            with contextlib.suppress(actshard.ActshardError):
                call()
        shutil.rmtree(tmp_path / ".d.actshard-stage", ignore_errors=True)
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
    assert len(refused) > 150
    assert all(len(message.splitlines()) == 1 for message in refused)
    assert sorted(p for p in tmp_path.rglob("*") if p.name != "plan.json") == before, "nothing was written elsewhere"
    made = plan.as_dict()
    made["work"] = str(tmp_path / "in")
    (tmp_path / "plan.json").write_text(json.dumps(made))
    with refuses(actshard.FormatError, tmp_path / "plan.json", "field 'work'"):
        actshard.plan.load(tmp_path / "plan.json")


def test_a_late_process_sees_that_another_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = actshard.plan.stage(SAEV, tmp_path / "copy", tasks=2)
    for task in range(2):
        plan.run(task)
    looks = iter([True])
    whole = Book.exists
    plan_again = actshard.plan.load(plan.save(tmp_path / "plan.json"))
    done = plan.commit()
    monkeypatch.setattr(Book, "exists", lambda book: next(looks, False) or whole(book))
    assert plan_again.commit().path == done.path


@pytest.mark.slow
@pytest.mark.measures_memory
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
@pytest.mark.parametrize("remote", [False, True])
def test_the_memory_of_a_task_is_predicted(server: Served, tmp_path: Path, remote: bool) -> None:
    folder = server.root / "bucket/run"
    with actshard.create(folder, "npy", layers=[0, 1], d_model=1024) as writer:
        writer.append(np.ones((40, 2, 64, 1024), np.float32))
    plan = actshard.plan.stage("s3://bucket/run" if remote else folder, tmp_path / "copy", tasks=1)
    code = (
        "import sys\n"
        "from actshard.plan import load\n"
        "load(sys.argv[1]).run(0)\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(plan.save(tmp_path / "plan.json"))]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout) << 10
    assert 0.8 * peak <= plan.predicted.memory <= 1.2 * peak, (peak, plan.predicted.memory)
