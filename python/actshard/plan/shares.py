"""Which share of a plan's tasks a process has, from what its launcher tells it.

====================  ==========================================================================
torchrun, accelerate  ``RANK``, ``WORLD_SIZE``
Open MPI              ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``
Slurm, ``srun``       ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` (or ``SLURM_NTASKS``)
Slurm, array jobs     ``SLURM_ARRAY_TASK_ID``, ``_COUNT``, ``_MIN``, ``_STEP``; times one of the above
Ray Train             the train context, if ``ray`` is imported and the process is a worker of a training
JAX                   ``jax.process_index()``, ``jax.process_count()``, if ``jax`` is imported
====================  ==========================================================================

The first that is found counts, because launchers start launchers: torchrun in each task of srun, or MPI in a step of Slurm. Without
any, the process has all tasks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from actshard.errors import ArgumentError

_LAUNCHERS = (
    ("RANK", ("WORLD_SIZE",)),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)


def of_environment() -> tuple[int, int]:
    """Returns (number of this process, number of processes).

    Raises:
        ArgumentError: a variable is no number, a process number is not below the number of processes, or one of RANK and
            WORLD_SIZE is missing.
    """
    inner = _launched()
    array = _array()
    if array is not None and not (inner and _counts_elements(inner, array)):
        inner = inner or (0, 1)
        return array[0] * inner[1] + inner[0], array[1] * inner[1]
    found = inner or _ray() or _jax()
    if found is None and array is None:
        _check_pair("RANK", "WORLD_SIZE")
    return found or (0, 1)


def _counts_elements(inner: tuple[int, int], array: tuple[int, int]) -> bool:
    """Whether RANK counts the processes of all elements of an array job, and not those of one.

    Taken for that by mistake, a process does a share too large, and no task is left out.
    """
    if not os.environ.get("RANK"):
        return False
    if os.environ.get("GROUP_WORLD_SIZE"):  # torchrun, of so many machines: more than one element has
        nodes = _number("SLURM_JOB_NUM_NODES") if os.environ.get("SLURM_JOB_NUM_NODES") else 1
        return _number("GROUP_WORLD_SIZE") > nodes
    # A script's own: export RANK=$SLURM_ARRAY_TASK_ID WORLD_SIZE=$SLURM_ARRAY_TASK_COUNT
    return "LOCAL_RANK" not in os.environ and inner == array


def _launched() -> tuple[int, int] | None:
    for rank, sizes in _LAUNCHERS:
        size = next((name for name in sizes if os.environ.get(name)), None)
        if size is None or not os.environ.get(rank):
            continue
        if rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in os.environ and "SLURM_JOB_ID" in os.environ:
            continue  # a batch script itself: one process, whatever the job's number of tasks is
        return _checked(rank, _number(rank), size, _number(size))
    return None


def _array() -> tuple[int, int] | None:
    """The place of a Slurm array job's element."""
    if not os.environ.get("SLURM_ARRAY_TASK_ID") or not os.environ.get("SLURM_ARRAY_TASK_COUNT"):
        return None
    element, count = _number("SLURM_ARRAY_TASK_ID"), _number("SLURM_ARRAY_TASK_COUNT")
    first = _number("SLURM_ARRAY_TASK_MIN") if os.environ.get("SLURM_ARRAY_TASK_MIN") else 0
    step = max(_number("SLURM_ARRAY_TASK_STEP"), 1) if os.environ.get("SLURM_ARRAY_TASK_STEP") else 1
    index, odd = divmod(element - first, step)
    if odd or not 0 <= index < count:
        raise ArgumentError(
            f"SLURM_ARRAY_TASK_ID: expected one of {count} numbers from {first} in steps of {step}, found {element}: of an array "
            "with gaps, run the task of this number instead of a share"
        )
    return index, count


def _ray() -> tuple[int, int] | None:
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
        index, count = context.get_world_rank(), context.get_world_size()
    except Exception:  # no worker of a training: ray's errors differ by version
        return None
    return (int(index), int(count)) if index is not None and count else None


def _jax() -> tuple[int, int] | None:
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return None
    return int(jax.process_index()), int(jax.process_count())


def _check_pair(rank: str, size: str) -> None:
    """Raises ArgumentError if only one is set: each process of a job would do all tasks."""
    if bool(os.environ.get(rank)) != bool(os.environ.get(size)):
        there, lacking = (rank, size) if os.environ.get(rank) else (size, rank)
        raise ArgumentError(
            f"{there}: expected {lacking} beside it in the environment, found none: set both, or unset {there}, or name the tasks"
        )


def _number(name: str) -> int:
    text = os.environ[name].strip()
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise ArgumentError(f"{name}: expected a number, found {text!r:.40} in the environment")
    return int(text)


def _checked(rank: str, index: int, size: str, count: int) -> tuple[int, int]:
    if index >= count:
        raise ArgumentError(f"{rank}: expected a number below {size}={count}, found {index} in the environment")
    return index, count
