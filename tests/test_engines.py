"""Plans on Ray, Dask and submitit (make test-engines): results are those of one process, also if nodes and workers are killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import actshard
from engine_work import N, converted, environment, files, planned

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


def test_ray_finishes_when_a_node_is_killed(notes: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        killing = after_notes(notes, 3, lambda: cluster.remove_node(nodes[0], allow_graceful=False))
        check(tmp_path, lambda plan: actshard.run(plan, on="ray", memory=1, retries=3))
        killing.join(60)
        limit = time.monotonic() + 120
        while sum(node["Alive"] for node in ray.nodes()) > 2:  # health checks take some seconds
            assert time.monotonic() < limit, "the node lives"
            time.sleep(0.2)
        plan = planned(tmp_path / "failing", "fails")
        with pytest.raises(actshard.TasksFailedError, match="example 5") as failed:
            actshard.run(plan, on="ray", keep_going=True)
        assert set(failed.value.errors) == {1}
        assert plan.left() == [1]
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_dask_finishes_when_a_worker_is_killed(notes: Path, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        pids = list(client.run(os.getpid).values())
        killing = after_notes(notes, 3, lambda: os.kill(pids[0], signal.SIGKILL))
        check(tmp_path, lambda plan: actshard.run(plan, on="dask", scheduler=client, retries=3))
        killing.join(60)
        assert pids[0] not in client.run(os.getpid).values()
        plan = planned(tmp_path / "failing", "fails")
        with pytest.raises(actshard.TasksFailedError, match="example 5") as failed:
            actshard.run(plan, on="dask", scheduler=cluster.scheduler_address, keep_going=True)
        assert set(failed.value.errors) == {1}


def test_submitit_runs_an_array(notes: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    check(
        tmp_path,
        lambda plan: actshard.run(plan, on="slurm", cluster="local", array_size=3, logs=str(tmp_path / "logs")),
    )
    plan = planned(tmp_path / "failing", "fails")
    with pytest.raises(actshard.TasksFailedError, match="example 5") as failed:
        actshard.run(plan, on="slurm", cluster="local", array_size=2, logs=str(tmp_path / "logs"), keep_going=True)
    assert set(failed.value.errors) == {1}
