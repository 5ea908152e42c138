"""Plans on a real Slurm of this machine (make test-engines): the bytes of one process, whatever happens to elements."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actshard
import slurm_cluster
from actshard.plan.runners import squeue
from engine_work import Work, environment, when
from slurm_cluster import ask
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.engines
ACTSHARD = f"{sys.executable} -m actshard.cli"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Path]:
    if missing := slurm_cluster.missing():
        pytest.skip(f"needs {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("needs root: slurmd starts the processes of jobs")
    with slurm_cluster.cluster() as folder:
        yield folder


@pytest.fixture
def work(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(squeue, "ASK_SECONDS", 0.5)
    made = Work(tmp_path)
    monkeypatch.setenv("SLOWLY", "0.3")
    monkeypatch.chdir(tmp_path)  # sbatch writes its logs there
    yield made
    wait_until(lambda: not running(), "elements to end")


def running() -> list[str]:
    return ask("squeue", "--noheader", "--array", "--format=%i").split()


def submitted(*words: str) -> str:
    return ask("sbatch", "--parsable", *words).strip()


def log(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*.out")))


def test_an_array_job_of_sbatch_runs_a_task_in_each_element(work: Work) -> None:
    last = len(work.plan) - 1
    command = f"{ACTSHARD} run {work.file} --task $SLURM_ARRAY_TASK_ID"
    submitted(f"--array=0-{last}", "--wrap", command)
    wait_until(lambda: not work.plan.left(), "the tasks")
    assert work.begun() == set(range(len(work.plan)))
    work.plan.commit()
    work.check()


def test_elements_and_their_steps_share_the_tasks(work: Work) -> None:
    """``--task auto`` in the two processes of a step, in each of the three elements of an array that does not begin at 0."""
    submitted("--array=10-14:2", "--ntasks=2", "--wrap", f"srun {ACTSHARD} run {work.file} --task auto")
    wait_until(lambda: not running(), "the array")
    assert work.plan.left() == [], log(work.folder)
    notes = [note.name.split(".") for note in work.notes.iterdir()]
    assert len(notes) == len(work.plan)  # each task once
    by_process: dict[tuple[str, str], set[int]] = {}
    for task, pid, job in notes:
        by_process.setdefault((pid, job), set()).add(int(task))
    assert sorted(map(sorted, by_process.values())) == [list(range(i, len(work.plan), 6)) for i in range(6)]
    work.plan.commit()
    work.check()


def test_run_submits_an_array_with_resources_and_leaves_no_logs(work: Work) -> None:
    done = actshard.run(
        work.plan, on="slurm", array_size=4, partition="cpu", memory="300MiB", cpus=2, gpus=0, time="0:10:00"
    )
    assert done.path.parent == work.folder / "many"
    work.check()
    assert {note.read_text() for note in work.notes.iterdir()} == {"2"}  # threads
    assert not work.plan.work.exists()


def test_elements_have_the_gpus_and_logs_that_were_asked_for(work: Work) -> None:
    options = {"slurm_setup": ["echo gpus $SLURM_GPUS_ON_NODE cpus $SLURM_CPUS_PER_TASK memory $SLURM_MEM_PER_NODE"]}
    actshard.run(
        work.plan, on="slurm", array_size=1, gpus=1, cpus=3, memory="200MiB", logs=str(work.folder / "logs"),
        slurm_options=options,
    )  # fmt: skip
    work.check()
    assert "gpus 1 cpus 3 memory 200" in log(work.folder / "logs")


def test_what_slurm_refuses_is_an_error_at_once(work: Work) -> None:
    for options, why in (
        ({"partition": "none"}, "expected options that Slurm accepts, found: .*invalid partition"),
        ({"memory": "10TiB"}, "expected options that Slurm accepts, found: .*Memory specification"),
        ({"gpus": 64}, "expected options that Slurm accepts"),
        ({"slurm_options": {"slurm_nonsense": 1}}, "slurm_options: .*nonsense"),
        ({"time": "soon"}, "time: expected minutes"),
    ):
        with pytest.raises(actshard.ArgumentError, match=why):
            actshard.run(work.plan, on="slurm", **options)  # type: ignore[arg-type]  # that is the test
    assert not running()
    assert work.begun() == set()


def test_cancelled_elements_are_run_again(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOWLY", "1")  # an element lives for some seconds after scancel
    cancelling = when(lambda: len(work.begun()) >= 3, lambda: ask("scancel", running()[0]))
    with pytest.raises(
        actshard.TasksFailedError, match=r"element \d+_\d of the array ended as .*; its log /.*\.err: ."
    ) as failed:
        actshard.run(work.plan, on="slurm", array_size=2, keep_going=True)
    cancelling.join()
    assert all(isinstance(error, actshard.LostWorkerError) for error in failed.value.errors.values())
    assert set(failed.value.errors) == set(work.plan.left())
    assert 0 < len(work.plan.left()) < len(work.plan)
    actshard.run(work.plan, on="slurm", array_size=4)
    work.check()


def test_retries_run_the_tasks_of_cancelled_elements(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOWLY", "1")
    cancelling = when(lambda: len(work.begun()) >= 3, lambda: ask("scancel", *running()))
    actshard.run(work.plan, on="slurm", array_size=2, retries=1)
    cancelling.join()
    assert len(list(work.notes.iterdir())) > len(work.plan)  # some began twice
    work.check()


@pytest.mark.parametrize("how", ["requeued", "preempted"])
def test_elements_that_lose_their_node_are_queued_again(work: Work, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOWLY", "1")

    def take() -> None:
        if how == "requeued":
            ask("scontrol", "requeue", running()[0])
        else:
            ask("scancel", "--signal=USR2", running()[0])  # what Slurm sends some time before

    taking = when(lambda: len(work.begun()) >= 3, take)
    actshard.run(work.plan, on="slurm", array_size=2, time=60)
    taking.join()
    jobs = {note.name.rpartition(".")[0] for note in work.notes.iterdir()}
    assert len(jobs) == len(work.plan) + 1  # one task began twice, in another process
    work.check()


def test_a_driver_that_was_killed_is_started_again(work: Work) -> None:
    options = ("--on", "slurm", "-o", "array_size=3")
    driver = work.driver(*options)
    wait_until(lambda: len(work.begun()) >= 2, "tasks")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert running()
    left = work.plan.left()
    assert left
    assert work.driver(*options).wait(PATIENCE) == 0
    work.check()
    assert not running()  # nor those of the first driver
    assert not work.plan.work.exists()


def test_a_driver_may_run_in_a_job(work: Work) -> None:
    """Its variables, such as memory by processor, contradict those of the array."""
    command = f"{ACTSHARD} run {work.file} --on slurm -o array_size=2 -o memory=200MiB -o cpus=2"
    submitted("--mem-per-cpu=300", "--ntasks=2", "--cpus-per-task=1", "--array=1-1", "--wrap", command)
    wait_until(lambda: not running(), "the driver")
    assert not work.plan.left(), log(work.folder)
    work.check()
    assert {note.read_text() for note in work.notes.iterdir()} == {"2"}  # threads


def test_an_error_of_a_task_cancels_the_other_elements(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_work import planned

    monkeypatch.syspath_prepend(work.folder)
    sys.modules.pop("engine_captured", None)
    plan: Any = planned(work.folder / "made", "fails")
    with pytest.raises(actshard.TasksFailedError, match="example 5") as failed:
        actshard.run(plan, on="slurm", array_size=4)
    assert set(failed.value.errors) == {1}
    wait_until(lambda: not running(), "the array")
    with pytest.raises(actshard.TasksFailedError, match="example 5"):
        actshard.run(plan, on="slurm", array_size=4, keep_going=True)
    assert plan.left() == [1]
