"""Tasks on a Ray cluster. Ray runs a task again if its machine or process died; ``retries=`` of the run is for errors of tasks."""

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
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    memory: int | str | None = None,
    in_flight: int = 1000,
    restarts: int = 3,
    ray_options: Mapping[str, Any] | None = None,
) -> None:
    """Runs tasks on a Ray cluster; see :class:`actshard.runners.Engine`.

    Args:
        plan: the plan; all nodes see its paths.
        tasks: numbers.
        heard: called with how each ended.
        keep_going: go on after one failed. Otherwise no other is sent, and those that were sent are finished.
        address: the cluster's, or ``"auto"``; None: the one that is connected, or a new one on this machine.
        cpus: of a task.
        gpus: of a task.
        memory: of a task, such as ``"4GiB"``; None: what the plan predicts.
        in_flight: most tasks that Ray has at a time.
        restarts: how often Ray runs a task again whose node or process died.
        ray_options: further options of ``ray.remote``, such as ``{"scheduling_strategy": "SPREAD"}``.
    """
    needed = plan.predicted.memory if memory is None else _arguments.size(memory, "memory")
    bound = _arguments.whole(in_flight, "in_flight", 1, MOST_IN_FLIGHT)
    again = _arguments.whole(restarts, "restarts", 0, 1000)
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError.of("running a plan on Ray", "ray") from error
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    resources = {"num_cpus": cpus, "num_gpus": gpus, "memory": needed, "max_retries": again}
    function = ray.remote(**{**resources, **(ray_options or {})})(outcomes_at)
    file = plan_file(plan)
    waiting = list(reversed(tasks))
    sent: dict[Any, int] = {}
    while waiting or sent:
        while waiting and len(sent) < bound:
            task = waiting.pop()
            sent[function.remote(file, [task])] = task
        for reference in ray.wait(list(sent), num_returns=1)[0]:
            task = sent.pop(reference)
            try:
                (said,) = ray.get(reference)
            except ray.exceptions.RayError as error:
                said = lost(task, LostWorkerError(f"Ray could not run it: {error}", path=plan.work))
            heard(said)
            if "error" in said and not keep_going:
                waiting.clear()
