"""Runs tasks on a Dask cluster. Dask itself runs a task again if its worker dies; ``retries=`` is for errors of tasks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from actshard.base import _arguments
from actshard.base.errors import LostWorkerError, MissingExtraError
from actshard.plan.plan import Plan
from actshard.plan.runners import capacity
from actshard.plan.runners.tasks import Heard, lost, outcomes_at, plan_file

if TYPE_CHECKING:
    import distributed


def execute(
    plan: Plan,
    tasks: Sequence[int],
    heard: Heard,
    *,
    keep_going: bool,
    scheduler: Any = None,
    memory: int | str | None = None,
    resources: Mapping[str, float] | None = None,
    in_flight: int | None = None,
) -> None:
    """Runs tasks on a Dask cluster; see :class:`actshard.plan.runners.Engine`.

    Args:
        plan: the plan; all workers must see its paths.
        tasks: task numbers.
        heard: called with the outcome of each task.
        keep_going: continue after a failure. If False, no further task is started.
        scheduler: an address such as ``"tcp://host:8786"``, or a ``distributed.Client``; None: workers on this machine.
        memory: memory of a task, such as ``"4GiB"``; None: as predicted. ``memory_limit / memory`` tasks fit on a worker.
        resources: resources of a task, with the workers' names, such as ``{"GPU": 1}``.
        in_flight: maximum number of tasks sent to Dask at a time; None: twice as many as fit, or as many as fit if memory limits
            them.

    Raises:
        ArgumentError: there are workers, but a task fits on none of them.
    """
    size = plan.predicted.memory if memory is None else _arguments.size(memory, "memory")
    needed = {"threads": 1, "memory": size, **(resources or {})}
    limit = None if in_flight is None else _arguments.whole(in_flight, "in_flight", 1, capacity.MOST_IN_FLIGHT)
    try:
        import distributed
    except ImportError as error:
        raise MissingExtraError.of("running a plan on Dask", "dask") from error
    ours = not isinstance(scheduler, distributed.Client)
    client = distributed.Client(scheduler, set_as_default=False) if ours else scheduler
    waiting = list(reversed(tasks))
    sent: dict[distributed.Future, int] = {}
    try:
        workers = _workers(client)
        if workers:  # otherwise the cluster adds them when there is work
            capacity.check("Dask", workers, needed, memory is None)
        # Dask does not schedule by memory: if memory limits the tasks, no spare tasks are sent.
        short = any(worker["threads"] * size > worker["memory"] for worker in workers)
        free = capacity.Capacity(lambda: _workers(client), needed, limit, spare=not short)
        file = plan_file(plan)
        ended = distributed.as_completed(loop=client.loop)

        def send() -> None:
            while waiting and len(sent) < free.tasks():
                task = waiting.pop()
                future = client.submit(_outcomes, file, [task], pure=False, resources=dict(resources or {}) or None)
                sent[future] = task
                ended.add(future)

        send()
        for future in ended:
            outcome = _outcome(plan, sent.pop(future), future)
            heard(outcome)
            if "error" in outcome and not keep_going:
                return
            send()
    finally:
        client.cancel(list(sent))
        if ours:
            client.close()


def _outcomes(file: str, tasks: list[int]) -> list[dict[str, object]]:
    """Runs tasks in a worker, with the worker's number of threads."""
    import distributed

    return outcomes_at(file, tasks, distributed.get_worker().state.nthreads)


def _outcome(plan: Plan, task: int, future: distributed.Future) -> Mapping[str, object]:
    failure = future.exception()
    if failure is not None:
        return lost(task, LostWorkerError(f"Dask could not run it: {failure!r}", path=plan.work))
    (outcome,) = future.result()
    return dict(outcome)


def _workers(client: distributed.Client) -> list[dict[str, float]]:
    """Resources of the workers, by names of options."""
    # Newer versions return only a few workers without n_workers=-1; older versions lack the argument.
    every = {"n_workers": -1} if "n_workers" in inspect.signature(client.scheduler_info).parameters else {}
    workers = client.scheduler_info(**every)["workers"].values()
    return [
        {"threads": w["nthreads"], "memory": w["memory_limit"] or math.inf, **w.get("resources", {})} for w in workers
    ]
