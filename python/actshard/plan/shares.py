"""Rank and number of processes, from the environment that a launcher sets: they determine a process's share of the tasks.

====================  ==========================================================================
torchrun, accelerate  ``RANK``, ``WORLD_SIZE``
Open MPI              ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``
Slurm, ``srun``       ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` (or ``SLURM_NTASKS``)
Slurm, array jobs     ``SLURM_ARRAY_TASK_ID``, ``_COUNT``, ``_MIN``, ``_STEP``; times one of the above
Ray Train             the train context, if ``ray.train`` is imported and the process is a training worker
JAX                   ``jax.process_index()``, ``jax.process_count()``, if ``jax`` is imported
====================  ==========================================================================

The first launcher in this table that is found is used, because launchers start launchers: torchrun in each task of srun, or MPI in
a Slurm step. Without a launcher, the process has all tasks.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from actshard.base.errors import ArgumentError

if TYPE_CHECKING:
    from types import ModuleType

_LAUNCHERS = (
    ("RANK", ("WORLD_SIZE",)),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)


def of_environment() -> tuple[int, int]:
    """Returns (number of this process, number of processes).

    Raises:
        ArgumentError: a variable is not a number, a rank is not below the number of processes, or only one of RANK and WORLD_SIZE
            is set.
    """
    inner = _launched()
    array = _array()
    if array is not None and not (inner and _counts_elements(inner, array)):
        inner = inner or (0, 1)
        return array[0] * inner[1] + inner[0], array[1] * inner[1]
    share = inner or _ray() or _jax()
    if share is None and array is None:
        _check_pair("RANK", "WORLD_SIZE")
    return share or (0, 1)


def _counts_elements(inner: tuple[int, int], array: tuple[int, int]) -> bool:
    """Whether RANK counts the processes of all elements of an array job, not those of one element.

    A wrong True only makes shares larger than necessary; no task is left out.
    """
    if not os.environ.get("RANK"):
        return False
    if os.environ.get("GROUP_WORLD_SIZE"):  # torchrun's number of machines: more than one element has
        nodes = _number("SLURM_JOB_NUM_NODES") if os.environ.get("SLURM_JOB_NUM_NODES") else 1
        return _number("GROUP_WORLD_SIZE") > nodes
    # Set by a user's script: export RANK=$SLURM_ARRAY_TASK_ID WORLD_SIZE=$SLURM_ARRAY_TASK_COUNT
    return "LOCAL_RANK" not in os.environ and inner == array


def _launched() -> tuple[int, int] | None:
    for rank, sizes in _LAUNCHERS:
        size = next((name for name in sizes if os.environ.get(name)), None)
        if size is None or not os.environ.get(rank):
            continue
        if rank == "SLURM_PROCID" and "SLURM_STEP_ID" not in os.environ and "SLURM_JOB_ID" in os.environ:
            continue  # a batch script itself is one process, for any number of tasks of the job
        return _checked(rank, _number(rank), size, _number(size))
    return None


def _array() -> tuple[int, int] | None:
    """Position of this element in its Slurm array job, and number of elements."""
    if not os.environ.get("SLURM_ARRAY_TASK_ID") or not os.environ.get("SLURM_ARRAY_TASK_COUNT"):
        return None
    element, count = _number("SLURM_ARRAY_TASK_ID"), _number("SLURM_ARRAY_TASK_COUNT")
    first = _number("SLURM_ARRAY_TASK_MIN") if os.environ.get("SLURM_ARRAY_TASK_MIN") else 0
    step = max(_number("SLURM_ARRAY_TASK_STEP"), 1) if os.environ.get("SLURM_ARRAY_TASK_STEP") else 1
    index, odd = divmod(element - first, step)
    if odd or not 0 <= index < count:
        raise ArgumentError(
            f"SLURM_ARRAY_TASK_ID: expected one of {count} numbers from {first} in steps of {step}, found {element}: for an array "
            "with gaps, run the task of this number (--task $SLURM_ARRAY_TASK_ID) instead of a share"
        )
    return index, count


def _ray() -> tuple[int, int] | None:
    train: ModuleType | None = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
        index, count = context.get_world_rank(), context.get_world_size()
    except Exception:  # not a training worker; the error's type depends on ray's version
        return None
    return (int(index), int(count)) if index is not None and count else None


def _jax() -> tuple[int, int] | None:
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return None
    return int(jax.process_index()), int(jax.process_count())


def _check_pair(rank: str, size: str) -> None:
    """Raises ArgumentError if only one is set: otherwise each process of a job would run all tasks."""
    if bool(os.environ.get(rank)) != bool(os.environ.get(size)):
        present, lacking = (rank, size) if os.environ.get(rank) else (size, rank)
        raise ArgumentError(
            f"{present}: expected {lacking} in the environment too, found none: set both, or unset {present}, or name the tasks"
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
