"""Plans on Ray, Dask and submitit (make test-engines): results are those of one process, also if nodes and workers are killed."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import actshard
from actshard.plan.runners.tasks import Element, outcomes_at, plan_file
from engine_work import N, Work, converted, environment, files, planned
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.engines


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("engine_captured", None)
    return tmp_path / "notes"


def check(tmp_path: Path, run: Callable[[actshard.plan.Plan], Any]) -> None:
    """What an engine extracted has every row; what it converts has the bytes of one process."""
    run(planned(tmp_path / "made"))
    store = actshard.open(tmp_path / "made")
    assert store.num_examples == N
    for n in range(N):
        assert (store.sequence(n, 1) == n).all()
    actshard.run(converted(tmp_path / "made", tmp_path / "one"))
    plan = converted(tmp_path / "made", tmp_path / "many")
    assert len(plan) > 5
    run(plan)
    assert files(tmp_path / "many") == files(tmp_path / "one")


def after_notes(notes: Path, count: int, then: Callable[[], object]) -> threading.Thread:
    """Calls a function when so many tasks have begun."""

    def wait() -> None:
        while len(list(notes.iterdir())) < count:
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def work(notes: Path, tmp_path: Path) -> Work:
    return Work(tmp_path)


@contextmanager
def ray_cluster(**first: Any) -> Iterator[Any]:
    """Three nodes: the head, and two of two processors each; ``first`` are resources of the first of them."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=2, **first)
    cluster.add_node(num_cpus=2)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_ray_finishes_when_a_node_is_killed(notes: Path, tmp_path: Path) -> None:
    with ray_cluster() as cluster:
        import ray

        node = next(iter(cluster.worker_nodes))
        killing = after_notes(notes, 3, lambda: cluster.remove_node(node, allow_graceful=False))
        check(tmp_path, lambda plan: actshard.run(plan, on="ray", memory=1, retries=3))
        killing.join(PATIENCE)
        wait_until(
            lambda: sum(node["Alive"] for node in ray.nodes()) == 2, "the node's death"
        )  # health checks take some seconds
        plan = planned(tmp_path / "failing", "fails")
        with pytest.raises(actshard.TasksFailedError, match="example 5") as failed:
            actshard.run(plan, on="ray", keep_going=True)
        assert set(failed.value.errors) == {1}
        assert plan.left() == [1]


def test_ray_refuses_what_no_node_has_and_cancels_after_an_error(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_cluster(num_gpus=1, memory=3 << 30, resources={"nvme": 2}):
        for options, why in (
            ({"memory": "900TiB"}, "memory: expected at most [0-9,]+, the most that a machine of this Ray cluster has"),
            ({"cpus": 3}, "cpus: expected at most 2, .* found 3"),
            ({"gpus": 2}, "gpus: expected at most 1, .* found 2"),
            ({"ray_options": {"resources": {"tape": 1}}}, "tape: expected at most 0, .* found 1"),
            ({"cpus": -1}, "cpus: expected a number"),
        ):
            with pytest.raises(actshard.ArgumentError, match=why):
                actshard.run(work.plan, on="ray", **options)  # type: ignore[arg-type]  # that is the test
        large = dataclasses.replace(work.plan, predicted=dataclasses.replace(work.plan.predicted, memory=1 << 50))
        with pytest.raises(actshard.ArgumentError, match=r"memory: .*which the plan predicts: plan more tasks"):
            actshard.run(large, on="ray")
        assert not (work.folder / "many").exists()
        plan = planned(work.folder / "failing", "fails")
        with pytest.raises(actshard.TasksFailedError, match="example 5") as failed:
            actshard.run(plan, on="ray", in_flight=4)
        assert set(failed.value.errors) == {1}
        assert len(list(work.notes.iterdir())) < len(plan) - 1
        actshard.run(work.plan, on="ray", cpus=2, gpus=0.5, ray_options={"resources": {"nvme": 1}})
        work.check()


def test_a_killed_driver_of_ray_is_started_again(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOWLY", "0.5")
    with ray_cluster() as cluster:
        work.finish_after_a_kill("--on", "ray", "-o", f"address={cluster.address}", "-o", "cpus=1")
        assert {note.read_text() for note in work.notes.iterdir()} == {"1"}  # threads


def shares_of(notes: Path) -> list[str]:
    return sorted(note.name for note in notes.glob("share.*"))


def test_workers_of_ray_train_have_shares(notes: Path) -> None:
    pytest.importorskip("ray")
    trainer = pytest.importorskip("ray.train.v2.api.data_parallel_trainer")  # of ray[train]; TorchTrainer is one
    import ray
    from ray.train import ScalingConfig

    def loop() -> None:
        from actshard.plan.plan import of_environment

        index, count = of_environment()
        (Path(os.environ["NOTES"]) / f"share.{index}.{count}").touch()

    ray.init(num_cpus=3, log_to_driver=False)
    try:
        settings = ray.train.RunConfig(storage_path=str(notes.parent / "results"))
        trainer.DataParallelTrainer(loop, scaling_config=ScalingConfig(num_workers=2), run_config=settings).fit()
    finally:
        ray.shutdown()
    assert shares_of(notes) == ["share.0.2", "share.1.2"]


def test_processes_of_mpi_have_shares(notes: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    code = "from actshard.plan.plan import *; import pathlib; pathlib.Path('share.%d.%d' % of_environment()).touch()"
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-c", code]
    subprocess.run(words, check=True, cwd=notes, timeout=PATIENCE)
    assert shares_of(notes) == ["share.0.3", "share.1.3", "share.2.3"]


@contextmanager
def dask_cluster(**options: Any) -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, **options}
    with distributed.LocalCluster(**settings) as cluster:
        yield cluster


def test_dask_finishes_when_a_worker_is_killed(notes: Path, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with dask_cluster() as cluster, distributed.Client(cluster) as client:
        pids = list(client.run(os.getpid).values())
        killing = after_notes(notes, 3, lambda: os.kill(pids[0], signal.SIGKILL))
        check(tmp_path, lambda plan: actshard.run(plan, on="dask", scheduler=client, retries=3))
        killing.join(PATIENCE)
        assert pids[0] not in client.run(os.getpid).values()
        plan = planned(tmp_path / "failing", "fails")
        with pytest.raises(actshard.TasksFailedError, match="example 5") as failed:
            actshard.run(plan, on="dask", scheduler=cluster.scheduler_address, keep_going=True)
        assert set(failed.value.errors) == {1}


def test_dask_refuses_what_no_worker_has_and_sends_none_after_an_error(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOWLY", "0.2")
    with dask_cluster(threads_per_worker=3, memory_limit="1GiB", resources={"GPU": 1}) as cluster:
        address = cluster.scheduler_address
        for options, why in (
            (
                {"memory": "2GiB"},
                "memory: expected at most 1,073,741,824, the most that a machine of this Dask cluster has",
            ),
            ({"resources": {"GPU": 2}}, "GPU: expected at most 1, .* found 2"),
            ({"resources": {"TAPE": 1}}, "TAPE: expected at most 0, .* found 1"),
        ):
            with pytest.raises(actshard.ArgumentError, match=why):
                actshard.run(work.plan, on="dask", scheduler=address, **options)  # type: ignore[arg-type]  # that is the test
        assert not (work.folder / "many").exists()
        plan = planned(work.folder / "failing", "fails")
        with pytest.raises(actshard.TasksFailedError, match="example 5") as failed:
            actshard.run(plan, on="dask", scheduler=address, in_flight=4)
        assert set(failed.value.errors) == {1}
        assert len(list(work.notes.iterdir())) < len(plan) - 1
        actshard.run(work.plan, on="dask", scheduler=address, resources={"GPU": 1}, memory="700MiB")
        work.check()
        assert {note.read_text() for note in work.notes.glob("*.*.*")} == {"3"}  # threads, of conversions


def test_a_killed_driver_of_dask_is_started_again(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOWLY", "0.5")
    with dask_cluster() as cluster:
        work.finish_after_a_kill("--on", "dask", "-o", f"scheduler={cluster.scheduler_address}")


def test_submitit_runs_an_array(notes: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    check(tmp_path, lambda plan: actshard.run(plan, on="slurm", cluster="local", array_size=3))
    plan = planned(tmp_path / "failing", "fails")
    with pytest.raises(actshard.TasksFailedError, match="example 5") as failed:
        actshard.run(plan, on="slurm", cluster="local", array_size=2, logs=str(tmp_path / "logs"), keep_going=True)
    assert set(failed.value.errors) == {1}
    assert list((tmp_path / "logs").iterdir())


def test_an_element_is_queued_again_as_long_as_it_gets_on(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of no minutes, time is up at every signal. In task 1 comes one, and submitit's handler calls checkpoint."""
    pytest.importorskip("submitit")
    file, tasks = plan_file(work.plan), [0, 1, 2]
    queued: list[Any] = []

    def outcomes(file: str, some: list[int]) -> list[dict[str, Any]]:
        if some == [1]:
            queued.append(running.checkpoint(file, tasks))
            raise SystemExit
        return outcomes_at(file, some)

    monkeypatch.setattr("actshard.plan.runners.tasks.outcomes_at", outcomes)
    running = Element(0)
    with pytest.raises(SystemExit):
        running(file, tasks)
    assert work.plan.book.done() == {0}
    (again,) = queued
    assert again.args == (file, tasks)
    running = pickle.loads(pickle.dumps(again.function))
    said = running(file, tasks)  # task 0 was done before
    assert [each["task"] for each in said] == tasks
    assert [each.get("error") for each in said] == [None, "UnfinishedError", "UnfinishedError"]
    assert len(queued) == 1
    assert not list((work.plan.work / "attempts").iterdir())
