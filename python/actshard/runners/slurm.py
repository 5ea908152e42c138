"""Tasks as an array job of Slurm, by submitit. A requeued job runs again what is not done."""

from __future__ import annotations

from collections.abc import Sequence
from time import sleep
from typing import Any

from actshard import _arguments
from actshard.errors import ArgumentError, InternalError, MissingExtraError
from actshard.plan.plan import Plan
from actshard.runners.tasks import Heard, lost, outcomes_at, plan_file

_POLL_SECONDS = 2.0
_PLAIN = ("partition", "account", "qos")


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
    time: int = 60,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    slurm_options: dict[str, Any] | None = None,
    logs: str | None = None,
    cluster: str = "slurm",
) -> None:
    """Runs tasks in an array job of Slurm, and waits for it; see :class:`actshard.runners.Engine`.

    Args:
        plan: the plan; all nodes see its paths.
        tasks: numbers.
        heard: called with how each ended.
        keep_going: go on after one failed. Otherwise the other elements of the array are cancelled.
        array_size: number of elements of the array: element i runs tasks i, i + array_size, ...
        cpus: of an element.
        gpus: of an element.
        memory: of an element, such as ``"4GiB"``; None: what the plan predicts.
        time: limit of an element, in minutes.
        partition: where.
        account: whose.
        qos: quality of service.
        slurm_options: further options by submitit's names, such as ``{"slurm_constraint": "a100"}``.
        logs: the folder of submitit's logs, which all nodes see; None: ``PLAN's working folder + "-logs"``.
        cluster: ``"slurm"``, or ``"local"`` for processes of this machine.
    """
    count = min(_arguments.whole(array_size, "array_size", 1, 100_000), len(tasks))
    needed = plan.predicted.memory if memory is None else _arguments.size(memory, "memory")
    if not _arguments.is_one_of(cluster, ("slurm", "local")):
        raise ArgumentError(f"cluster: expected 'slurm' or 'local', found {cluster!r}")
    try:
        import submitit
    except ImportError as error:
        raise MissingExtraError.of("running a plan on Slurm", "slurm") from error
    file = plan_file(plan)
    executor = submitit.AutoExecutor(folder=logs or f"{plan.work}-logs", cluster=cluster)
    executor.update_parameters(timeout_min=time, cpus_per_task=cpus, gpus_per_node=gpus, name=f"actshard-{plan.id[:8]}")
    if cluster == "slurm":
        own = {f"slurm_{n}": v for n, v in zip(_PLAIN, (partition, account, qos), strict=True) if v is not None}
        memory_mb = -(-needed // (1 << 20))
        executor.update_parameters(slurm_mem=f"{memory_mb}M", slurm_array_parallelism=count, **own)
    executor.update_parameters(**(slurm_options or {}))
    shares = [list(tasks[i::count]) for i in range(count)]
    jobs = executor.map_array(outcomes_at, [file] * count, shares)
    left = dict(zip(jobs, shares, strict=True))
    try:
        while left:
            ended = [job for job in left if job.done()]
            for job in ended:
                said = _said(job, left.pop(job), plan)
                for each in said:
                    heard(each)
                if any("error" in each for each in said) and not keep_going:
                    return
            if not ended:
                sleep(_POLL_SECONDS)
    finally:
        for job in left:
            job.cancel(check=False)


def _said(job: Any, share: list[int], plan: Plan) -> list[Any]:
    """How the tasks of an element ended; of those that a lost element finished, the working folder tells."""
    error = job.exception()
    if error is None:
        return list(job.result())
    done = plan.book.done()
    why = f"job {job.job_id} ended as {job.state}: {str(error).strip().splitlines()[-1] if str(error).strip() else error!r}"
    return [
        {"task": task, "bytes": 0} if task in done else lost(task, InternalError(why, path=plan.work)) for task in share
    ]
