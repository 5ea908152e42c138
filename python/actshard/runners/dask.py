"""Tasks on a Dask cluster. Dask runs a task again if its worker died; ``retries=`` of the run is for errors of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actshard import _arguments
from actshard.errors import LostWorkerError, MissingExtraError
from actshard.plan.plan import Plan
from actshard.runners.tasks import Heard, lost, outcomes_at, plan_file

MOST_IN_FLIGHT = 10_000


def execute(
    plan: Plan,
    tasks: Sequence[int],
    heard: Heard,
    *,
    keep_going: bool,
    scheduler: Any = None,
    resources: Mapping[str, float] | None = None,
    in_flight: int = 1000,
) -> None:
    """Runs tasks on a Dask cluster; see :class:`actshard.runners.Engine`.

    Args:
        plan: the plan; all workers see its paths.
        tasks: numbers.
        heard: called with how each ended.
        keep_going: go on after one failed. Otherwise no other is sent, and those that were sent are finished.
        scheduler: an address such as ``"tcp://host:8786"``, or a ``distributed.Client``; None: workers on this machine.
        resources: of a task, by the workers' names for them, such as ``{"GPU": 1}``.
        in_flight: most tasks that Dask has at a time.
    """
    bound = _arguments.whole(in_flight, "in_flight", 1, MOST_IN_FLIGHT)
    try:
        import distributed
    except ImportError as error:
        raise MissingExtraError.of("running a plan on Dask", "dask") from error
    ours = not isinstance(scheduler, distributed.Client)
    client = distributed.Client(scheduler, set_as_default=False) if ours else scheduler
    file = plan_file(plan)
    waiting = list(reversed(tasks))
    ended = distributed.as_completed(loop=client.loop)
    sent: dict[Any, int] = {}

    def send() -> None:
        if waiting:
            task = waiting.pop()
            future = client.submit(outcomes_at, file, [task], pure=False, resources=dict(resources or {}) or None)
            sent[future] = task
            ended.add(future)

    try:
        for _ in range(min(bound, len(tasks))):
            send()
        for future in ended:
            task = sent.pop(future)
            failure = future.exception()
            if failure is None:
                (said,) = future.result()
            else:
                said = lost(task, LostWorkerError(f"Dask could not run it: {failure!r}", path=plan.work))
            heard(said)
            if "error" in said and not keep_going:
                waiting.clear()
            send()
    finally:
        if ours:
            client.close()
