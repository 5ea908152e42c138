"""``actshard.run`` on this machine, and the commands run, status and commit."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import actshard
from actshard import cli
from actshard.base import _arguments
from actshard.plan.runners import capacity
from conftest import refuses
from waiting import PATIENCE, wait_until

CAPTURE = """
import os, pathlib, signal, sys, time
import numpy as np

def rows(writer, examples):
    for n in examples:
        writer.append(np.full((1, 2, 3, 8), n, np.float32))

def leaves_a_note(writer, examples):
    here = pathlib.Path(os.environ["NOTES"])
    (here / f"{examples[0]}.{os.getpid()}").write_text(os.environ.get("ACTSHARD_NUM_THREADS", ""))

def noted(writer, examples):
    leaves_a_note(writer, examples)
    print("words on stdout")
    rows(writer, examples)

def once(writer, examples):
    note = pathlib.Path(os.environ["NOTES"]) / f"once-{examples[0]}"
    if not note.exists():
        note.write_text("")
        raise ValueError("the first time")
    rows(writer, examples)

def fails(writer, examples):
    leaves_a_note(writer, examples)
    if 5 in examples:
        raise ZeroDivisionError("example 5")
    rows(writer, examples)

def killed(writer, examples):
    if 5 in examples:
        os.kill(os.getpid(), signal.SIGKILL)
    rows(writer, examples)

def exits(writer, examples):
    if 5 in examples:
        os._exit(7)
    rows(writer, examples)

def waits(writer, examples):
    leaves_a_note(writer, examples)
    time.sleep(600)
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which captures leave notes; modules are found beside it, also by other processes."""
    (tmp_path / "captured.py").write_text(CAPTURE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    sys.modules.pop("captured", None)
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv("NOTES", str(folder))
    return folder


def planned(path: Path, capture: str, tasks: int = 4) -> actshard.plan.Plan:
    return actshard.plan.create(
        path, "zarr", layers=[0, 1], d_model=8, num_examples=17, tasks=tasks, tokens_per_example=3,
        capture=f"captured:{capture}",
    )  # fmt: skip


def check(path: Path) -> None:
    store = actshard.open(path)
    assert store.num_examples == 17
    for n in range(17):
        assert (store.sequence(n, 1) == n).all()


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def command(*words: Any) -> Done:
    """Runs a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["actshard", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def alive(pid: int) -> bool:
    try:
        return (
            "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
            if sys.platform == "linux"
            else not os.kill(pid, 0)
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_live_as_long_as_there_are_tasks_and_share_the_processors(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACTSHARD_NUM_THREADS", "6")
    told: list[tuple[int, int, int]] = []
    made = actshard.run(planned(tmp_path / "d", "noted", tasks=8), workers=2, progress=lambda *now: told.append(now))
    assert made is not None
    check(tmp_path / "d")
    pids = {note.suffix for note in notes.iterdir()}
    assert len(list(notes.iterdir())) == 8
    assert len(pids) <= 2
    assert f".{os.getpid()}" not in pids
    assert {note.read_text() for note in notes.iterdir()} == {"3"}
    assert [done for done, _, _ in told] == list(range(1, 9))
    assert told[-1][1] == 8
    assert told[-1][2] > 0
    assert not any(alive(int(pid[1:])) for pid in pids)
    assert "words on stdout" not in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("capture", "why"), [("killed", "killed by SIGKILL"), ("exits", "ended with status 7")])
def test_a_worker_that_dies_fails_its_task_alone(notes: Path, tmp_path: Path, capture: str, why: str) -> None:
    plan = planned(tmp_path / "d", capture)
    with pytest.raises(actshard.TasksFailedError, match=why) as failed:
        actshard.run(plan, workers=2, keep_going=True)
    assert set(failed.value.errors) == {1}
    now = plan.status()
    assert now.done == (0, 2, 3)
    assert set(now.failed) == {1}
    assert not now.running
    assert not now.stopped
    assert not now.committed


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 1])
def test_no_task_begins_after_one_failed_unless_asked_to_keep_going(
    notes: Path, tmp_path: Path, workers: int | None
) -> None:
    plan = planned(tmp_path / "d", "fails", tasks=17)
    with pytest.raises(actshard.TasksFailedError, match="example 5") as failed:
        actshard.run(plan, workers=workers)
    assert set(failed.value.errors) == {5}
    assert {int(note.stem) for note in notes.iterdir()} < set(range(17))
    with pytest.raises(actshard.TasksFailedError):
        actshard.run(plan, workers=workers, keep_going=True)
    assert {int(note.stem) for note in notes.iterdir()} == set(range(17))
    assert plan.left() == [5]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 2])
def test_tasks_that_failed_are_run_again(notes: Path, tmp_path: Path, workers: int | None) -> None:
    plan = planned(tmp_path / "d", "once")
    with pytest.raises(actshard.TasksFailedError) as failed:
        actshard.run(plan, workers=workers, keep_going=True)
    assert set(failed.value.errors) == {0, 1, 2, 3}
    for note in notes.iterdir():
        note.unlink()
    actshard.run(plan, workers=workers, retries=1)
    check(tmp_path / "d")


def test_some_tasks_are_run_and_nothing_is_committed(notes: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path / "d", "rows")
    assert actshard.run(plan, tasks=[3, 1]) is None
    assert plan.status().done == (1, 3)
    with refuses(actshard.OutOfRangeError, None, "tasks: expected 0 to 3, found 4"):
        actshard.run(plan, tasks=[4])
    assert actshard.run(plan, commit=False).left == ()
    assert not plan.status().committed
    actshard.run(plan)
    assert plan.left() == []
    check(tmp_path / "d")


def test_wrong_options_are_refused(notes: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path / "d", "rows")
    for options, why in (
        ({"on": "condor"}, "on: expected one of local, slurm, ray, dask"),
        ({"worker": 3}, "worker: expected an option of on='local': workers"),
        ({"workers": 0}, "workers: expected an integer"),
        ({"retries": -1}, "retries: expected"),
        ({"progress": 3}, "progress: expected a function"),
        ({"keep_going": "yes"}, "keep_going: expected"),
    ):
        with pytest.raises(actshard.ArgumentError, match=why):
            actshard.run(plan, **options)  # type: ignore[arg-type]  # that is the test
    assert not (tmp_path / "d").exists()


def test_tasks_are_sent_as_there_is_room_for_them() -> None:
    machines = [{"cpus": 4, "memory": 10.0}, {"cpus": 2, "memory": math.inf}, {"cpus": 0.3}]
    for needed, expected in (
        ({"cpus": 1}, 6),
        ({"cpus": 0.1}, 40 + 20 + 3),
        ({"cpus": 1, "memory": 4}, 2 + 2),
        ({"cpus": 1, "memory": 11}, 2),
        ({"cpus": 1, "gpus": 0}, 6),
        ({"cpus": 3, "memory": 11}, 0),
    ):
        assert capacity.places(machines, needed) == expected, needed
        assert capacity.Capacity(lambda: machines, needed, None, spare=True).tasks() == max(2 * expected, 1)
        assert capacity.Capacity(lambda: machines, needed, None, spare=False).tasks() == max(expected, 1)
        assert capacity.Capacity(lambda: machines, needed, 7, spare=True).tasks() == 7
    assert capacity.Capacity(list, {"cpus": 1}, None, spare=True).tasks() >= 1000
    with refuses(actshard.ArgumentError, None, "expected a machine of this Ray cluster with .* together"):
        capacity.check("Ray", machines, {"cpus": 3, "memory": 11}, predicted=False)
    with refuses(actshard.ArgumentError, None, "gpus: expected at most 0, .* found 1"):
        capacity.check("Ray", machines, {"cpus": 1, "gpus": 1}, predicted=False)
    with refuses(actshard.ArgumentError, None, "memory: expected at most 10, .* found 11, which the plan predicts"):
        capacity.check("Ray", machines[:1], {"memory": 11}, predicted=True)


def test_time_limits_are_read_as_slurm_reads_them() -> None:
    said = {60: 60, "60": 60, "90:30": 91, "4:00:00": 240, "1-12": 2160, "1-12:30": 2190, "0-0:0:1": 1}
    assert {text: _arguments.minutes(text, "time") for text in said} == said
    for wrong in (0, "", "x", "1:2:3:4", "1-", True, 1.5, -1, None, "\u0663", "9" * 30, ["1"]):
        with pytest.raises(actshard.ArgumentError, match="time: expected minutes, or a limit such as"):
            _arguments.minutes(wrong, "time")  # type: ignore[arg-type]  # that is the test


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_driver(notes: Path, tmp_path: Path, sent: signal.Signals) -> None:
    file = planned(tmp_path / "d", "waits").save(tmp_path / "plan.json")
    driver = subprocess.Popen(
        [sys.executable, "-m", "actshard.cli", "run", str(file), "--workers", "2"], stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: len(list(notes.iterdir())) == 2, "two tasks")
        workers = [int(note.suffix[1:]) for note in notes.iterdir()]
        driver.send_signal(sent)
        assert driver.wait(PATIENCE) != 0
        wait_until(lambda: not any(map(alive, workers)), "workers to exit")
    finally:
        driver.kill()
        driver.wait()
    plan = actshard.plan.load(file)
    assert plan.status().done == ()


def test_commands_run_tell_and_commit(notes: Path, tmp_path: Path) -> None:
    plan = planned(tmp_path / "d", "fails")
    file = plan.save(tmp_path / "plan.json")
    assert command("status", tmp_path / "none.json").returncode == 3
    done = command("run", file, "--task", "0,2-3", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"done": [0, 2, 3]}
    told = command("status", file, "--json")
    assert told.returncode == 1
    assert json.loads(told.stdout)["missing"] == [1]
    done = command("run", file)
    assert done.returncode == 3
    assert "1 of 4 tasks failed: task 1" in done.stderr
    assert "example 5" in done.stderr
    told = command("status", file)
    assert told.returncode == 2
    assert "create, 4 tasks: 3 done, 1 failed" in told.stdout
    assert "example 5" in told.stdout
    assert command("commit", file).returncode == 3
    (tmp_path / "captured.py").write_text(CAPTURE.replace("if 5 in examples", "if False"))
    del sys.modules["captured"]
    assert command("run", file, "--task", "1").returncode == 0
    assert "next: actshard commit" in command("status", file, "--watch").stdout
    assert json.loads(command("commit", file, "--json").stdout) == {"path": str(tmp_path / "d")}
    assert command("status", file).stdout == "create: 4 tasks, committed\n"
    assert command("run", file).returncode == 0
    check(tmp_path / "d")


def test_a_process_runs_its_share(notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = planned(tmp_path / "d", "rows").save(tmp_path / "plan.json")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = command("run", file, "--task", "auto", "--json")
    assert json.loads(done.stdout) == {"done": [1, 3]}
    for wrong in ("4", "x", "3-1", "1-", "-1", ""):
        failed = command("run", file, f"--task={wrong}")
        assert failed.returncode == 3
        assert "--task: expected" in failed.stderr


@pytest.mark.parametrize(("on", "library"), [("slurm", "submitit"), ("ray", "ray"), ("dask", "distributed")])
def test_engines_name_the_extra_that_is_missing(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(actshard.MissingExtraError, match=rf"actshard\[{on}\]"):
        actshard.run(planned(tmp_path / "d", "rows"), on=on)
    assert not (tmp_path / "d").exists()
