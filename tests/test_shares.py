"""Which tasks a process of a job has, by what its launcher tells it: alone, in one another, and in contradiction."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import actshard
from actshard.plan import plan
from conftest import refuses

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "GROUP_RANK")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_")) or name in VARIABLES:
            monkeypatch.delenv(name)
    for module in ("jax", "ray.train"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))


def element(index: int, count: int, first: int = 0, step: int = 1, **more: Any) -> dict[str, Any]:
    """Variables of an element of an array job, and of its batch script."""
    names = {"ID": first + index * step, "COUNT": count, "MIN": first, "MAX": first + (count - 1) * step, "STEP": step}
    array = {f"SLURM_ARRAY_TASK_{name}": value for name, value in names.items()}
    return {"SLURM_JOB_ID": 90 + index, "SLURM_PROCID": 0, "SLURM_JOB_NUM_NODES": 1, **array, **more}


def step(rank: int, count: int) -> dict[str, Any]:
    """Variables of a process of srun."""
    return {"SLURM_PROCID": rank, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": count, "SLURM_NTASKS": 64}


def torchrun(rank: int, count: int, nodes: int = 1) -> dict[str, Any]:
    """Variables of a process of torchrun."""
    each = count // nodes
    group = {"GROUP_RANK": rank // each, "GROUP_WORLD_SIZE": nodes, "LOCAL_RANK": rank % each}
    return {"RANK": rank, "WORLD_SIZE": count, **group}


def mpi(rank: int, count: int) -> dict[str, Any]:
    return {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": count}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        (torchrun(3, 8), (3, 8)),
        (torchrun(13, 16, nodes=2), (13, 16)),
        (mpi(2, 3), (2, 3)),
        ({"SLURM_PROCID": 1, "SLURM_NTASKS": 4}, (1, 4)),
        (step(1, 4), (1, 4)),
        (element(5, 8), (5, 8)),
        (element(2, 3, first=10), (2, 3)),
        (element(2, 3, first=10, step=5), (2, 3)),
        # A batch script is one process, however many its job may start.
        ({"SLURM_JOB_ID": 7, "SLURM_PROCID": 0, "SLURM_NTASKS": 4}, (0, 1)),
        (element(1, 2, SLURM_NTASKS=4), (1, 2)),
        # A launcher in another one.
        ({**step(1, 2), **torchrun(13, 16, nodes=2)}, (13, 16)),
        ({**step(0, 1), **mpi(2, 3)}, (2, 3)),
        ({**mpi(2, 3), **torchrun(2, 3)}, (2, 3)),
        # In each element of an array.
        ({**element(1, 3), **step(1, 2)}, (3, 6)),
        ({**element(1, 3), **mpi(1, 2)}, (3, 6)),
        ({**element(1, 3), **torchrun(1, 4)}, (5, 12)),
        ({**element(1, 2), **torchrun(1, 2)}, (3, 4)),
        ({**element(1, 3, SLURM_JOB_NUM_NODES=2), **torchrun(5, 8, nodes=2)}, (13, 24)),
        # Over all elements of an array.
        ({**element(1, 3), **torchrun(5, 12, nodes=3)}, (5, 12)),
        ({**element(1, 3), "RANK": 1, "WORLD_SIZE": 3}, (1, 3)),
        # What another launcher tells counts, if RANK is not whole.
        ({"RANK": 1, **mpi(2, 3)}, (2, 3)),
        ({"WORLD_SIZE": 9, **step(2, 3)}, (2, 3)),
    ],
)
def test_a_process_finds_its_share(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any], expected: tuple[int, int]
) -> None:
    set_all(monkeypatch, environment)
    assert plan.of_environment() == expected


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"RANK": 8, "WORLD_SIZE": 8}, "RANK: expected a number below WORLD_SIZE=8, found 8"),
        ({"RANK": "x", "WORLD_SIZE": 8}, "RANK: expected a number, found 'x'"),
        ({"RANK": "-1", "WORLD_SIZE": 8}, "RANK: expected a number, found '-1'"),
        ({"RANK": 1}, "RANK: expected WORLD_SIZE in the environment too"),
        ({"WORLD_SIZE": 2}, "WORLD_SIZE: expected RANK in the environment too"),
        (mpi(3, 3), "OMPI_COMM_WORLD_RANK: expected a number below OMPI_COMM_WORLD_SIZE=3"),
        (step(4, 4), "SLURM_PROCID: expected a number below SLURM_STEP_NUM_TASKS=4"),
        # Of sbatch --array=3,7: Slurm tells steps of one.
        ({**element(0, 2, first=3), "SLURM_ARRAY_TASK_ID": 7}, "SLURM_ARRAY_TASK_ID: expected one of 2 numbers from 3"),
    ],
)
def test_contradictions_are_refused(monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any], why: str) -> None:
    set_all(monkeypatch, environment)
    with refuses(actshard.ArgumentError, None, why):
        plan.of_environment()


@pytest.mark.parametrize("elements", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize(
    "kind", ["torchrun in each", "torchrun over all", "srun", "MPI", "a script's RANK", "RANK in each"]
)
def test_no_task_is_left_out(kind: str, processes: int, elements: int) -> None:
    """Whatever a job looks like, its processes have all tasks; with one launcher's numbers, each once."""
    tasks = range(40)
    done: list[int] = []
    for e in range(elements):
        for p in range(processes):
            all_ranks = (e * processes + p, elements * processes)
            environment = {
                "torchrun in each": torchrun(p, processes),
                "torchrun over all": torchrun(*all_ranks, nodes=elements),
                "srun": step(p, processes),
                "MPI": mpi(p, processes),
                "a script's RANK": {"RANK": e, "WORLD_SIZE": elements} if p == 0 else None,
                "RANK in each": {"RANK": p, "WORLD_SIZE": processes},
            }[kind]
            if environment is None:
                continue
            with pytest.MonkeyPatch.context() as patch:
                set_all(patch, {**element(e, elements), **environment})
                index, count = plan.of_environment()
            done += tasks[index::count]
    assert set(done) == set(tasks)
    if kind != "RANK in each":
        assert len(done) == len(tasks)


def test_workers_of_ray_train_and_processes_of_jax_find_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def outside() -> Any:
        raise RuntimeError("no worker of a training")

    jax = SimpleNamespace(process_index=lambda: 1, process_count=lambda: 4)
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=outside))
    assert plan.of_environment() == (1, 4)
    context = SimpleNamespace(get_world_rank=lambda: 2, get_world_size=lambda: 3)
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=lambda: context))
    assert plan.of_environment() == (2, 3)
    set_all(monkeypatch, torchrun(5, 8))
    assert plan.of_environment() == (5, 8)
