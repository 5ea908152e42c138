"""Tasks on a Dask cluster. Dask runs a task again if its worker died; ``retries=`` of the run is for errors of tasks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from actshard import _arguments
from actshard.errors import LostWorkerError, MissingExtraError
from actshard.plan.plan import Plan
from actshard.runners import capacity
from actshard.runners.tasks import Heard, lost, outcomes_at, plan_file


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
    """Runs tasks on a Dask cluster; see :class:`actshard.runners.Engine`.

    Args:
        plan: the plan; all workers see its paths.
        tasks: numbers.
        heard: called with how each ended.
        keep_going: go on after one failed. Otherwise no other begins.
        scheduler: an address such as ``"tcp://host:8786"``, or a ``distributed.Client``; None: workers on this machine.
        memory: of a task, such as ``"4GiB"``; None: what the plan predicts. A worker has room for ``memory_limit / memory`` tasks.
        resources: of a task, by the workers' names for them, such as ``{"GPU": 1}``.
        in_flight: most tasks that Dask has at a time; None: twice as many as it has room for, or as many if memory is short.

    Raises:
        ArgumentError: there are workers, and none has room for a task.
    """
    size = plan.predicted.memory if memory is None else _arguments.size(memory, "memory")
    needed = {"threads": 1, "memory": size, **(resources or {})}
    asked = None if in_flight is None else _arguments.whole(in_flight, "in_flight", 1, capacity.MOST_IN_FLIGHT)
    try:
        import distributed
    except ImportError as error:
        raise MissingExtraError.of("running a plan on Dask", "dask") from error
    ours = not isinstance(scheduler, distributed.Client)
    client = distributed.Client(scheduler, set_as_default=False) if ours else scheduler
    waiting = list(reversed(tasks))
    sent: dict[Any, int] = {}
    try:
        workers = _workers(client)
        if workers:  # otherwise they come when there is work
            capacity.check("Dask", workers, needed, memory is None)
        # Dask does not count memory: where it is short, no more are sent than have room.
        short = any(worker["threads"] * size > worker["memory"] for worker in workers)
        free = capacity.Capacity(lambda: _workers(client), needed, asked, spare=not short)
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
            said = _said(plan, sent.pop(future), future)
            heard(said)
            if "error" in said and not keep_going:
                return
            send()
    finally:
        client.cancel(list(sent))
        if ours:
            client.close()


def _outcomes(file: str, tasks: list[int]) -> list[dict[str, Any]]:
    """In a worker: its tasks share as many threads as it has."""
    import distributed

    return outcomes_at(file, tasks, distributed.get_worker().state.nthreads)


def _said(plan: Plan, task: int, future: Any) -> Mapping[str, Any]:
    failure = future.exception()
    if failure is not None:
        return lost(task, LostWorkerError(f"Dask could not run it: {failure!r}", path=plan.work))
    (said,) = future.result()
    return dict(said)


def _workers(client: Any) -> list[dict[str, float]]:
    """What the workers have for tasks, by names of options."""
    # Some versions return few workers unless asked for all, others know no such argument.
    every = {"n_workers": -1} if "n_workers" in inspect.signature(client.scheduler_info).parameters else {}
    found = client.scheduler_info(**every)["workers"].values()
    return [
        {"threads": w["nthreads"], "memory": w["memory_limit"] or math.inf, **w.get("resources", {})} for w in found
    ]
