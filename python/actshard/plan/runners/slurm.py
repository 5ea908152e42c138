"""Runs tasks as an array job of Slurm, with submitit. Preempted elements are queued again and run their unfinished tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import sleep
from typing import Any

from actshard.base import _arguments
from actshard.base.errors import ArgumentError, LostWorkerError, MissingExtraError
from actshard.plan.plan import Plan
from actshard.plan.runners import squeue
from actshard.plan.runners.tasks import Element, Heard, lost, plan_file

_POLL_SECONDS = 2.0
_MOST_REQUEUES = 10_000
"""Practically unlimited: an element that finishes no task in a run is not queued again (:mod:`actshard.plan.runners.tasks`)."""
_HINTS = {"TIMEOUT": ": ask for more time", "OUT_OF_MEMORY": ": ask for more memory"}


def execute(
    plan: Plan,
    tasks: Sequence[int],
    heard: Heard,
    *,
    keep_going: bool,
    array_size: int = 64,
    cpus: int = 1,
    gpus: int = 0,
    memory: int | str | None = None,
    time: int | str = 60,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    logs: str | None = None,
    slurm_options: dict[str, Any] | None = None,
    cluster: str = "slurm",
) -> None:
    """Runs tasks in an array job of Slurm, and waits for it; see :class:`actshard.plan.runners.Engine`.

    Args:
        plan: the plan; all nodes must see its paths.
        tasks: task numbers.
        heard: called with the outcome of each task.
        keep_going: continue after a failure. If False, the other elements of the array are cancelled.
        array_size: number of elements of the array: element i runs tasks i, i + array_size, ...
        cpus: processors of an element, and its number of threads.
        gpus: GPUs of an element.
        memory: memory of an element, such as ``"4GiB"``; None: as the plan predicts.
        time: time limit of an element: minutes, or Slurm's ``"4:00:00"`` or ``"1-12"``.
        partition: Slurm's partition.
        account: Slurm's account.
        qos: Slurm's quality of service.
        logs: folder for the elements' logs, which all nodes must see; None: in the plan's working folder, until the commit.
        slurm_options: further options with submitit's names, such as ``{"slurm_constraint": "a100"}``.
        cluster: ``"slurm"``, or ``"local"`` for processes on this machine.

    Raises:
        ArgumentError: an option is invalid, or Slurm rejects it.
    """
    count = min(_arguments.whole(array_size, "array_size", 1, 100_000), len(tasks))
    cpus, gpus = _arguments.whole(cpus, "cpus", 1, 100_000), _arguments.whole(gpus, "gpus", 0, 100_000)
    megabytes = -(-(plan.predicted.memory if memory is None else _arguments.size(memory, "memory")) // (1 << 20))
    limit = _arguments.minutes(time, "time")
    if not _arguments.is_one_of(cluster, ("slurm", "local")):
        raise ArgumentError(f"cluster: expected 'slurm' or 'local', found {cluster!r}")
    try:
        import submitit
    except ImportError as error:
        raise MissingExtraError.of("running a plan on Slurm", "slurm") from error
    real = cluster == "slurm"
    if real:
        squeue.check_installed()
    name = f"actshard-{plan.id[:8]}"
    options = {
        "timeout_min": limit,
        "cpus_per_task": cpus,
        "gpus_per_node": gpus or None,
        **(slurm_options or {}),
        "name": name,
    }
    if real:
        job_options = {
            "mem": f"{megabytes}M",
            "partition": partition,
            "account": account,
            "qos": qos,
            "array_parallelism": count,
        }
        # Since Slurm 22.05, srun does not inherit --cpus-per-task from its job.
        setup = [f"export SRUN_CPUS_PER_TASK={cpus} ACTSHARD_NUM_THREADS={cpus}", *options.get("slurm_setup", ())]
        options = {**{f"slurm_{n}": value for n, value in job_options.items()}, **options, "slurm_setup": setup}
    file, folder = plan_file(plan), _arguments.local_path(logs, "logs") if logs else plan.work / "logs"
    shares = [list(tasks[i::count]) for i in range(count)]
    try:
        executor = submitit.AutoExecutor(folder, cluster, slurm_max_num_timeout=_MOST_REQUEUES)
        executor.update_parameters(**options)
        with squeue.outside_of_jobs():
            jobs = executor.map_array(Element(limit), [file] * count, shares)
    except (NameError, AssertionError, ValueError) as error:
        raise ArgumentError(f"slurm_options: {error}") from error
    except submitit.core.utils.FailedJobError as error:
        raise ArgumentError(f"expected options that Slurm accepts, found: {' '.join(str(error).split())}") from error
    queue = squeue.Queue(job.job_id for job in jobs) if real else None
    _wait(plan, dict(zip(jobs, shares, strict=True)), heard, keep_going, queue)
    if real and not plan.left():
        squeue.clear(name)


def _wait(plan: Plan, jobs: dict[Any, list[int]], heard: Heard, keep_going: bool, queue: squeue.Queue | None) -> None:
    """Waits until all elements have ended, or without ``keep_going`` until one has failed; then cancels the others."""
    try:
        while jobs:
            over = {} if queue is None else queue.lost(job.job_id for job in jobs)
            ended = [
                job for job in jobs if job.job_id in over or (job.paths.result_pickle.exists() if queue else job.done())
            ]
            for job in ended:
                outcomes = _outcomes(plan, job, jobs.pop(job), over.get(job.job_id))
                for outcome in outcomes:
                    heard(outcome)
                if any("error" in outcome for outcome in outcomes) and not keep_going:
                    return
            if not ended:
                sleep(_POLL_SECONDS)
    finally:
        if jobs and queue is not None:
            queue.cancel()
        for job in jobs if queue is None else ():
            job.cancel(check=False)


def _outcomes(plan: Plan, job: Any, share: list[int], state: str | None) -> list[Any]:
    """Outcomes of an element's tasks. If the element was lost, the working folder shows which of them are done."""
    for folder in (job.paths.folder, plan.book.tasks):
        with contextlib.suppress(OSError):  # setting the mode makes network file systems refresh their listing
            folder.chmod(folder.stat().st_mode)
    if (state is None or job.paths.result_pickle.exists()) and job.exception() is None:
        return list(job.result())
    state = state or "FAILED"
    last = (job.stderr() or "").strip().rpartition("\n")[2]
    why = f"element {job.job_id} of the array ended as {state}{_HINTS.get(state, '')}; its log {job.paths.stderr}: {last:.300}"
    done_tasks = plan.book.done()
    return [
        {"task": task, "bytes": 0} if task in done_tasks else lost(task, LostWorkerError(why, path=plan.work))
        for task in share
    ]
